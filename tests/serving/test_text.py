"""Growing text: the oracle is the tokenizer's ``decode`` of all tokens at once, and the definition of a cut."""

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_jax.models.tokenizer import Tokenizer, embedded_tokenizer, load_tokenizer
from areal_jax.serving.text import REPLACEMENT, Detokenizer, ResponseText, StopTexts, Vocabulary

TEXTS = st.text(st.characters(exclude_categories=("Cs",)), max_size=30)


def pieces_tokenizer():
    """SentencePiece's way (Llama 2): pieces with ▁, tokens of bytes, one blank before every text."""
    pieces = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁▁", "a", "b", "▁a", "ab", "▁ab", "é", "c", "."]
    merges = [("▁", "▁"), ("▁", "a"), ("a", "b"), ("▁a", "b")]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    backend.normalizer = tokenizers.normalizers.Sequence([tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")])
    decoders = tokenizers.decoders
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    backend.add_special_tokens([tokenizers.AddedToken(t, normalized=False, special=True) for t in ("<unk>", "</s>")])
    return Tokenizer(backend, 0, (1,))


TOKENIZERS = {"byte-level": embedded_tokenizer(), "pieces": pieces_tokenizer()}
VOCABULARIES = {name: Vocabulary(tokenizer) for name, tokenizer in TOKENIZERS.items()}


def grown(vocabulary, ids):
    detokenizer = Detokenizer(vocabulary)
    return [*(detokenizer.push(token) for token in ids), detokenizer.finish()]


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=150, deadline=None)
@given(text=TEXTS)
def test_parts_of_a_text_are_the_text(name, text):
    tokenizer = TOKENIZERS[name]
    parts = grown(VOCABULARIES[name], tokenizer.encode(text).tolist())
    assert "".join(parts) == text
    if REPLACEMENT not in text:
        assert not any(REPLACEMENT in part for part in parts), "half of a character was given out"


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_any_tokens_give_what_decode_gives(name, data):
    """Broken bytes, special tokens and ids beyond the vocabulary included; nothing given out is taken back."""
    tokenizer = TOKENIZERS[name]
    hard = st.sampled_from([1, *tokenizer.encode("é€😀 a  b").tolist(), 2, tokenizer.vocab_size + 3])
    ids = data.draw(st.lists(st.one_of(hard, st.integers(0, tokenizer.vocab_size)), max_size=90))
    parts = grown(VOCABULARIES[name], ids)
    assert "".join(parts) == tokenizer.decode(ids)


def test_broken_bytes_without_end_do_not_gather():
    tokenizer, vocabulary = TOKENIZERS["byte-level"], VOCABULARIES["byte-level"]
    lone = tokenizer.encode("€").tolist()[1:2] * 300
    detokenizer = Detokenizer(vocabulary)
    parts = []
    for token in lone:
        parts.append(detokenizer.push(token))
        assert len(detokenizer._window) <= 33
    assert "".join(parts) + detokenizer.finish() == tokenizer.decode(lone)


@pytest.mark.parametrize("name", ["qwen2.5", "qwen3", "smollm2", "stories260k"])
def test_published_tokenizers(name, tokenizer_files):
    tokenizer = load_tokenizer(tokenizer_files / name)
    vocabulary = Vocabulary(tokenizer)
    for text in ("Hello  world, naïve café", "日本語のテキスト 😀👩‍👩‍👧 mixed", "  x = 1\n\tif x:\n", "한국어 ответ"):
        ids = tokenizer.encode(text).tolist()
        parts = grown(vocabulary, ids)
        assert "".join(parts) == tokenizer.decode(ids)
        assert not any(REPLACEMENT in part for part in parts)
        assert b"".join(vocabulary.bytes(token) for token in ids).decode().strip() == text.strip()


@pytest.mark.parametrize("name", TOKENIZERS)
def test_bytes_of_every_token(name):
    """A token's bytes are those that it adds between two others."""
    tokenizer, vocabulary = TOKENIZERS[name], VOCABULARIES[name]
    a = tokenizer.backend.token_to_id("a")
    for token in range(tokenizer.vocab_size):
        if not vocabulary.silent(token) and vocabulary.bytes(token).isascii():
            assert tokenizer.decode([a, token, a])[1:-1].encode() == vocabulary.bytes(token)
    for byte in range(256):
        one = {vocabulary.bytes(t) for t in range(tokenizer.vocab_size)}
        assert bytes([byte]) in one


def cut(text, stops):
    """By definition: read on until the text so far ends in a stop text; take the longest such away."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return text[: end - max(map(len, ending))], True
    return text, False


SMALL = st.text("abé", max_size=24)


@settings(max_examples=400, deadline=None)
@given(text=SMALL, stops=st.lists(st.text("abé", min_size=1, max_size=5), max_size=4), data=st.data())
def test_stop_texts_cut_where_they_are_complete(text, stops, data):
    places = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    parts = [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]
    matcher, given_out = StopTexts(stops), ""
    wanted, stopped = cut(text, stops)
    for part in parts:
        given_out += matcher.push(part)
        assert wanted.startswith(given_out)
    assert given_out + matcher.finish() == wanted
    assert matcher.stopped == stopped


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=300, deadline=None)
@given(text=SMALL, stops=st.lists(st.text("abé", min_size=1, max_size=4), max_size=3), ends=st.booleans(), data=st.data())
def test_responses(name, text, stops, ends, data):
    """Text, reason, tokens and offsets, however the tokens come."""
    tokenizer, vocabulary = TOKENIZERS[name], VOCABULARIES[name]
    ids = [*tokenizer.encode(text).tolist(), *([1] if ends else [])]
    places = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=5)))
    response = ResponseText(vocabulary, (1,), stops)
    parts = [response.push(ids[a:b]) for a, b in zip([0, *places], [*places, len(ids)], strict=True)]
    parts.append(response.finish())
    wanted, stopped = cut(text, stops)
    assert "".join(part.text for part in parts) == wanted
    assert response.finish_reason == ("stop" if stopped or ends else "length")
    told = [entry for part in parts for entry in part.tokens]
    assert [place for place, _ in told] == list(range(len(told)))
    offsets = [offset for _, offset in told]
    assert offsets == sorted(offsets) and all(offset <= len(wanted) for offset in offsets)
    if stopped:
        assert all(offset < len(wanted) for offset in offsets) and response.tokens <= len(ids)
    else:
        assert len(told) == len(ids) - ends and response.tokens == len(ids)
    for part, before in zip(parts, [sum(len(p.text) for p in parts[:i]) for i in range(len(parts))], strict=True):
        assert all(offset < before + len(part.text) or part is parts[-1] or not stopped for _, offset in part.tokens)
