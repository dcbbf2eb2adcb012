"""Servers in this process: over answers that are written down, or over a tiny random policy."""

import contextlib
import time

import pytest
from scripted_driver import END, VOCABULARY, ScriptedDriver

from areal_jax.models.tokenizer import embedded_tokenizer

NAME, LONGEST = "tiny", 96


class ChatLine:
    """The simplest chat template: roles and contents, a line each."""

    origin = "a test"
    variables = frozenset({"messages", "mood"})

    def render(self, turns, now=None, **variables):
        return "".join(f"{turn['role']}: {turn['content']}\n" for turn in turns) + "".join(f"{k}={v}\n" for k, v in variables.items())


@pytest.fixture(scope="session")
def tokenizer():
    tokenizer = embedded_tokenizer()
    tokenizer.chat = ChatLine()
    return tokenizer


def until(moment, limit_s=20.0):
    """Waits for ``moment()``."""
    end = time.monotonic() + limit_s
    while not moment():
        assert time.monotonic() < end, "the moment did not come"
        time.sleep(0.005)


@pytest.fixture(scope="session")
def wait_until():
    return until


@pytest.fixture(scope="session")
def serve(tokenizer):
    """serve(make_driver, ...) → a running server, as a context manager; afterwards no thread of it is left."""
    pytest.importorskip("starlette", reason="the HTTP endpoint needs the extra 'serve'")
    pytest.importorskip("uvicorn", reason="the HTTP endpoint needs the extra 'serve'")
    pytest.importorskip("grpc", reason="JetStream's protocol needs the extra 'serve'")
    from areal_jax.serving.requests import Limits
    from areal_jax.serving.server import Server
    from areal_jax.serving.service import Service

    @contextlib.contextmanager
    def running(make_driver, *, slots=4, max_waiting=64, request_timeout_s=60.0, tokenizer=tokenizer, sampling=None, pages=None, **more):
        service = Service(make_driver, slots=slots, max_waiting=max_waiting, request_timeout_s=request_timeout_s, sampling=sampling, pages=pages)
        limits = Limits(NAME, LONGEST, VOCABULARY, slots + max_waiting)
        with Server(service, tokenizer, limits, (END,), **more) as server:
            yield server
        assert not server._thread.is_alive() and not service._thread.is_alive()

    return running


@pytest.fixture
def scripted(serve, tokenizer):
    """scripted(...) → a running server over a ``ScriptedDriver``, whose options are those that the server does not know."""

    def make(*, steps=3, slots=4, **more):
        own = {key: more.pop(key) for key in ("answer", "pause_s") if key in more}
        return serve(lambda on_progress: ScriptedDriver(on_progress, tokenizer, slots=slots, steps=steps, **own), slots=slots, **more)

    return make
