"""The examples of a fine-tuning run: what is kept, held out, cut, dropped and refused."""

import json

import numpy as np
import pytest

from areal_jax.config import ConfigError, base_config
from areal_jax.data.rows import RowsError
from areal_jax.data.tuning import load_tuning, split, truncated
from areal_jax.models.tokenizer import embedded_tokenizer
from areal_jax.types import Example, TrainingSequence

TOKENIZER = embedded_tokenizer()


@pytest.fixture
def written(tmp_path):
    """Writes rows and returns a configuration that names them."""

    def write(rows, **keys):
        config = base_config()
        for name, lines in {"data": rows, **{k: v for k, v in keys.items() if k == "eval_data"}}.items():
            (tmp_path / f"{name}.jsonl").write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))
            config.sft[name] = str(tmp_path / f"{name}.jsonl")
        config.sft.update({k: v for k, v in keys.items() if k != "eval_data"})
        return config

    return write


def pairs(count, words="x"):
    return [{"prompt": f"{i}?", "completion": words * (i % 7 + 1)} for i in range(count)]


def lengths(examples):
    return [example.positions for example in examples]


def test_every_row_is_an_example(written):
    data = load_tuning(written(pairs(20)), TOKENIZER)
    assert lengths(data.train) == [len(f"{i}?") + i % 7 + 1 for i in range(20)] and data.heldout == []
    assert data.capacity == 64 and data.report() == [] and data.train[3].source.endswith("data.jsonl:4") and data.train[3].context == "3?"
    assert load_tuning(written(pairs(20), row_tokens=48), TOKENIZER).capacity == 48


def test_a_fraction_is_held_out_by_the_prompt_alone(written):
    rows = [*pairs(200), *({"prompt": row["prompt"].upper() + " ", "completion": "again"} for row in pairs(200))]
    data = load_tuning(written(rows, eval_fraction=0.2), TOKENIZER)
    train, held = ({example.context for example in part} for part in (data.train, data.heldout))
    assert not train & held and len(data.train) + len(data.heldout) == 400 and 20 <= len(held) <= 60
    fewer = load_tuning(written(rows[100:], eval_fraction=0.2), TOKENIZER)
    assert {e.context for e in fewer.heldout} == held
    few = load_tuning(written(pairs(2), eval_fraction=0.01), TOKENIZER)
    assert len(few.train) == len(few.heldout) == 1
    with pytest.raises(RowsError, match=r"at least 2 different prompts; got 1"):
        split(data.train[:1], 0.5)


def test_rows_whose_prompt_is_held_out_are_not_trained(written):
    data = load_tuning(written(pairs(10), eval_data=[{"prompt": "3?", "completion": "other"}, {"prompt": "new", "completion": "y"}]), TOKENIZER)
    assert len(data.train) == 9 and len(data.heldout) == 2 and data.shared == 1 and "1 training rows" in data.report()[0]
    with pytest.raises(RowsError, match="all 2 are there"):
        load_tuning(written(pairs(2), eval_data=pairs(3)), TOKENIZER)


def test_bad_rows_end_the_run_by_name_or_are_counted(written):
    rows = [*pairs(2), '{"prompt": \n', {"prompt": "a", "answer": "b"}]
    with pytest.raises(RowsError, match=r"data\.jsonl:3: a row must be JSON.*sft\.on_bad_row=skip"):
        load_tuning(written(rows), TOKENIZER)
    data = load_tuning(written(rows, on_bad_row="skip"), TOKENIZER)
    assert [bad.line for bad in data.bad] == [3, 4] and len(data.train) == 2 and "skipped 2 broken rows, the first: " in data.report()[0]
    with pytest.raises(RowsError, match=r"at least one row to learn; 1 are broken and 0 too long, the first.*data\.jsonl:1"):
        load_tuning(written([{"a": 1}], on_bad_row="skip"), TOKENIZER)
    with pytest.raises(RowsError, match=r"data\.jsonl:1: messages need a chat template"):
        load_tuning(written([{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}]), TOKENIZER)


def test_long_rows_are_refused_dropped_or_cut_but_never_in_silence(written):
    rows = [{"prompt": "ab", "completion": "c" * n} for n in (3, 30, 5)] + [{"prompt": "p" * 20, "completion": "c"}]
    with pytest.raises(RowsError, match=r"data\.jsonl:2: a row must take at most 'sft\.row_tokens' = 16 positions; it takes 32.*on_long_row=drop.*truncate"):
        load_tuning(written(rows, row_tokens=16), TOKENIZER)
    with pytest.raises(RowsError, match=r"at most 16, which the policy holds, positions; it takes 32"):
        load_tuning(written(rows), TOKENIZER, max_positions=16)
    dropped = load_tuning(written(rows, row_tokens=16, on_long_row="drop"), TOKENIZER)
    assert lengths(dropped.train) == [5, 7] and dropped.report() == ["dropped 2 rows that are too long; the longest takes 32 positions"]
    cut = load_tuning(written(rows, row_tokens=16, on_long_row="truncate"), TOKENIZER)
    assert lengths(cut.train) == [5, 16, 7] and (cut.long.cut, cut.long.dropped) == (1, 1), "a row without anything to learn is dropped"
    assert cut.train[1].sequences[0].tokens[-1] != TOKENIZER.eos_ids[0], "the cut is not learnt as an end"
    assert load_tuning(written(rows, row_tokens=64, on_long_row="truncate"), TOKENIZER, max_positions=16).train[1].positions == 16


def test_of_a_pair_the_longer_sequence_is_cut_first():
    def example(*sizes):
        return Example(tuple(TrainingSequence(np.arange(n + 1, dtype=np.int32), np.arange(n + 1) > 1) for n in sizes))

    for sizes, capacity, most, expected in (
        ((9, 4), 10, 0, (6, 4)),
        ((9, 8), 10, 0, (5, 5)),
        ((4, 9), 10, 0, (4, 6)),
        ((9, 4), 0, 7, (7, 4)),
        ((9, 4), 10, 5, (5, 4)),
    ):
        assert tuple(s.positions for s in truncated(example(*sizes), capacity, most).sequences) == expected
    assert truncated(example(9, 9), 2) is None


def test_preferences_are_pairs(written):
    rows = [{"prompt": f"{i}?", "chosen": "yes", "rejected": "no" * (i + 1)} for i in range(4)]
    data = load_tuning(written(rows, objective="dpo"), TOKENIZER)
    assert [[s.positions for s in e.sequences] for e in data.train] == [[5, 2 + 2 * (i + 1)] for i in range(4)]
    assert TOKENIZER.decode(data.train[1].sequences[1].tokens[data.train[1].sequences[1].trained]) == "nono"


def test_the_fingerprint_is_of_all_that_is_learnt(written):
    base = load_tuning(written(pairs(10)), TOKENIZER).fingerprint
    assert load_tuning(written(pairs(10)), TOKENIZER).fingerprint == base
    others = [
        load_tuning(written(pairs(9)), TOKENIZER),
        load_tuning(written(pairs(10)[::-1]), TOKENIZER),
        load_tuning(written(pairs(10), eval_fraction=0.3), TOKENIZER),
        load_tuning(written([{"prompt": row["prompt"] + row["completion"][:1], "completion": row["completion"][1:] or "y"} for row in pairs(10)]), TOKENIZER),
    ]
    assert len({base, *(data.fingerprint for data in others)}) == 5


def test_keys_that_the_tokenizer_cannot_follow_are_refused(written):
    config = written(pairs(2))
    config.task.system_prompt = "Be brief."
    with pytest.raises(ConfigError, match=r"'task\.system_prompt' needs a chat template"):
        load_tuning(config, TOKENIZER)
