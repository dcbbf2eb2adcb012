"""A published policy through the whole program: loaded, trained for two steps, exported, and read by transformers."""

import numpy as np
import pytest
from launch_programs import rows, run

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def trained(tmp_path_factory, real_models, cache):
    source = real_models / "stories260k" / "hf"
    workdir = tmp_path_factory.mktemp("stories") / "run"
    more = ("trainer.steps=2", "trainer.learning_rate=0.001", "eval.every_steps=0", "rollout.max_new_tokens=16")
    run("train", workdir, cache, "reward.verifier=launch_verifiers:parity", f"model.path={source}", *more)
    return source, workdir


def test_the_run_trains_it_and_the_engines_agree(trained):
    _, workdir = trained
    metrics = rows(workdir / "metrics.jsonl")
    assert [m["step"] for m in metrics] == [1, 2] and all(m["ledger/residual"] == 0 for m in metrics)
    assert max(m["grad_norm"] for m in metrics) > 0
    assert max(m["engine_gap/max"] or 0.0 for m in metrics) <= 1e-4


def test_the_export_is_the_trained_policy_in_transformers(trained):
    import jax.numpy as jnp

    from areal_jax.models.checkpoint import load_policy
    from areal_jax.models.policy import packed_logits

    source, workdir = trained
    model, params = load_policy(workdir / "policy")
    tokens = np.random.default_rng(0).integers(3, model.vocab_size, (2, 40))
    ours = np.asarray(packed_logits(model, params, jnp.asarray(tokens), jnp.broadcast_to(jnp.arange(40), tokens.shape), jnp.ones_like(tokens)))
    with torch.no_grad():
        after, before = (
            transformers.AutoModelForCausalLM.from_pretrained(d, dtype=torch.float32)(torch.tensor(tokens)).logits.numpy() for d in (workdir / "policy", source)
        )
    assert np.abs(ours - after).max() <= 1e-4
    assert np.abs(after - before).max() > 1e-3, "it was trained"
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (workdir / "policy" / name).read_bytes() == (source / name).read_bytes()
