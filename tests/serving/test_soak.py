"""Hundreds of mixed requests leave nothing behind: no slot, page, thread, connection or record.

``AREAL_JAX_SOAK`` is the number of requests (default 200).
"""

import collections
import gc
import http.client
import json
import os
import threading
import time

import psutil
import pytest

pytest.importorskip("grpc", reason="JetStream's protocol needs the extra 'serve'")

from soak import soak

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
    names = collections.Counter(thread.name.rstrip("0123456789_-") for thread in threading.enumerate())
    return {"threads": names, "descriptors": psutil.Process().num_fds(), "samples": server.service.unfinished, "unfinished": server.service.driver.unfinished}


def settled(server, idle, held):
    """The state once nothing is unfinished and ``idle()`` is as it was; what earlier tests left may go meanwhile."""
    end = time.monotonic() + 10.0
    while time.monotonic() < end and (server.service.driver.unfinished or server.service.unfinished or idle() != held):
        time.sleep(0.02)
    time.sleep(0.5)  # connections are closed after their last sample
    gc.collect()
    return state(server)


def check(server, requests, longest, idle):
    held = idle()
    canaries(server)
    soak(server, 100, longest=longest, seed=1)  # what is made once: gRPC's own threads
    before, known = canaries(server), settled(server, idle, held)
    outcomes = soak(server, requests, longest=longest)
    after = settled(server, idle, held)
    assert idle() == held and after["samples"] == after["unfinished"] == 0
    assert not after["threads"] - known["threads"], (known, after)
    assert after["descriptors"] <= known["descriptors"], (known, after)
    assert canaries(server) == before
    assert server.failure is None and sum(outcomes.values()) == requests
    kinds = {kind for kind, _ in outcomes}
    assert len(kinds) == 11 and all(outcomes[kind, good] for kind, good in (("whole", 200), ("streamed", 200), ("decode", "OK")))
    return outcomes


def test_scripted_sampler(scripted):
    with scripted(slots=8, max_waiting=24) as server:
        outcomes = check(server, REQUESTS, 60, lambda: server.service.driver.slots == [None] * 8)
        print(json.dumps({f"{kind} {outcome}": count for (kind, outcome), count in sorted(outcomes.items(), key=str)}))
