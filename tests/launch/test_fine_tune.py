"""launch/sft.py on rows of one's own: killed and begun again, with adapters, with preferences, with bad rows."""

import json

import numpy as np
import pytest
from launch_programs import Started, rows, run, saved

from areal_jax.models.checkpoint import load_policy
from areal_jax.models.tokenizer import load_tokenizer

STEPS = 60
SETTINGS = (f"sft.steps={STEPS}", "sft.rows=4", "sft.micro_batch_rows=2", "sft.checkpoint_every=10", "sft.eval_every=25", "sft.eval_fraction=0.1")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rows")
    sums = [(a, b) for a in range(20) for b in range(20)]
    (folder / "texts.jsonl").write_text("".join(json.dumps({"prompt": f"{a}+{b}", "completion": f"={a + b}"}) + "\n" for a, b in sums))
    pairs = ({"prompt": f"{a}+{b}", "chosen": f"={a + b}", "rejected": f"={a - b - 1}"} for a, b in sums[::4])
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
    return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory, files, cache):
    """A run that nobody stopped, and what it printed."""
    workdir = tmp_path_factory.mktemp("tuned") / "whole"
    return workdir, run("sft", workdir, cache, f"sft.data={files / 'texts.jsonl'}", *SETTINGS)[0]


def leaves(tree):
    return [leaf for value in tree.values() for leaf in leaves(value)] if isinstance(tree, dict) else [np.asarray(tree)]


def test_it_learns_measures_and_exports(whole, files):
    workdir, printed = whole
    evals, metrics = rows(workdir / "eval.jsonl"), rows(workdir / "metrics.jsonl")
    assert [row["step"] for row in evals] == [0, 25, 50, 60] and [row["step"] for row in metrics] == list(range(1, STEPS + 1))
    assert evals[-1]["eval/loss"] < 0.6 * evals[0]["eval/loss"] and len({row["eval/tokens"] for row in evals}) == 1
    assert all(f"{row['eval/loss']:.4f} (perplexity {row['eval/perplexity']:.3f}, {row['eval/tokens']} tokens)" in printed for row in (evals[0], evals[-1]))
    model, _ = load_policy(workdir / "policy")
    assert load_tokenizer(workdir / "policy").vocab_size <= model.vocab_size


def test_killed_run_ends_like_the_whole(whole, files, cache, tmp_path):
    workdir, settings = tmp_path / "killed", (cache, f"sft.data={files / 'texts.jsonl'}", *SETTINGS)
    program = Started("sft", workdir, *settings)
    program.until(lambda: saved(workdir / "checkpoints") and rows(workdir / "metrics.jsonl")[-1]["step"] > saved(workdir / "checkpoints")[-1] + 1)
    program.kill()
    assert saved(workdir / "checkpoints")[-1] < STEPS
    assert "resumed at step" in run("sft", workdir, *settings)[0]
    for file in ("metrics.jsonl", "eval.jsonl"):
        timed = ("time", "time/step", "tokens_per_second/trained", "eval/time_s")
        ours, theirs = ([{k: v for k, v in row.items() if k not in timed} for row in rows(folder / file)] for folder in (workdir, whole[0]))
        assert ours == theirs
    ours, theirs = (load_policy(folder / "policy")[1] for folder in (workdir, whole[0]))
    for a, b in zip(leaves(ours), leaves(theirs), strict=True):
        np.testing.assert_array_equal(a, b)


def test_preferences_with_adapters_of_the_tuned_policy(whole, files, cache, tmp_path):
    base = whole[0] / "policy"
    settings = (f"model.path={base}", "model.lora_rank=4", f"sft.data={files / 'pairs.jsonl'}", "sft.objective=dpo", "sft.epochs=3", "sft.steps=None")
    run("sft", tmp_path / "run", cache, *settings, "sft.learning_rate=0.01", "sft.warmup_steps=0", "sft.eval_fraction=0.2")
    evals, metrics = rows(tmp_path / "run" / "eval.jsonl"), rows(tmp_path / "run" / "metrics.jsonl")
    assert evals[0]["eval/loss"] == pytest.approx(np.log(2), abs=1e-4) and evals[-1]["eval/loss"] < 0.65 and evals[-1]["eval/margin"] > 0
    assert metrics[-1]["epoch"] == 3 and metrics[-1]["preference/correct"] >= 0.5
    before, after = (load_policy(folder)[1]["layers"]["layer_0"] for folder in (base, tmp_path / "run" / "policy"))
    assert np.abs(np.asarray(after["mlp"]["up"]["kernel"]) - np.asarray(before["mlp"]["up"]["kernel"])).max() > 1e-4
    np.testing.assert_array_equal(after["mlp_norm"]["scale"], before["mlp_norm"]["scale"])


def test_bad_rows_end_it_before_it_starts(files, tmp_path):
    bad = tmp_path / "bad.jsonl"
    bad.write_text((files / "texts.jsonl").read_text() + '{"messages": [{"role": "user", "content": "1"}]}\n')
    _, error = run("sft", tmp_path / "run", f"sft.data={bad}", code=2)
    assert error.startswith("error: ") and f"{bad}:401: a row must hold an assistant turn to learn; got user" in error and "Traceback" not in error
    _, error = run("train", tmp_path / "rl", f"sft.data={bad}", code=2)
    assert "is for launch/sft.py" in error
