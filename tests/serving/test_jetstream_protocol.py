"""JetStream's gRPC protocol: by its own messages, and by its own benchmark client (google-jetstream 0.2.2)."""

import asyncio
import importlib.util
import sys
import types

import pytest
from scripted_driver import END, letters

from areal_jax.sampler import jetstream
from areal_jax.types import Sampling

grpc = pytest.importorskip("grpc", reason="JetStream's protocol needs the extra 'serve'")


@pytest.fixture(scope="module")
def server(serve, tokenizer):
    from scripted_driver import ScriptedDriver

    with serve(lambda on_progress: ScriptedDriver(on_progress, tokenizer)) as server:
        yield server
        assert server.service.driver.unfinished == server.service.unfinished == 0


def stub(server):
    channel = grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}")
    return channel, jetstream.protocol()[1].OrchestratorStub(channel)


def text_request(text, max_tokens, **more):
    messages = jetstream.protocol()[0]
    return messages.DecodeRequest(text_content=messages.DecodeRequest.TextContent(text=text), max_tokens=max_tokens, **more)


def token_request(ids, max_tokens):
    messages = jetstream.protocol()[0]
    return messages.DecodeRequest(token_content=messages.DecodeRequest.TokenContent(token_ids=ids), max_tokens=max_tokens)


def samples(answers):
    return [answer.stream_content.samples[0] for answer in answers]


def test_text_and_tokens(server, tokenizer):
    channel, orchestrator = stub(server)
    with channel:
        got = samples(orchestrator.Decode(text_request("Hello", 80)))
        request = server.service.driver.submitted[-1]
        wanted = letters(request, tokenizer)[:-1]
        assert tokenizer.decode(request.prompt_tokens) == "Hello" and request.sampling == Sampling()
        assert "".join(sample.text for sample in got) == tokenizer.decode(wanted) and len(got) > 10
        assert [i for sample in got for i in sample.token_ids] == wanted, "without the end token"
        got = samples(orchestrator.Decode(token_request(tokenizer.encode("Hello"), 7)))
        assert [i for sample in got for i in sample.token_ids] == letters(server.service.driver.submitted[-1], tokenizer)[:7]
        assert not any(sample.text for sample in got)
        assert orchestrator.HealthCheck(jetstream.protocol()[0].HealthCheckRequest()).is_live


@pytest.mark.parametrize(
    ("request_of", "says"),
    [
        (lambda: text_request("", 5), "at least one token"),
        (lambda: token_request([1, 263], 5), "ids 0 to 262"),
        (lambda: token_request([-1], 5), "ids 0 to 262"),
        (lambda: text_request("a", 0), "'max_tokens' must be 1"),
        (lambda: text_request("a", 96), "'max_tokens' must be 1"),
        (lambda: text_request("a", 5, session_cache="x"), "session_cache"),
        (lambda: text_request("a", 5, priority=1), "priority"),
        (lambda: jetstream.protocol()[0].DecodeRequest(max_tokens=5), "'content' is missing"),
        (lambda: token_request([7, 8], 5), "begins with token 7"),
    ],
)
def test_bad_requests_are_invalid_arguments(server, request_of, says):
    channel, orchestrator = stub(server)
    with channel, pytest.raises(grpc.RpcError) as caught:
        list(orchestrator.Decode(request_of()))
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT and says in caught.value.details()


def test_cancelled_and_late_calls_free_their_slots(scripted, wait_until):
    with scripted() as server:
        driver = server.service.driver
        driver.held = True
        channel, orchestrator = stub(server)
        with channel:
            call = orchestrator.Decode(text_request("Hello", 50))
            wait_until(lambda: driver.unfinished == 1)
            call.cancel()
            wait_until(lambda: driver.unfinished == 0 == server.service.unfinished)
            with pytest.raises(grpc.RpcError) as caught:
                list(orchestrator.Decode(text_request("Hello", 50), timeout=0.2))
            assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
            wait_until(lambda: driver.unfinished == 0 == server.service.unfinished)


def test_full_draining_failed(scripted, wait_until):
    with scripted(slots=2, max_waiting=0) as server:
        driver = server.service.driver
        driver.held = True
        channel, orchestrator = stub(server)
        with channel:
            running = [orchestrator.Decode(text_request("Hello", 50)) for _ in range(2)]
            wait_until(lambda: driver.unfinished == 2)

            def refused():
                with pytest.raises(grpc.RpcError) as caught:
                    list(orchestrator.Decode(text_request("Hello", 50)))
                return caught.value.code()

            assert refused() == grpc.StatusCode.RESOURCE_EXHAUSTED
            server._call(server.service.drain)
            wait_until(lambda: server.service.draining)
            assert refused() == grpc.StatusCode.UNAVAILABLE
            assert not orchestrator.HealthCheck(jetstream.protocol()[0].HealthCheckRequest()).is_live
            driver.failure = RuntimeError("the device is gone")
            for call in running:
                with pytest.raises(grpc.RpcError) as caught:
                    list(call)
                assert caught.value.code() == grpc.StatusCode.INTERNAL and "the device is gone" in caught.value.details()
            assert refused() == grpc.StatusCode.INTERNAL


class Ids:
    """The tokenizer, as the benchmark client wants one."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    def encode(self, text):
        return self.tokenizer.encode(text).tolist()

    def decode(self, ids):
        return self.tokenizer.decode(ids)


@pytest.fixture
def benchmark(monkeypatch):
    """JetStream's benchmarks/benchmark_serving.py. It names packages for parts that are not run here: reading data sets, scoring texts."""
    pytest.importorskip("tqdm", reason="JetStream's benchmark client needs it")
    for name, names in {"pandas": (), "eval_accuracy": ("eval_accuracy",)}.items():
        if importlib.util.find_spec(name) is None:
            monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(**dict.fromkeys(names)))
    return pytest.importorskip("benchmarks.benchmark_serving", reason="the wheel of google-jetstream has it")


def test_jetstreams_benchmark_client(server, tokenizer, benchmark):
    inputs = [benchmark.InputRequest(f"Prompt {i}", 8 + (i > 9), "", 3 + 5 * i) for i in range(14)]
    result, outputs = asyncio.run(
        benchmark.benchmark(
            api_url=f"127.0.0.1:{server.grpc_port}",
            tokenizer=Ids(tokenizer),
            input_requests=inputs,
            request_rate=float("inf"),
            disable_tqdm=True,
            session_cache="",
            priority=0,
        )
    )
    assert result["completed"] == 14 and result["total_output_tokens"] == sum(min(60, 3 + 5 * i) for i in range(14))
    answers = {tuple(r.prompt_tokens): letters(r, tokenizer) for r in server.service.driver.submitted[-14:]}
    for output in outputs:
        wanted = answers[tuple(tokenizer.encode(output.input_request.prompt))][: output.input_request.output_len]
        assert output.success and output.generated_token_list == [token for token in wanted if token != END]
