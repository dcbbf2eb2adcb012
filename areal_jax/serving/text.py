"""Text of a growing response: token by token, with stop texts cut off.

Invariants:
* What is given out is final: no half of a character, nothing that a later token changes, nothing that may yet become a stop text.
* All parts together are ``tokenizer.decode`` of all tokens, however they come, up to the first stop text to be completed.
* A token's log-prob is given out with the text that it begins; tokens that begin behind a cut are not given out.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Sequence

from areal_jax.models.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"
WINDOW = 32
"""Tokens that are decoded anew for each further one, at most; without a break in the text (broken bytes only)."""
TAIL = 8
"""What is kept of a window without a break: a character has at most 4 bytes, and each token at least one."""
BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Vocabulary:
    """What the texts of a tokenizer's tokens are, and which of them leave a text open.

    Args:
      tokenizer: with a byte-level decoder, or with SentencePiece's pieces and byte tokens.
    """

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        backend = tokenizer.backend
        self._added = {token: entry.content for token, entry in backend.get_added_tokens_decoder().items()}
        self._special = {token for token, entry in backend.get_added_tokens_decoder().items() if entry.special}
        decoder = json.dumps(json.loads(backend.to_str()).get("decoder"))
        self._byte_level, byte_fallback = '"ByteLevel"' in decoder, '"ByteFallback"' in decoder
        found = ((token, BYTE.fullmatch(piece)) for piece, token in backend.get_vocab(with_added_tokens=True).items()) if byte_fallback else ()
        self._bytes = {token: bytes([int(match[1], 16)]) for token, match in found if match}

    def silent(self, token: int) -> bool:
        """Whether the token stands for no text: a special one, or one beyond the vocabulary."""
        return token in self._special or self.tokenizer.backend.id_to_token(token) is None

    def open(self, token: int) -> bool:
        """Whether the token is a byte whose reading depends on the bytes after it: such bytes are read together."""
        return token in self._bytes

    def bytes(self, token: int) -> bytes:
        """The bytes that a token stands for, those of special tokens being their names."""
        piece = self.tokenizer.backend.id_to_token(token)
        if piece is None:
            return b""
        if token in self._added:
            return self._added[token].encode()
        if token in self._bytes:
            return self._bytes[token]
        if self._byte_level:
            table = _byte_of_symbol()
            return bytes(table[symbol] for symbol in piece) if all(symbol in table for symbol in piece) else piece.encode()
        return piece.replace("▁", " ").encode()

    def text(self, token: int) -> str:
        """The token alone as text; bytes that are no text by themselves are written as OpenAI does, 'bytes:\\xe2\\x82'."""
        raw = self.bytes(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


@functools.cache
def _byte_of_symbol() -> dict[str, int]:
    """Byte-level BPE's alphabet (GPT-2): printable Latin-1 stands for itself, the other bytes in order for the symbols from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


class Detokenizer:
    """Text of tokens that come one by one."""

    def __init__(self, vocabulary: Vocabulary):
        self._vocabulary = vocabulary
        self._window: list[int] = []
        self._given = 0
        self._break = 0

    def push(self, token: int) -> str:
        """The text that is final with this token."""
        if self._vocabulary.silent(token):
            return ""
        self._window.append(token)
        if self._vocabulary.open(token):
            return ""
        text = self._vocabulary.tokenizer.decode(self._window)
        final = len(text) - text.endswith(REPLACEMENT)
        new = text[self._given : final]
        self._given = max(self._given, final)
        if final == len(text):
            if self._break:
                self._window = self._window[self._break :]
                self._given = len(self._vocabulary.tokenizer.decode(self._window))
            self._break = len(self._window)
        elif len(self._window) > WINDOW:
            self._window, self._break = self._window[-TAIL:], 0
            self._given = len(self._vocabulary.tokenizer.decode(self._window)) - 1
        return new

    def finish(self) -> str:
        """The rest, once no token follows."""
        text = self._vocabulary.tokenizer.decode(self._window)
        new, self._given = text[self._given :], len(text)
        return new


class StopTexts:
    """Cuts a text at the first stop text that is completed; of several completed by the same character the longest.

    Args:
      stops: not empty texts.
    """

    def __init__(self, stops: Sequence[str]):
        self._stops = tuple(stops)
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """The text that is certain to stay."""
        if self.stopped:
            return ""
        self._held += text
        ends = [(at + len(stop), at) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if ends:
            self.stopped = True
            kept, self._held = self._held[: min(ends)[1]], ""
            return kept
        keep = max((_overlap(self._held, stop) for stop in self._stops), default=0)
        kept, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return kept

    def finish(self) -> str:
        """What was held back and did not become a stop text."""
        kept, self._held = self._held, ""
        return kept


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that begins ``stop``."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if stop.startswith(text[-n:])), 0)


@dataclasses.dataclass(frozen=True)
class Part:
    """What a response has more of.

    Attributes:
      text: may be empty.
      tokens: the tokens whose text begins in what was given out so far, as (place in the response, offset of its text in characters).
    """

    text: str
    tokens: tuple[tuple[int, int], ...]


class ResponseText:
    """One response: detokenised, cut at a stop text, with its end named.

    Args:
      vocabulary: the tokenizer's.
      end_ids: tokens that end a response and are no part of its text.
      stops: stop texts.

    Attributes:
      tokens: how many tokens the response has, the ending one included, none behind a stop text.
      finish_reason: 'stop' or 'length' once it has ended.
    """

    def __init__(self, vocabulary: Vocabulary, end_ids: Sequence[int], stops: Sequence[str] = ()):
        self._detokenizer, self._stops = Detokenizer(vocabulary), StopTexts(stops)
        self._end_ids = frozenset(end_ids)
        self._detokenized = self._given = 0
        self._waiting: list[tuple[int, int]] = []
        self.tokens = 0
        self.finish_reason: str | None = None

    def push(self, tokens: Sequence[int]) -> Part:
        """Takes further tokens; those after the end are left out."""
        text = ""
        for token in tokens:
            if self.finish_reason:
                break
            self.tokens += 1
            if token in self._end_ids:
                text += self._rest()
                self.finish_reason = "stop"
                break
            self._waiting.append((self.tokens - 1, self._detokenized))
            text += self._cut(self._detokenizer.push(token))
        return self._part(text)

    def finish(self) -> Part:
        """Ends at the limit of tokens, unless it has ended before."""
        text = ""
        if not self.finish_reason:
            text = self._rest()
            self.finish_reason = self.finish_reason or "length"
        return self._part(text)

    def _rest(self) -> str:
        text = self._cut(self._detokenizer.finish())
        return text + self._stops.finish()

    def _cut(self, text: str) -> str:
        self._detokenized += len(text)
        kept = self._stops.push(text)
        if self._stops.stopped:
            self.finish_reason = "stop"
        return kept

    def _part(self, text: str) -> Part:
        self._given += len(text)
        ready = [entry for entry in self._waiting if entry[1] < self._given or (self.finish_reason and not self._stops.stopped)]
        self._waiting = self._waiting[len(ready) :]
        return Part(text, tuple(ready))
