"""The embedded tokenizer round-trips every text; a loaded one is the checkpoint's own."""

import json

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_jax.models.tokenizer import PHRASES, Tokenizer, embedded_tokenizer, load_tokenizer

TOKENIZER = embedded_tokenizer()


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=60))
def test_every_text_comes_back(text):
    ids = TOKENIZER.encode(text)
    assert ids.dtype == np.int32 and ids.ndim == 1
    assert TOKENIZER.decode(ids) == text


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from([*PHRASES, "<eos>", "<pad>", " ", "#", "GCD", "é", "7", "\n", "漢"]), max_size=12))
def test_texts_of_phrases_and_special_names_come_back(parts):
    ids = TOKENIZER.encode("".join(parts))
    assert TOKENIZER.decode(ids) == "".join(parts)
    assert not set(ids.tolist()) & {TOKENIZER.pad_id, *TOKENIZER.eos_ids}


def test_a_text_without_phrases_is_its_bytes():
    text = "".join(map(chr, range(0x250))) + "漢🙂"
    text = text.replace(", ", "")
    assert len(TOKENIZER.encode(text)) == len(text.encode("utf-8"))


def test_ids_and_phrases():
    assert (TOKENIZER.pad_id, TOKENIZER.eos_ids) == (0, (1,))
    assert TOKENIZER.vocab_size == 2 + 256 + len(PHRASES)
    assert [len(TOKENIZER.encode(phrase)) for phrase in PHRASES] == [1] * len(PHRASES)
    assert len(TOKENIZER.encode("GCD of 18, 5:")) == 6
    assert TOKENIZER.decode([TOKENIZER.encode("7")[0], 1, 0, 0]) == "7"


def test_texts_of_one_token():
    assert TOKENIZER.single_tokens(("####", "\n", "7")) == tuple(TOKENIZER.encode(text)[0] for text in ("####", "\n", "7"))
    assert TOKENIZER.single_tokens(()) == ()
    for text, count in (("77", 2), ("é", 2), ("", 0)):
        with pytest.raises(ValueError, match=f"'{text}' is {count}: .*take a text that is one"):
            TOKENIZER.single_tokens(("7", text))


def test_the_unknown_token_is_no_text_of_one_token():
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<unk>": 0, "<eos>": 1, "a": 2}, unk_token="<unk>"))
    with pytest.raises(ValueError, match="'b' is 1: '<unk>'"):
        Tokenizer(backend, 0, (1,)).single_tokens(("b",))
    assert Tokenizer(backend, 0, (1,)).single_tokens(("a",)) == (2,)


def test_half_a_character_is_shown_not_raised():
    assert "\ufffd" in TOKENIZER.decode(TOKENIZER.encode("é")[:1])


def test_saved_and_loaded(tmp_path):
    TOKENIZER.save(tmp_path)
    loaded = load_tokenizer(tmp_path)
    for text in ("GCD of 18, 5:", "4+2=6####6", "<eos> é\n", ""):
        assert loaded.encode(text).tolist() == TOKENIZER.encode(text).tolist()
    assert (loaded.pad_id, loaded.eos_ids, loaded.vocab_size) == (0, (1,), TOKENIZER.vocab_size)


def test_transformers_reads_it(tmp_path):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    TOKENIZER.save(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in ("GCD of 18, 5:", "Compute 4-2+9:", "4+2=6;6-9=-3####-3", "é\n x"):
        ids = theirs(text, add_special_tokens=False)["input_ids"]
        assert ids == TOKENIZER.encode(text).tolist()
        assert theirs.decode(ids) == text
    assert (theirs.pad_token_id, theirs.eos_token_id) == (0, 1)


def write(directory, name, value):
    (directory / name).write_text(json.dumps(value))


def test_end_tokens_of_a_checkpoint(tmp_path):
    TOKENIZER.save(tmp_path)
    write(tmp_path, "config.json", {"eos_token_id": 9})
    assert load_tokenizer(tmp_path).eos_ids == (1, 9)
    write(tmp_path, "generation_config.json", {"eos_token_id": [1, 7]})
    assert load_tokenizer(tmp_path).eos_ids == (1, 7)
    write(tmp_path, "tokenizer_config.json", {"eos_token": {"content": "<eos>"}})
    assert (load_tokenizer(tmp_path).pad_id, load_tokenizer(tmp_path).eos_ids) == (1, (1, 7))


def test_errors_name_the_file_and_the_token(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)
    TOKENIZER.save(tmp_path)
    write(tmp_path, "tokenizer_config.json", {"eos_token": "<|end|>"})
    with pytest.raises(ValueError, match=r"eos_token.*<\|end\|>"):
        load_tokenizer(tmp_path)
    write(tmp_path, "tokenizer_config.json", {})
    with pytest.raises(ValueError, match="end-of-text"):
        load_tokenizer(tmp_path)
