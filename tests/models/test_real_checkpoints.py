"""Published policies against the continuations and numbers that other programs computed for them."""

import json
import subprocess
import sys

import jax
import numpy as np
import pytest

from areal_jax.cluster.meshes import build_mesh
from areal_jax.models.checkpoint import load_policy
from areal_jax.models.policy import packed_logits
from areal_jax.sampler.driver import RolloutDriver
from areal_jax.sampler.engine import SamplerEngine
from areal_jax.types import GenerationRequest, WeightUpdate

forward = jax.jit(packed_logits, static_argnums=0)


def logits_of(model, params, sequences):
    """[sequence, position, vocabulary], right-padded."""
    length = max(map(len, sequences))
    tokens, segments = np.zeros((2, len(sequences), length), np.int32)
    for row, sequence in enumerate(sequences):
        tokens[row, : len(sequence)], segments[row, : len(sequence)] = sequence, 1
    return np.asarray(forward(model, params, tokens, np.broadcast_to(np.arange(length, dtype=np.int32), tokens.shape), segments))


def decoded(model, params, prompt, new_tokens):
    """Greedy ids of the sampler: the prompt prefilled, then one token after another from the cache, some to a dispatch."""
    engine = SamplerEngine(model, build_mesh(jax.devices()[:1]), slots=2, max_length=len(prompt) + new_tokens, steps=8, temperature=0.0)
    finished = []
    update = WeightUpdate(0, engine.load_params(params))
    driver = RolloutDriver(engine, update, seed=0, on_progress=lambda progress: finished.extend(progress.finished))
    driver.submit([GenerationRequest(0, 0, np.asarray(prompt, np.int32), new_tokens)])
    driver.run_until_done(deadline_s=120.0)
    return finished[0].tokens.tolist()


def test_stories260k_tells_the_story_that_llama2_c_tells(real_models):
    golden = json.loads((real_models / "stories260k" / "golden_greedy_ids.json").read_text())
    model, params = load_policy(real_models / "stories260k" / "hf")
    assert (model.family, model.tie_embeddings, model.max_positions) == ("llama", True, 512)
    ids = golden["greedy_ids"]
    assert len(ids) > 64 and ids[: len(golden["prompt_ids"])] == golden["prompt_ids"]
    (logits,) = logits_of(model, params, [ids])
    assert logits[:-1].argmax(-1).tolist() == ids[1:]
    assert decoded(model, params, golden["prompt_ids"], 64) == ids[len(golden["prompt_ids"]) :][:64]


def test_tiny_llama_of_verl(real_models):
    golden = json.loads((real_models / "tiny_random_llama_verl" / "golden_logits.json").read_text())
    model, params = load_policy(real_models / "tiny_random_llama_verl", dtype="float32")
    (logits,) = logits_of(model, params, [golden["input_ids"]])
    np.testing.assert_allclose(logits[-1], golden["last_logits_float32"], atol=2e-5)
    assert logits.argmax(-1).tolist() == golden["argmax"]


@pytest.fixture(scope="module")
def smollm2(real_models, tmp_path_factory):
    tool = real_models.parent / "tools" / "gguf_to_hf.py"
    if not tool.is_file():
        pytest.skip(f"the converter {tool} is not here")
    directory = tmp_path_factory.mktemp("smollm2")
    source = next((real_models / "smollm2_135m_instruct_gguf").glob("*.gguf"))
    subprocess.run([sys.executable, str(tool), str(source), str(directory), "--dtype", "bf16"], check=True, timeout=120, capture_output=True)
    return directory


def test_smollm2_answers_as_transformers_lets_it(real_models, smollm2):
    """Greedy ids, each from the whole prefix, and their log-probs; the bfloat16 file is computed in float32."""
    golden = json.loads((real_models / "smollm2_135m_instruct_gguf" / "golden.json").read_text())["greedy"]
    model, params = load_policy(smollm2, dtype="float32")
    assert (model.layers, model.hidden_size, model.eos_ids, model.max_positions) == (30, 576, (2,), 8192)
    logits = logits_of(model, params, [g["prompt_ids"] + g["new_ids"] for g in golden])
    for row, g in zip(logits, golden, strict=True):
        answer = row[len(g["prompt_ids"]) - 1 :][: len(g["new_ids"])]
        assert answer.argmax(-1).tolist() == g["new_ids"], g["question"]
        logprobs = np.asarray(jax.nn.log_softmax(answer, -1))[np.arange(len(answer)), g["new_ids"]]
        np.testing.assert_allclose(logprobs, g["logprobs"], atol=5e-4)


def test_smollm2_answers_from_the_sampler_too(real_models, smollm2):
    """The shortest answer, its stop token with it, through prefill and cache."""
    golden = json.loads((real_models / "smollm2_135m_instruct_gguf" / "golden.json").read_text())["greedy"]
    shortest = min(golden, key=lambda g: len(g["new_ids"]))
    model, params = load_policy(smollm2, dtype="float32")
    assert decoded(model, params, shortest["prompt_ids"], len(shortest["new_ids"]) + 8) == shortest["new_ids"]
