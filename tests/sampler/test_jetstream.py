"""The engine under JetStream's own package: its interface, its tokenizer, and its real orchestrator (google-jetstream 0.2.2)."""

import json
import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest

from areal_jax.models.tokenizer import embedded_tokenizer
from areal_jax.sampler import jetstream
from areal_jax.sampler.engine import SamplerEngine
from areal_jax.sampler.jetstream_tokenizer import JetStreamTokenizer


@pytest.fixture(scope="module")
def greedy(engine_of):
    return engine_of(temperature=0.0)


def test_engine_is_jetstreams():
    from jetstream.engine import engine_api, tokenizer_api

    assert issubclass(SamplerEngine, engine_api.Engine) and issubclass(JetStreamTokenizer, tokenizer_api.Tokenizer)
    assert not SamplerEngine.__abstractmethods__ and not JetStreamTokenizer.__abstractmethods__


def test_one_step_at_a_time_through_jetstreams_interface(greedy, driver_of, update_of, run, requests):
    """prefill → insert into any slot → generate, read by get_result_at_slot, gives the driver's tokens."""
    chosen = {3: requests[0], 0: requests[4], 2: requests[6]}
    wanted = run(driver_of(greedy), chosen.values())
    params, state = update_of(greedy).params, greedy.init_decode_state()
    for slot, request in chosen.items():
        padded, length = jetstream.pad_tokens(request.prompt_tokens, 1, 0, is_bos=False, max_prefill_length=greedy.max_prefill_length, jax_padding=True)
        assert length == len(request.prompt_tokens) < len(padded)
        prefix = greedy.prefill(params=params, padded_tokens=padded, true_length=length)
        state = greedy.insert(jax.device_put(prefix, greedy.get_prefix_destination_sharding()), state, slot=slot)
    got = {slot: [] for slot in range(4)}
    for _ in range(40):
        state, result = greedy.generate(params, state)
        result.copy_to_host_async()
        result = result.convert_to_numpy()
        for slot in got:
            data = result.get_result_at_slot(slot)
            assert data.tokens.shape == data.valid.shape == (1, 1) and data.lengths.shape == (1,)
            if data.valid[0, 0]:
                got[slot].append(int(data.tokens[0, 0]))
            assert data.lengths[0] == len(got[slot])
    assert got[1] == []
    for slot, request in chosen.items():
        tokens = wanted[request.key].tokens.tolist()
        assert got[slot][: len(tokens)] == tokens
        assert len(got[slot]) == (len(tokens) if not wanted[request.key].truncated else greedy.max_length - len(request.prompt_tokens))


def test_prompts_that_do_not_fit_are_refused(greedy, update_of):
    params = update_of(greedy).params
    for tokens, length, more in ((16, 17, {}), (64, 32, {}), (16, 0, {}), (16, 4, {"existing_prefix": 1})):
        with pytest.raises(ValueError, match=r"prefix must be None|must have 1 to"):
            greedy.prefill(params=params, padded_tokens=np.ones(tokens, np.int32), true_length=length, **more)


@pytest.mark.parametrize(("max_length", "prefill"), [(32, 16), (33, 32), (144, 128), (1025, 1024)])
def test_longest_prefill_is_one_of_jetstreams_lengths(engine_of, max_length, prefill):
    engine = engine_of(max_length=max_length)
    assert engine.max_prefill_length == prefill < max_length
    assert len(jetstream.pad_tokens(np.ones(3, np.int32), 1, 0, max_prefill_length=prefill)[0]) == 16


def test_tokenizer_speaks_jetstreams_language():
    ours = embedded_tokenizer()
    tokenizer = JetStreamTokenizer(ours)
    text = "Compute 7-12+é ####"
    padded, length = tokenizer.encode(text, is_bos=True, max_prefill_length=64, jax_padding=False)
    assert isinstance(padded, np.ndarray) and len(padded) == 16 and length == len(ours.encode(text))
    np.testing.assert_array_equal(padded[:length], ours.encode(text))
    assert np.all(padded[length:] == ours.pad_id)
    assert isinstance(tokenizer.encode(text, jax_padding=True)[0], jax.Array)
    assert tokenizer.decode([*map(int, padded[:length]), ours.eos_ids[0]]) == text
    assert tokenizer.stop_tokens == set(ours.eos_ids) and tokenizer.pad_id == 0 and tokenizer.eos_id == 1
    assert JetStreamTokenizer(ours, (1, 7)).stop_tokens == {1, 7}
    with pytest.raises(ValueError, match="at most 16 tokens; got 20"):
        tokenizer.encode("9" * 20, max_prefill_length=16)
    with pytest.raises(ValueError, match="tokenizer="):
        JetStreamTokenizer(None)


def test_jetstreams_orchestrator_gives_the_drivers_tokens():
    """In a process of its own: JetStream's threads have no end, and kill their process on an error."""
    for package in ("grpc", "shortuuid", "prometheus_client"):
        pytest.importorskip(package, reason="JetStream's orchestrator needs it")
    here = pathlib.Path(__file__).resolve().parent
    environment = os.environ | {"PYTHONPATH": str(here.parents[1])}
    ended = subprocess.run([sys.executable, str(here / "orchestrated.py")], env=environment, capture_output=True, text=True, timeout=120, check=False)
    lines = [line for line in ended.stdout.splitlines() if line.startswith("RESULT ")]
    assert ended.returncode == 0 and lines, ended.stdout[-3000:] + ended.stderr[-3000:]
    orchestrated, wanted = json.loads(lines[0][7:])
    tokenizer = embedded_tokenizer()
    assert len(orchestrated) == len(wanted) == 7
    for i, ((tokens, text), (own, truncated)) in enumerate(zip(orchestrated, wanted, strict=True)):
        assert tokens == (own if truncated else own[:-1])  # JetStream does not hand on the end token
        assert text == ("" if i % 2 else "".join(tokenizer.decode([t]) for t in tokens))
    assert {truncated for _, truncated in wanted} == {True, False}
    assert max(len(tokens) for tokens, _ in wanted) == 24
