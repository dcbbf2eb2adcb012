"""The server's life: full, left alone by its clients, out of time, failing, draining."""

import socket
import threading

import pytest
from plain_client import COMPLETION, begin, get, post, read_all, reset


def test_full_server_answers_429(scripted, wait_until):
    with scripted(max_waiting=2) as server:
        driver = server.service.driver
        driver.held = True
        clients = [begin(server, COMPLETION) for _ in range(6)]
        wait_until(lambda: driver.unfinished == 6)
        status, answer = post(server, "/v1/completions", COMPLETION)
        assert status == 429 and answer["error"]["code"] == "rate_limit_exceeded" and server.service.totals.refused == 1
        driver.held = False
        assert all(b"200 OK" in read_all(client) for client in clients)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("end", [socket.socket.close, reset])
@pytest.mark.parametrize("when", ["waiting", "running"])
def test_a_client_that_goes_away_frees_its_slots(scripted, wait_until, streamed, end, when):
    with scripted(steps=1, pause_s=0.01) as server:
        driver = server.service.driver
        driver.held = when == "waiting"
        client = begin(server, COMPLETION | {"max_tokens": 60, "n": 3, "stream": streamed})
        wait_until(lambda: driver.unfinished == 3 and (driver.held or driver.most_live == 3))
        end(client)
        wait_until(lambda: driver.unfinished == 0, 0.5)
        assert server.service.unfinished == 0 and server.service.totals.cancelled == 3


def test_time_limit_of_a_request(scripted):
    with scripted(request_timeout_s=0.2) as server:
        server.service.driver.held = True
        status, answer = post(server, "/v1/completions", COMPLETION)
        assert status == 504 and "request_timeout_s" in answer["error"]["message"] and server.service.driver.unfinished == 0


def test_failing_sampler_fails_everything_and_is_told(scripted, wait_until):
    with scripted() as server:
        driver = server.service.driver
        driver.held = True
        plain, streamed = begin(server, COMPLETION), begin(server, COMPLETION | {"stream": True})
        wait_until(lambda: driver.unfinished == 2)
        driver.failure = RuntimeError("the device is gone")
        status, answer = read_all(plain).split(b"\r\n", 1)
        assert b"500" in status and b"the device is gone" in answer and b"internal_error" in answer
        events = read_all(streamed)
        assert b'"internal_error"' in events and b"[DONE]" not in events
        assert post(server, "/v1/completions", COMPLETION)[0] == 500 and get(server, "/health")[0] == 500
        assert str(server.failure) == "the device is gone" and server.service.unfinished == 0
        assert not server.drain(5.0)


def test_drain(scripted, wait_until):
    with scripted() as server:
        driver = server.service.driver
        driver.held = True
        running = begin(server, COMPLETION)
        wait_until(lambda: driver.unfinished == 1)
        done = []
        drainer = threading.Thread(target=lambda: done.append(server.drain(20.0)))
        drainer.start()
        wait_until(lambda: server.service.draining)
        status, answer = post(server, "/v1/completions", COMPLETION)
        assert status == 503 and answer["error"]["code"] == "server_shutting_down" and get(server, "/health")[0] == 503
        driver.held = False
        assert b"200 OK" in read_all(running)
        drainer.join(20)
        assert done == [True]


def test_drain_has_an_end(scripted, wait_until):
    with scripted() as server:
        server.service.driver.held = True
        running = begin(server, COMPLETION)
        wait_until(lambda: server.service.driver.unfinished == 1)
        assert server.drain(0.2) is False
        assert b"503" in read_all(running).split(b"\r\n", 1)[0] and server.service.driver.unfinished == 0


def test_port_in_use_is_refused_before_serving(scripted):
    from areal_jax.config import ConfigError

    with scripted() as server:
        for taken in ({"port": server.port}, {"grpc_port": server.grpc_port}):
            with pytest.raises(ConfigError, match="another port"):
                with scripted(**taken):
                    raise AssertionError("two servers on one port")
