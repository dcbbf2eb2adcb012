"""Text to token ids and back.

Invariants:
* The embedded tokenizer has a token for each of the 256 bytes, so ``decode(encode(text)) == text`` for every text,
  and text never turns into a special token: a question that spells out "<eos>" stays text.
* The constant parts of the built-in prompts, and the "####" before an answer, are one token each.
* A loaded tokenizer is the checkpoint's own: special tokens in a prompt become their ids, and ``prefix`` holds what its
  post-processor puts before a text (Llama's beginning token). A chat template writes its own, so nothing is put before its text.
* ``decode`` takes every id that a policy can sample: ids beyond the vocabulary, which policies have whose embedding is padded
  (Qwen's 151,936 rows for 151,665 tokens), stand for no text. They are not masked in the sampler, so that sampled and trained
  distribution are the same; a trained policy gives them no weight.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import tokenizers

from areal_jax.models.chat import ChatTemplate, load_chat
from areal_jax.models.files import read_json, read_json_if_there

PAD, EOS = "<pad>", "<eos>"
SPECIAL_KEYS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Of tokenizer_config.json; chat templates see those that are set."""
PHRASES = ("####", "Compute ", "Solve ", "GCD of ", ", ")
"""The constant parts of the built-in task's prompts and solutions, one token each."""


class Tokenizer:
    """A ``tokenizers.Tokenizer`` with the ids that generation needs.

    Attributes:
      backend: the wrapped ``tokenizers.Tokenizer``.
      pad_id: id that fills unused positions.
      eos_ids: ids that end a response.
      prefix: ids that stand before a text that is no rendered chat.
      chat: the chat template; None without.
    """

    def __init__(self, backend: tokenizers.Tokenizer, pad_id: int, eos_ids: Sequence[int], chat: ChatTemplate | None = None):
        self.backend = backend
        self.pad_id = pad_id
        self.eos_ids = tuple(eos_ids)
        self.prefix = _prefix(backend)
        self.chat = chat
        if not self.eos_ids:
            raise ValueError("a tokenizer must name its end-of-text token; set 'eos_token' in tokenizer_config.json")

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        return 1 + max(self.backend.get_vocab(with_added_tokens=True).values())

    def encode(self, text: str) -> np.ndarray:
        """Ids of ``text``, nothing added before or after.

        Returns:
          int32 [length].
        """
        return np.asarray(self.backend.encode(text, add_special_tokens=False).ids, np.int32)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Text of ``ids`` without special tokens; bytes that are no valid UTF-8 become U+FFFD."""
        return self.backend.decode([int(i) for i in ids], skip_special_tokens=True)

    def single_tokens(self, texts: Sequence[str]) -> tuple[int, ...]:
        """The ids of texts that are one token each.

        Raises:
          ValueError: a text is no token or several, or the token stands for another text (an unknown one).
        """
        return tuple(self._single_token(text) for text in texts)

    def _single_token(self, text: str) -> int:
        """Alone, or after a letter, where tokenizers that put a blank before every text (Llama 2's) show the token that a policy writes."""
        for before in ("", "a"):
            head, ids = self.encode(before).tolist(), self.encode(before + text).tolist()
            if text and ids[:-1] == head and self.backend.decode(ids[-1:], skip_special_tokens=False) == text:
                return ids[-1]
        tokens = self.encode(text).tolist()
        parts = " ".join(repr(self.backend.id_to_token(token)) for token in tokens)
        raise ValueError(f"each text must be exactly one token of the tokenizer; {text!r} is {len(tokens)}: {parts or 'none'}; take a text that is one")

    def save(self, directory: str | pathlib.Path) -> None:
        """Writes tokenizer.json and tokenizer_config.json, as ``transformers.PreTrainedTokenizerFast`` reads them."""
        path = pathlib.Path(directory)
        path.mkdir(parents=True, exist_ok=True)
        self.backend.save(str(path / "tokenizer.json"))
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "pad_token": self.backend.id_to_token(self.pad_id),
            "eos_token": self.backend.id_to_token(self.eos_ids[0]),
            "clean_up_tokenization_spaces": False,
            "model_max_length": 1_000_000_000,
        }
        (path / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def embedded_tokenizer() -> Tokenizer:
    """The tokenizer of the built-in policy: pad 0, eos 1, the 256 bytes, then ``PHRASES``."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: index for index, symbol in enumerate([PAD, EOS, *alphabet])}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens([tokenizers.AddedToken(t, normalized=False, special=True) for t in (PAD, EOS)])
    backend.add_tokens([tokenizers.AddedToken(t, normalized=False) for t in PHRASES])
    backend.encode_special_tokens = True
    return Tokenizer(backend, pad_id=0, eos_ids=(1,))


def load_tokenizer(directory: str | pathlib.Path) -> Tokenizer:
    """The tokenizer of a Hugging Face checkpoint's directory.

    The ids that end a response are those of generation_config.json, else of config.json, together with the
    tokenizer's own ``eos_token``, which stands first. Without a ``pad_token`` the first of them pads.

    Raises:
      FileNotFoundError: ``directory`` holds no tokenizer.json.
      ValueError: a file is broken, none names an end-of-text token, or the one named is not in the vocabulary.
    """
    path = pathlib.Path(directory)
    file = path / "tokenizer.json"
    if not file.is_file():
        raise FileNotFoundError(f"a checkpoint directory must hold tokenizer.json; '{file}' is not there; save the tokenizer with it")
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises this type and no other
        read_json(file)  # says it better where the file is no JSON at all
        raise ValueError(f"'{file}' must be of the tokenizers library; {error}; fetch it again, or take a newer tokenizers package") from error
    backend.no_truncation()
    backend.no_padding()
    config = read_json_if_there(path / "special_tokens_map.json") | read_json_if_there(path / "tokenizer_config.json")
    special = {key: _special(path, key, config[key]) for key in SPECIAL_KEYS if config.get(key) is not None}

    def named(key: str) -> list[int]:
        if key not in special:
            return []
        token = backend.token_to_id(special[key])
        if token is None:
            raise ValueError(f"'{key}' of '{path / 'tokenizer_config.json'}' must be in the vocabulary; {special[key]!r} is not; name one that is")
        return [token]

    eos = list(dict.fromkeys([*named("eos_token"), *(_stop_ids(path / "generation_config.json") or _stop_ids(path / "config.json"))]))
    pad = named("pad_token") or eos[:1] or [0]
    if pad == [backend.token_to_id(PAD)] and eos == [backend.token_to_id(EOS)]:
        backend.encode_special_tokens = True
    return Tokenizer(backend, pad[0], eos, load_chat(path, config, special))


def _prefix(backend: tokenizers.Tokenizer) -> tuple[int, ...]:
    """What the post-processor puts before a text. (What it puts after one would end a prompt that is to be gone on with.)"""
    encoded = backend.encode("a")
    ours = [position for position, added in enumerate(encoded.special_tokens_mask) if not added]
    return tuple(encoded.ids[: ours[0]]) if ours else ()


def _special(path: pathlib.Path, key: str, token: Any) -> str:
    """The text of a special token: as it is, or the 'content' of an object."""
    text = token.get("content") if isinstance(token, dict) else token
    if not isinstance(text, str):
        raise ValueError(f"'{key}' of '{path / 'tokenizer_config.json'}' must be a text or an object with 'content'; got {token!r}; mend the file")
    return text


def _stop_ids(file: pathlib.Path) -> list[int]:
    """'eos_token_id' of a configuration: none, one or several."""
    value = read_json_if_there(file).get("eos_token_id")
    ids = [] if value is None else list(value) if isinstance(value, list) else [value]
    if any(not isinstance(i, int) or isinstance(i, bool) or i < 0 for i in ids):
        raise ValueError(f"'eos_token_id' of '{file}' must be an id or a list of ids; got {value!r}; mend the file")
    return ids
