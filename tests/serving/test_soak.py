"""Hundreds of mixed requests leave nothing behind: no slot, page, thread, connection or record.

``AREAL_JAX_SOAK`` is the number of requests (default 200).
"""

import http.client
import json
import os
import threading

import psutil
import pytest

REQUESTS = int(os.environ.get("AREAL_JAX_SOAK", "200"))


def canaries(server):
    """Greedy answers to a few prompts."""
    answers = []
    for prompt in ("1+2", "Compute 7", "9 = "):
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        connection.request("POST", "/v1/completions", json.dumps({"model": "tiny", "prompt": prompt, "max_tokens": 40, "temperature": 0, "logprobs": 1}))
        answer = connection.getresponse()
        assert answer.status == 200
        answers.append(json.loads(answer.read())["choices"])
        connection.close()
    return answers


def state(server):
    names = sorted(thread.name.rstrip("0123456789_-") for thread in threading.enumerate())
    return {"threads": names, "descriptors": psutil.Process().num_fds(), "unfinished": server.service.unfinished, "queued": server.service.driver.unfinished}


def check(server, wait_until, requests, longest, idle):
    from soak import soak

    canaries(server)
    soak(server.port, server.grpc_port, 30, longest=longest, seed=1)  # what is made once: gRPC's own threads, connections
    wait_until(lambda: server.service.driver.unfinished == 0 == server.service.unfinished)
    before, known, held = canaries(server), state(server), idle()
    outcomes = soak(server.port, server.grpc_port, requests, longest=longest)
    wait_until(lambda: server.service.driver.unfinished == 0 == server.service.unfinished)
    wait_until(lambda: state(server) == known and idle() == held)
    assert canaries(server) == before
    assert server.failure is None and sum(outcomes.values()) == requests
    kinds = {kind for kind, _ in outcomes}
    assert len(kinds) == 11 and all(outcomes[kind, good] for kind, good in (("whole", 200), ("streamed", 200), ("decode", "OK")))
    return outcomes


def test_scripted_sampler(scripted, wait_until):
    pytest.importorskip("grpc", reason="JetStream's protocol needs the extra 'serve'")
    with scripted(slots=8, max_waiting=24) as server:
        outcomes = check(server, wait_until, REQUESTS, 60, lambda: server.service.driver.slots == [None] * 8)
        print(json.dumps({f"{kind} {outcome}": count for (kind, outcome), count in sorted(outcomes.items(), key=str)}))
