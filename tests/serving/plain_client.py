"""Asking a server over plain sockets: every byte is seen."""

import http.client
import json
import socket
import struct


def post(server, path, body, raw=False):
    """(status, JSON)."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    connection.request("POST", path, body if raw else json.dumps(body), {"content-type": "application/json"})
    answer = connection.getresponse()
    status, text = answer.status, answer.read().decode()
    connection.close()
    return status, json.loads(text)


def get(server, path):
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    connection.request("GET", path)
    answer = connection.getresponse()
    status, text = answer.status, answer.read().decode()
    connection.close()
    return status, text


def stream(server, path, body):
    """The events of a stream, the last of which must be [DONE]."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    connection.request("POST", path, json.dumps(body | {"stream": True}), {"content-type": "application/json"})
    answer = connection.getresponse()
    assert answer.status == 200 and answer.headers["content-type"].startswith("text/event-stream")
    events = answer.read().decode().split("\n\n")
    connection.close()
    assert events.pop() == "" and all(event.startswith("data: ") for event in events)
    assert events.pop() == "data: [DONE]"
    return [json.loads(event[6:]) for event in events]


COMPLETION = {"model": "tiny", "prompt": "Hello", "max_tokens": 12, "temperature": 0}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 12, "temperature": 0}


def begin(server, body, path="/v1/completions"):
    """A client that has sent its request and reads nothing."""
    client = socket.create_connection(("127.0.0.1", server.port), timeout=30)
    data = json.dumps(body).encode()
    client.sendall(f"POST {path} HTTP/1.1\r\nhost: a\r\nconnection: close\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data)
    return client


def read_all(client):
    data = b""
    while part := client.recv(65536):
        data += part
    client.close()
    return data


def reset(client):
    """Ends a connection the hard way."""
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()
