"""A run whose behaviour log-probs are scored by the trainer, and its continuation from a checkpoint that holds the earlier versions."""

import orbax.checkpoint as ocp
from launch_programs import check_history, run, saved


def test_no_engine_gap_and_an_exact_continuation(tmp_path, quick):
    """Without the earlier versions in the checkpoint the second program would refuse its first batch."""
    workdir = tmp_path / "run"
    settings = (*quick, "rollout.exact_logprobs=yes", "rollout.max_staleness=2", "eval.every_steps=0", "checkpoint.every_steps=0")
    run("train", workdir, *settings, "trainer.steps=4")
    with ocp.StandardCheckpointer() as checkpointer:
        stored = checkpointer.metadata(workdir / "checkpoints" / "4" / "state").item_metadata.tree
    assert saved(workdir / "checkpoints") == [4] and set(stored) == {"state", "version_2", "version_3"}
    run("train", workdir, *settings, "trainer.steps=8")
    _, metrics = check_history(workdir, 8)
    assert all(row["staleness/max"] <= 2 for row in metrics) and any(row["staleness/max"] > 0 for row in metrics[4:])
    assert metrics[0]["engine_gap/max"] == 0.0 and all(row["engine_gap/max"] in (0.0, None) for row in metrics), "null where no token is of the version"
    assert all(0 < row["engine_gap/rescored_mean"] <= row["engine_gap/rescored_max"] <= 1e-4 for row in metrics), "what the sampler said was close"
    assert all(0 < row["time/rescore"] < row["time/train"] and row["compile/steady_state"] == 0 for row in metrics)
