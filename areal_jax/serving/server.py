"""The server's life: one thread with the event loop of both protocols, one with the sampler; bound ports first, drained before the end.

Invariants:
* Ports are bound before anything is served, so a port in use is a refusal and not a crash later.
* While it drains, running requests go on, new ones are answered with the protocol's "unavailable"; then connections are closed.
* Leaving the context ends both threads, whatever state the server is in.
"""

from __future__ import annotations

import asyncio
import importlib.util
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any

from areal_jax.config import ConfigError
from areal_jax.models.tokenizer import Tokenizer
from areal_jax.serving.requests import Limits
from areal_jax.serving.service import Draining, Service

FLUSH_S = 5.0
"""Longest wait for clients to take the last bytes."""
START_S = 60.0


def require_packages() -> None:
    """Refuses to start without the packages of the extra.

    Raises:
      ConfigError: naming what is missing and how to install it.
    """
    missing = [name for name in ("starlette", "uvicorn", "grpc") if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"serving needs the packages starlette, uvicorn and grpcio; missing: {', '.join(missing)}; install them by: pip install -e '.[serve]'"
        )


class Server:
    """Serves a policy by HTTP and gRPC.

    Args:
      service: the sampler; started and closed here.
      tokenizer: the policy's.
      limits: what is served.
      end_ids: tokens that end a response.
      host: address to listen at.
      port: of HTTP; 0: a free one.
      grpc_port: of gRPC; 0: a free one; None: no gRPC.

    Attributes:
      port, grpc_port: those that are bound.
    """

    def __init__(
        self,
        service: Service,
        tokenizer: Tokenizer,
        limits: Limits,
        end_ids: Sequence[int],
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        grpc_port: int | None = 0,
    ):
        require_packages()
        self.service, self.host, self.port, self.grpc_port = service, host, port, grpc_port
        self._parts = (service, tokenizer, limits, end_ids)
        self._ready, self._error = threading.Event(), None
        self._thread = threading.Thread(target=self._run, name="server", daemon=True)

    @property
    def failure(self) -> BaseException | None:
        """Why it serves no longer."""
        return self.service.failure or self._error

    def __enter__(self) -> Server:
        """Binds and starts.

        Raises:
          ConfigError: a port cannot be bound.
        """
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        try:
            self._socket = socket.create_server((self.host, self.port), family=family, backlog=1024)
        except OSError as error:
            raise ConfigError(f"'serve.host' and 'serve.port' must be free to listen at; {self.host}:{self.port}: {error}; take another port") from error
        self.port = self._socket.getsockname()[1]
        self._thread.start()
        if not self._ready.wait(START_S) or self._error is not None:
            self.__exit__()
            raise self._error or ConfigError(f"the server did not start within {START_S:.0f} s")
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread.is_alive():
            self._call(self._stop.set)
            self._thread.join(FLUSH_S + START_S)
        self._socket.close()
        if not self.service.close() or self._thread.is_alive():
            which = "server's" if self._thread.is_alive() else "sampler's"
            raise TimeoutError(f"the {which} thread did not end in time: a connection or a dispatch of the sampler is still running")

    def drain(self, deadline_s: float) -> bool:
        """Takes no new requests and waits for the running ones; those that are left at the deadline are told, and False is returned."""
        self._call(self.service.drain)
        end = time.monotonic() + deadline_s
        while self.service.unfinished and self.failure is None and time.monotonic() < end:
            time.sleep(0.02)
        finished = not self.service.unfinished and self.failure is None
        self._call(self.service.abort, Draining(f"the server is shutting down, and the request was not finished within 'serve.drain_s' = {deadline_s:g} s"))
        return finished

    def _call(self, function: Any, *arguments: Any) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(function, *arguments)

    # In the event loop's thread.

    def _run(self) -> None:
        try:
            asyncio.run(self._main())
        except Exception as error:  # nobody else would see it in this thread
            self._error = error
        finally:
            self._ready.set()

    async def _main(self) -> None:
        import uvicorn

        from areal_jax.serving.app import App

        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        grpc_server = await self._start_grpc() if self.grpc_port is not None else None
        self.service.start(self._loop)
        app = App(*self._parts).starlette()
        settings: dict[str, Any] = {"lifespan": "off", "log_config": None, "log_level": "warning", "access_log": False, "server_header": False}
        http = uvicorn.Server(uvicorn.Config(app, **settings, timeout_graceful_shutdown=round(FLUSH_S)))
        serving = asyncio.create_task(http.serve(sockets=[self._socket]))
        while not http.started and not serving.done():
            await asyncio.sleep(0.01)
        self._ready.set()
        stopping = asyncio.create_task(self._stop.wait())
        await asyncio.wait((serving, stopping), return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if grpc_server is not None:
            await grpc_server.stop(FLUSH_S)
        http.should_exit = True
        await serving
        if not self._stop.is_set():
            raise RuntimeError("the HTTP server ended by itself")

    async def _start_grpc(self) -> Any:
        from areal_jax.serving.grpc import Orchestrator, make_server

        server = make_server(Orchestrator(*self._parts))
        host = f"[{self.host}]" if ":" in self.host else self.host
        try:
            self.grpc_port = server.add_insecure_port(f"{host}:{self.grpc_port}")
        except RuntimeError as error:
            raise ConfigError(f"'serve.grpc_port' must be free to listen at; {host}:{self.grpc_port}: {error}; take another port") from error
        await server.start()
        return server
