"""Many requests of all kinds at once, good ones, bad ones, and clients that go away: what a server must survive.

Every answer that is complete is checked. The clients have a process of their own, so that what the server's process holds is the server's:

python soak.py HTTP_PORT GRPC_PORT REQUESTS LONGEST SEED    # prints [[kind, outcome, count], ...]
"""

import asyncio
import collections
import json
import pathlib
import random
import socket
import struct
import subprocess
import sys

import grpc

from areal_jax.sampler import jetstream

BAD_BODIES = [
    b"{",
    b"",
    b"null",
    b'{"model": "nobody", "prompt": "a"}',
    b'{"model": "tiny"}',
    b'{"model": "tiny", "prompt": "a", "n": 0}',
    b'{"model": "tiny", "prompt": "a", "temperature": -1}',
    b'{"model": "tiny", "prompt": "a", "max_tokens": 100000}',
    b'{"model": "tiny", "prompt": "a", "logit_bias": {"3": 5}}',
    b'{"model": "tiny", "prompt": [1, 2, 99999]}',
    b'{"model": "tiny", "prompt": "a", "stop": [""]}',
]


class Client:
    """One client after the other, by its own random numbers."""

    def __init__(self, http_port, grpc_port, longest, numbers):
        self.http_port, self.grpc_port, self.longest, self.numbers = http_port, grpc_port, longest, numbers

    async def go(self):
        kinds = [self.whole, self.streamed, self.leaves_a_stream, self.leaves_waiting, self.bad, self.garbage, self.half, self.decode, self.decode_cancelled]
        kind = self.numbers.choice([*kinds, self.whole, self.streamed, self.decode, self.decode_bad, self.decode_late])
        return kind.__name__, await kind()

    def body(self, **more):
        r = self.numbers
        body = {"model": "tiny", "max_tokens": r.randint(1, self.longest), "n": r.choice((1, 1, 2, 4)), "temperature": r.choice((0, 0.7, 1))}
        body |= {"top_p": r.choice((1, 0.9)), "top_k": r.choice((0, 5))}
        prompt = "".join(r.choice("0123456789+-= ") for _ in range(r.randint(1, 20)))
        path = r.choice(("/v1/completions", "/v1/chat/completions"))
        if path == "/v1/completions":
            body |= {"prompt": prompt, "logprobs": r.choice((None, 0, 3)), "echo": False}
        else:
            body |= {"messages": [{"role": "user", "content": prompt}]}
            body |= {"logprobs": True, "top_logprobs": 2} if r.random() < 0.3 else {}
        if r.random() < 0.3:
            body["stop"] = r.choice(("a", ["1", "e"], ["\n"]))
        if r.random() < 0.5:
            body["seed"] = r.randint(0, 2**40)
        return path, body | more

    async def send(self, path, data, method="POST"):
        reader, writer = await asyncio.open_connection("127.0.0.1", self.http_port)
        writer.write(f"{method} {path} HTTP/1.1\r\nhost: a\r\nconnection: close\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data)
        await writer.drain()
        return reader, writer

    async def answer(self, reader, writer):
        """(status, body); nothing is left open."""
        try:
            head, _, body = (await asyncio.wait_for(reader.read(), 120)).partition(b"\r\n\r\n")
        finally:
            writer.close()
        if b"transfer-encoding: chunked" in head.lower():
            body = chunked(body)
        return int(head.split()[1]), body

    async def whole(self):
        path, body = self.body()
        status, data = await self.answer(*await self.send(path, json.dumps(body).encode()))
        answer = json.loads(data)
        if status == 200:
            assert len(answer["choices"]) == body["n"] and all(c["finish_reason"] in ("stop", "length") for c in answer["choices"])
            assert body["n"] <= answer["usage"]["completion_tokens"] <= body["n"] * body["max_tokens"]
        else:
            assert status == 429, data
        return status

    async def streamed(self):
        path, body = self.body(stream=True, stream_options={"include_usage": True})
        status, data = await self.answer(*await self.send(path, json.dumps(body).encode()))
        if status == 200:
            events = data.decode().split("\n\n")
            assert events[-2:] == ["data: [DONE]", ""], events[-3:]
            chunks = [json.loads(event[6:]) for event in events[:-2]]
            reasons = [c["finish_reason"] for chunk in chunks for c in chunk["choices"] if c["finish_reason"]]
            assert len(reasons) == body["n"] and chunks[-1]["usage"]["completion_tokens"] <= body["n"] * body["max_tokens"]
        else:
            assert status == 429, data
        return status

    def leave(self, writer):
        if self.numbers.random() < 0.5:
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort() if self.numbers.random() < 0.5 else writer.close()
        return "left"

    async def leaves_a_stream(self):
        path, body = self.body(stream=True)
        reader, writer = await self.send(path, json.dumps(body).encode())
        await reader.read(self.numbers.choice((1, 400, 1500)))
        return self.leave(writer)

    async def leaves_waiting(self):
        path, body = self.body()
        _, writer = await self.send(path, json.dumps(body).encode())
        await asyncio.sleep(self.numbers.random() * 0.03)
        return self.leave(writer)

    async def bad(self):
        status, data = await self.answer(*await self.send(self.body()[0], self.numbers.choice(BAD_BODIES)))
        assert status in (400, 404) and json.loads(data).keys() == {"error"}, data
        return status

    async def garbage(self):
        reader, writer = await asyncio.open_connection("127.0.0.1", self.http_port)
        writer.write(self.numbers.randbytes(200) + b"\r\n\r\n")
        status, _ = await self.answer(reader, writer)
        assert status == 400
        return status

    async def half(self):
        _, writer = await asyncio.open_connection("127.0.0.1", self.http_port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 1000\r\n\r\n{" + b"a" * self.numbers.randint(0, 900))
        await writer.drain()
        return self.leave(writer)

    def request(self):
        messages, r = jetstream.protocol()[0], self.numbers
        ids = [r.randint(2, 250) for _ in range(r.randint(1, 20))]
        if r.random() < 0.5:
            return messages.DecodeRequest(token_content=messages.DecodeRequest.TokenContent(token_ids=ids), max_tokens=r.randint(1, self.longest))
        return messages.DecodeRequest(text_content=messages.DecodeRequest.TextContent(text="12+7"), max_tokens=r.randint(1, self.longest))

    async def decode(self, timeout=120.0, cancel_after=None, request=None):
        request = request or self.request()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{self.grpc_port}") as channel:
            call = jetstream.protocol()[1].OrchestratorStub(channel).Decode(request, timeout=timeout)
            tokens = messages = 0
            try:
                async for response in call:
                    tokens, messages = tokens + len(response.stream_content.samples[0].token_ids), messages + 1
                    if messages == cancel_after:
                        call.cancel()
                        return "left"
            except grpc.RpcError as error:
                return error.code().name
            assert tokens <= request.max_tokens
            return "OK"

    async def decode_cancelled(self):
        return await self.decode(cancel_after=self.numbers.choice((1, 2, 5)))

    async def decode_late(self):
        outcome = await self.decode(timeout=self.numbers.random() * 0.05)
        assert outcome in ("OK", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED"), outcome
        return outcome

    async def decode_bad(self):
        outcome = await self.decode(request=jetstream.protocol()[0].DecodeRequest(max_tokens=3))
        assert outcome == "INVALID_ARGUMENT", outcome
        return outcome


def chunked(body):
    """The content of a chunked body."""
    content = b""
    while body:
        size, _, rest = body.partition(b"\r\n")
        count = int(size, 16)
        if not count:
            return content
        content, body = content + rest[:count], rest[count + 2 :]
    raise AssertionError("the body is torn")


async def run(http_port, grpc_port, requests, longest, seed, at_once=24):
    """Sends so many requests, ``at_once`` of them together; a Counter of (kind, outcome)."""
    numbers, outcomes = random.Random(seed), collections.Counter()
    gate = asyncio.Semaphore(at_once)

    async def one(number):
        async with gate:
            outcomes[await Client(http_port, grpc_port, longest, random.Random(number)).go()] += 1

    async with asyncio.TaskGroup() as group:
        for _ in range(requests):
            group.create_task(one(numbers.getrandbits(64)))
    return outcomes


def soak(server, requests, *, longest, seed=0):
    """Runs this file; returns a Counter of (kind, outcome)."""
    arguments = map(str, (server.port, server.grpc_port, requests, longest, seed))
    done = subprocess.run([sys.executable, __file__, *arguments], capture_output=True, text=True, timeout=900, cwd=pathlib.Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr[-5000:]
    return collections.Counter({(kind, outcome): count for kind, outcome, count in json.loads(done.stdout.splitlines()[-1])})


if __name__ == "__main__":
    print(json.dumps([[*key, count] for key, count in asyncio.run(run(*map(int, sys.argv[1:]))).items()]))
