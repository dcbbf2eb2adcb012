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


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("tokenizer.json", "{", r"tokenizer\.json' must be JSON"),
        ("tokenizer.json", "version https://git-lfs.github.com/spec/v1", r"tokenizer\.json' is a Git LFS pointer"),
        ("tokenizer.json", "{}", r"tokenizer\.json' must be of the tokenizers library"),
        ("tokenizer_config.json", "{'a': 1}", r"tokenizer_config\.json' must be JSON"),
        ("tokenizer_config.json", '{"eos_token": {"text": "x"}}', r"'eos_token' of .*tokenizer_config\.json' must be a text or an object with 'content'"),
        ("tokenizer_config.json", "[]", r"tokenizer_config\.json' must be a JSON object; it is a list"),
        ("generation_config.json", '{"eos_token_id": "</s>"}', r"generation_config\.json' must be an id or a list of ids; got '</s>'"),
        ("config.json", '{"eos_token_id": [1, null]}', r"config\.json' must be an id or a list of ids"),
    ],
)
def test_garbled_files_are_named_in_one_line(tmp_path, name, content, words):
    TOKENIZER.save(tmp_path)
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=words) as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)


def test_special_tokens_of_the_older_file(tmp_path):
    TOKENIZER.save(tmp_path)
    write(tmp_path, "tokenizer_config.json", {})
    write(tmp_path, "special_tokens_map.json", {"eos_token": {"content": "<eos>"}, "pad_token": "<pad>"})
    assert (load_tokenizer(tmp_path).eos_ids, load_tokenizer(tmp_path).pad_id) == ((1,), 0)


def test_lengths_that_the_file_asks_for_are_not_its_users(tmp_path):
    TOKENIZER.save(tmp_path)
    backend = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    backend.enable_truncation(4)
    backend.enable_padding(length=8)
    backend.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path).encode("x" * 20).tolist() == TOKENIZER.encode("x" * 20).tolist()
    assert len(load_tokenizer(tmp_path).encode("x")) == 1


@pytest.mark.parametrize(("single", "prefix"), [("<eos> $A", (1,)), ("<pad> <eos> $A <eos>", (0, 1)), ("$A <eos>", ()), ("$A", ())])
def test_prefix_is_what_the_post_processor_puts_before_a_text(tmp_path, single, prefix):
    TOKENIZER.save(tmp_path)
    backend = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    backend.post_processor = tokenizers.processors.TemplateProcessing(single=single, special_tokens=[("<eos>", 1), ("<pad>", 0)])
    backend.save(str(tmp_path / "tokenizer.json"))
    loaded = load_tokenizer(tmp_path)
    assert loaded.prefix == prefix and loaded.encode("7").tolist() == TOKENIZER.encode("7").tolist()


@pytest.mark.parametrize("name", ["stories260k", "smollm2", "qwen2.5", "qwen3"])
def test_prefix_is_what_transformers_puts_before_a_text(tokenizer_files, name):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    ours, theirs = load_tokenizer(tokenizer_files / name), transformers.AutoTokenizer.from_pretrained(tokenizer_files / name)
    assert ours.prefix == ((1,) if name == "stories260k" else ())
    for text in ("Once upon a time", "7", " é\n"):
        assert [*ours.prefix, *ours.encode(text).tolist()] == theirs(text)["input_ids"]


def test_ids_that_no_token_has_stand_for_no_text(tokenizer_files):
    """The rows that pad Qwen's embedding: 151,936 against 151,665 tokens."""
    tokenizer = load_tokenizer(tokenizer_files / "qwen2.5")
    assert tokenizer.vocab_size == 151_665 and tokenizer.eos_ids == (151_645,) and tokenizer.pad_id == 151_643
    ids = tokenizer.encode("4 is").tolist()
    assert tokenizer.decode([151_665, ids[0], 151_935, *ids[1:]]) == "4 is" and tokenizer.decode([151_935]) == ""
    assert load_tokenizer(tokenizer_files / "qwen3").vocab_size == 151_669


def test_texts_of_one_token_where_every_text_begins_with_a_blank(tokenizer_files):
    """SentencePiece's tokenizers, such as Llama 2's: alone, "\\n" is a blank and a byte."""
    tokenizer = load_tokenizer(tokenizer_files / "stories260k")
    assert len(tokenizer.encode("\n")) == 2 and tokenizer.single_tokens(("\n",)) == (13,)
    (stop,) = tokenizer.single_tokens((".",))
    assert tokenizer.encode("One day.").tolist()[-1] == stop
    with pytest.raises(ValueError, match=r"'day\.' is "):
        tokenizer.single_tokens(("day.",))
