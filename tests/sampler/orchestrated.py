"""Runs JetStream's real orchestrator over the engine, then our driver, and prints the tokens of both as one JSON line."""

import asyncio
import json
import logging
import os

import jax
import numpy as np

from areal_jax.cluster.meshes import build_mesh
from areal_jax.models.architecture import ModelConfig
from areal_jax.models.policy import param_shapes
from areal_jax.models.tokenizer import embedded_tokenizer
from areal_jax.sampler import jetstream
from areal_jax.sampler.driver import RolloutDriver
from areal_jax.sampler.engine import SamplerEngine
from areal_jax.types import GenerationRequest, WeightUpdate

jax.config.update("jax_platforms", "cpu")
orchestrator = jetstream.orchestrator()
logging.disable(logging.INFO)
from jetstream.core.proto import jetstream_pb2  # noqa: E402

tokenizer = embedded_tokenizer()
model = ModelConfig("qwen2", tokenizer.vocab_size, layers=1, hidden_size=32, heads=4, kv_heads=2, head_dim=8, mlp_size=48, eos_ids=tokenizer.eos_ids)
random = np.random.default_rng(3)
params = jax.tree.map(lambda s: (1.5 * s.shape[0] ** -0.5 * random.standard_normal(s.shape)).astype(np.float32), param_shapes(model))
params["lm_head"]["kernel"][:, 1] *= 4.0  # so that some answers end early
engine = SamplerEngine(model, build_mesh(jax.devices()[:1]), slots=3, max_length=40, steps=4, temperature=0.0, tokenizer=tokenizer)
params = engine.load_params(params)
texts = ["Compute 1+2", "Solve 2x=4", "GCD of 12, 18", "7", "Compute 9-3-1", "abc é", "GCD of 4, 6"]
limits = [24, 24, 5, 24, 24, 1, 24]

driver = orchestrator.Driver(prefill_engines=[engine], generate_engines=[engine], prefill_params=[params], generate_params=[params], interleaved_mode=True)
client = orchestrator.LLMOrchestrator(driver=driver)


def prompt(i):
    """JetStream itself puts bos_id before token ids; our tokenizer puts nothing before a text."""
    tokens = tokenizer.encode(texts[i])
    return np.concatenate([[tokenizer.eos_ids[0]], tokens]).astype(np.int32) if i % 2 else tokens


async def ask(i):
    if i % 2:
        content = {"token_content": jetstream_pb2.DecodeRequest.TokenContent(token_ids=tokenizer.encode(texts[i]).tolist())}
    else:
        content = {"text_content": jetstream_pb2.DecodeRequest.TextContent(text=texts[i])}
    tokens, text = [], ""
    async for response in client.Decode(jetstream_pb2.DecodeRequest(session_cache="", priority=1, max_tokens=limits[i], **content)):
        tokens += response.stream_content.samples[0].token_ids
        text += response.stream_content.samples[0].text
    return tokens, text


async def main():
    return await asyncio.gather(*(ask(i) for i in range(len(texts))))


orchestrated = asyncio.new_event_loop().run_until_complete(main())  # not closed: JetStream's threads may still call it

finished = []
ours = RolloutDriver(engine, WeightUpdate(0, params), seed=0, on_progress=lambda p: finished.extend(p.finished))
ours.submit(GenerationRequest(i, 0, prompt(i), limits[i]) for i in range(len(texts)))
ours.run_until_done(100)
wanted = {t.group_id: (t.tokens.tolist(), t.truncated) for t in finished}
print("RESULT " + json.dumps([orchestrated, [wanted[i] for i in range(len(texts))]]), flush=True)
os._exit(0)
