"""OpenAI's protocol, byte by byte, over answers that are written down."""

import json

import pytest
from plain_client import CHAT, COMPLETION, get, post, stream
from scripted_driver import END


@pytest.fixture(scope="module")
def server(serve, tokenizer):
    from scripted_driver import ScriptedDriver

    with serve(lambda on_progress: ScriptedDriver(on_progress, tokenizer)) as server:
        yield server
        assert server.service.driver.unfinished == server.service.unfinished == 0


def test_completion_has_every_field(server, tokenizer):
    status, answer = post(server, "/v1/completions", COMPLETION)
    assert status == 200 and answer.keys() == {"id", "object", "created", "model", "choices", "usage"}
    assert answer["object"] == "text_completion" and answer["id"].startswith("cmpl-") and answer["model"] == "tiny"
    [choice] = answer["choices"]
    assert choice.keys() == {"index", "text", "logprobs", "finish_reason"} and choice["finish_reason"] == "length" and len(choice["text"]) == 12
    assert answer["usage"] == {"prompt_tokens": 5, "completion_tokens": 12, "total_tokens": 17}
    request = server.service.driver.submitted[-1]
    assert tokenizer.decode(request.prompt_tokens) == "Hello" and request.max_new_tokens == 12 and request.sampling.temperature == 0


def test_end_token_is_counted_and_not_shown(server):
    _, answer = post(server, "/v1/completions", COMPLETION | {"max_tokens": 80})
    assert answer["choices"][0]["finish_reason"] == "stop" and len(answer["choices"][0]["text"]) == 60
    assert answer["usage"]["completion_tokens"] == 61


def test_default_of_completions_is_16_tokens_and_of_chat_what_fits(server):
    assert post(server, "/v1/completions", {"model": "tiny", "prompt": "a"})[1]["usage"]["completion_tokens"] == 16
    post(server, "/v1/chat/completions", {"model": "tiny", "messages": [{"role": "user", "content": "a"}]})
    request = server.service.driver.submitted[-1]
    assert request.max_new_tokens == 96 - len(request.prompt_tokens)


def test_chat_goes_through_the_template(server, tokenizer):
    messages = [{"role": "system", "content": "Be"}, {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    status, answer = post(server, "/v1/chat/completions", CHAT | {"messages": messages, "chat_template_kwargs": {"mood": "good"}})
    assert status == 200 and answer["object"] == "chat.completion" and answer["id"].startswith("chatcmpl-")
    [choice] = answer["choices"]
    assert choice["message"]["role"] == "assistant" and len(choice["message"]["content"]) == 12 and choice["finish_reason"] == "length"
    assert tokenizer.decode(server.service.driver.submitted[-1].prompt_tokens) == "system: Be\nuser: ab\nmood=good\n"


def test_prompts_of_every_kind(server, tokenizer):
    ids = tokenizer.encode("Hello").tolist()
    texts = [
        [choice["text"] for choice in post(server, "/v1/completions", COMPLETION | {"prompt": prompt})[1]["choices"]]
        for prompt in ("Hello", ["Hello"], ids, [ids], ["Hello", "Hello"], [ids, ids])
    ]
    assert [len(t) for t in texts] == [1, 1, 1, 1, 2, 2] and len({text for many in texts for text in many}) == 1
    mixed = post(server, "/v1/completions", COMPLETION | {"prompt": ["a", "b"], "n": 2})[1]
    assert [c["index"] for c in mixed["choices"]] == [0, 1, 2, 3] and mixed["usage"]["prompt_tokens"] == 2
    a, a2, b, b2 = [c["text"] for c in mixed["choices"]]
    assert a == a2 != b == b2


def test_choices_share_a_group_and_requests_do_not(server):
    before = len(server.service.driver.submitted)
    for _ in range(2):
        post(server, "/v1/completions", COMPLETION | {"n": 3})
    new = server.service.driver.submitted[before:]
    assert [r.sample_index for r in new] == [0, 1, 2, 0, 1, 2] and len({r.group_id for r in new}) == 2


def test_seed(server):
    body = COMPLETION | {"temperature": 1, "n": 3}
    one, two, other = (post(server, "/v1/completions", body | {"seed": seed})[1]["choices"] for seed in (5, 5, 6))
    none = [post(server, "/v1/completions", body)[1]["choices"] for _ in range(2)]
    assert one == two
    assert len({c["text"] for choices in (one, other, *none) for c in choices}) == 12
    assert post(server, "/v1/completions", body | {"seed": -(2**63)})[0] == 200


def test_stop_cuts_frees_and_counts(server):
    whole = post(server, "/v1/completions", COMPLETION | {"max_tokens": 60})[1]["choices"][0]["text"]
    before = server.service.totals.cancelled
    for stop in (whole[20:24], [whole[20:24], "not there"]):
        _, answer = post(server, "/v1/completions", COMPLETION | {"max_tokens": 60, "stop": stop, "logprobs": 1})
        [choice] = answer["choices"]
        assert choice["text"] == whole[: whole.find(whole[20:24])] and choice["finish_reason"] == "stop"
        assert answer["usage"]["completion_tokens"] == len(choice["text"]) + 4
        assert len(choice["logprobs"]["tokens"]) == len(choice["text"])
    assert server.service.totals.cancelled == before + 2 and server.service.driver.unfinished == 0


def test_logprobs_of_completions(server):
    for wanted in (0, 1, 5):
        [choice] = post(server, "/v1/completions", COMPLETION | {"logprobs": wanted})[1]["choices"]
        logprobs = choice["logprobs"]
        assert "".join(logprobs["tokens"]) == choice["text"] and logprobs["text_offset"] == list(range(12))
        assert logprobs["token_logprobs"] == [-0.25] * 12
        assert logprobs["top_logprobs"] is None if not wanted else all(len(top) == wanted for top in logprobs["top_logprobs"])


def test_logprobs_of_chat(server):
    [choice] = post(server, "/v1/chat/completions", CHAT | {"logprobs": True, "top_logprobs": 20})[1]["choices"]
    entries = choice["logprobs"]["content"]
    assert bytes(byte for entry in entries for byte in entry["bytes"]).decode() == choice["message"]["content"]
    assert all(len(entry["top_logprobs"]) == 20 and entry["top_logprobs"][0]["token"] == entry["token"] and entry["logprob"] == -0.25 for entry in entries)
    [choice] = post(server, "/v1/chat/completions", CHAT | {"logprobs": True})[1]["choices"]
    assert choice["logprobs"]["content"][0]["top_logprobs"] == []


def test_echo(server):
    body = COMPLETION | {"echo": True, "prompt": ["Hello", "Bye"]}
    plain = [c["text"] for c in post(server, "/v1/completions", body | {"echo": False})[1]["choices"]]
    assert [c["text"] for c in post(server, "/v1/completions", body)[1]["choices"]] == ["Hello" + plain[0], "Bye" + plain[1]]
    assert joined(stream(server, "/v1/completions", body), 2) == ["Hello" + plain[0], "Bye" + plain[1]]


def joined(chunks, choices):
    texts = [""] * choices
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        texts[choice["index"]] += choice["text"] if "text" in choice else choice["delta"].get("content", "")
    return texts


@pytest.mark.parametrize(("path", "body"), [("/v1/completions", COMPLETION | {"logprobs": 2}), ("/v1/chat/completions", CHAT | {"logprobs": True})])
def test_a_stream_is_the_answer_in_parts(server, path, body):
    body = body | {"n": 2, "seed": 3, "temperature": 1}
    whole = post(server, path, body)[1]
    chunks = stream(server, path, body | {"stream_options": {"include_usage": True}})
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"] == whole["usage"] and all(chunk["usage"] is None for chunk in chunks[:-1])
    assert len({chunk["id"] for chunk in chunks}) == 1 and len(chunks) > 8
    texts = [c["text"] if "text" in c else c["message"]["content"] for c in whole["choices"]]
    assert joined(chunks, 2) == texts
    for choice in whole["choices"]:
        parts = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        assert [p["finish_reason"] for p in parts if p["finish_reason"]] == [choice["finish_reason"]] and parts[-1]["finish_reason"]
        for key, values in choice["logprobs"].items():
            if values:
                assert [v for part in parts if part["logprobs"] for v in part["logprobs"][key]] == values
    if "messages" in body:
        assert [c["delta"]["role"] for chunk in chunks[:2] for c in chunk["choices"]] == ["assistant"] * 2
    assert all("usage" not in chunk for chunk in stream(server, path, body))


def test_models_health_and_metrics(server):
    listed = json.loads(get(server, "/v1/models")[1])
    assert [entry["id"] for entry in listed["data"]] == ["tiny"] and json.loads(get(server, "/v1/models/tiny")[1]) == listed["data"][0]
    assert get(server, "/v1/models/other")[0] == 404
    assert get(server, "/health") == (200, '{"status":"ok"}')
    text = get(server, "/metrics")[1]
    values = {line.split()[0]: float(line.split()[1]) for line in text.splitlines() if not line.startswith("#")}
    assert values["areal_jax_slots"] == 4 and values["areal_jax_samples_unfinished"] == 0 and values["areal_jax_requests_total"] > 0
    assert all(f"# TYPE {name} " in text for name in values)


BAD = [
    ({"model": "other"}, 404, "model", "model_not_found"),
    ({"prompt": None}, 400, "prompt", None),
    ({"prompt": ""}, 400, "prompt", None),
    ({"prompt": []}, 400, "prompt", None),
    ({"prompt": [[]]}, 400, "prompt", None),
    ({"prompt": [1, "a"]}, 400, "prompt", None),
    ({"prompt": [263]}, 400, "prompt", None),
    ({"prompt": [-1]}, 400, "prompt", None),
    ({"prompt": [True]}, 400, "prompt", None),
    ({"prompt": {"a": 1}}, 400, "prompt", None),
    ({"prompt": "\ud800"}, 400, "prompt", None),
    ({"prompt": [7, 8]}, 400, None, None),
    ({"prompt": "x" * 90}, 400, "prompt", "context_length_exceeded"),
    ({"max_tokens": 92}, 400, "prompt", "context_length_exceeded"),
    ({"max_tokens": 0}, 400, "max_tokens", None),
    ({"max_tokens": "5"}, 400, "max_tokens", None),
    ({"max_tokens": 1.5}, 400, "max_tokens", None),
    ({"temperature": -0.1}, 400, "temperature", None),
    ({"temperature": 1e-30}, 400, "temperature", None),
    ({"temperature": 2.1}, 400, "temperature", None),
    ({"temperature": float("nan")}, 400, "temperature", None),
    ({"top_p": 0}, 400, "top_p", None),
    ({"top_p": 1.1}, 400, "top_p", None),
    ({"top_k": -1}, 400, "top_k", None),
    ({"n": 0}, 400, "n", None),
    ({"n": 129}, 400, "n", None),
    ({"n": 69}, 400, "n", None),
    ({"best_of": 3}, 400, "best_of", "unsupported_parameter"),
    ({"suffix": "x"}, 400, "suffix", "unsupported_parameter"),
    ({"logprobs": 6}, 400, "logprobs", None),
    ({"logprobs": True}, 400, "logprobs", None),
    ({"logprobs": 1, "echo": True}, 400, "echo", "unsupported_parameter"),
    ({"stop": ""}, 400, "stop", None),
    ({"stop": ["a"] * 5}, 400, "stop", None),
    ({"stop": [1]}, 400, "stop", None),
    ({"seed": 2**63}, 400, "seed", None),
    ({"stream": "yes"}, 400, "stream", None),
    ({"stream_options": {"include_usage": True}}, 400, "stream_options", None),
    ({"frequency_penalty": 0.5}, 400, "frequency_penalty", "unsupported_parameter"),
    ({"presence_penalty": 1}, 400, "presence_penalty", "unsupported_parameter"),
    ({"logit_bias": {"5": 1}}, 400, "logit_bias", "unsupported_parameter"),
    ({"min_p": 0.1}, 400, "min_p", "unknown_parameter"),
]
BAD_CHAT = [
    ({"messages": None}, 400, "messages", None),
    ({"messages": []}, 400, "messages", None),
    ({"messages": ["a"]}, 400, "messages[0]", None),
    ({"messages": [{"content": "a"}]}, 400, "messages[0].role", None),
    ({"messages": [{"role": "user"}]}, 400, "messages[0].content", None),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, 400, "messages[0].content", None),
    ({"messages": [{"role": "user", "content": "a", "audio": {}}]}, 400, "messages[0].audio", "unknown_parameter"),
    ({"messages": [{"role": "user", "content": "x" * 90}]}, 400, "messages", "context_length_exceeded"),
    ({"max_completion_tokens": 5}, 400, "max_tokens", None),
    ({"top_logprobs": 2}, 400, "top_logprobs", None),
    ({"logprobs": True, "top_logprobs": 21}, 400, "top_logprobs", None),
    ({"logprobs": 3}, 400, "logprobs", None),
    ({"tools": [{"type": "function"}]}, 400, "tools", "unsupported_parameter"),
    ({"response_format": {"type": "json_object"}}, 400, "response_format", "unsupported_parameter"),
    ({"chat_template_kwargs": {"tone": 1}}, 400, "chat_template_kwargs.tone", None),
]


def check_refusal(answer, status, param, code):
    assert answer[0] == status
    assert answer[1].keys() == {"error"} and answer[1]["error"].keys() == {"message", "type", "param", "code"}
    assert answer[1]["error"]["type"] == "invalid_request_error" and answer[1]["error"]["message"]
    assert (answer[1]["error"]["param"], answer[1]["error"]["code"]) == (param, code)


@pytest.mark.parametrize(("more", "status", "param", "code"), BAD, ids=[str(case[0])[:40] for case in BAD])
def test_bad_completions_are_refused_by_name(server, more, status, param, code):
    check_refusal(post(server, "/v1/completions", COMPLETION | more), status, param, code)


@pytest.mark.parametrize(("more", "status", "param", "code"), BAD_CHAT, ids=[str(case[0])[:40] for case in BAD_CHAT])
def test_bad_chats_are_refused_by_name(server, more, status, param, code):
    check_refusal(post(server, "/v1/chat/completions", CHAT | more), status, param, code)


def test_a_large_body_is_read_beside_the_streams(server):
    check_refusal(post(server, "/v1/completions", COMPLETION | {"prompt": "x" * 200_000}), 400, "prompt", "context_length_exceeded")


def test_neutral_values_are_taken(server):
    neutral = {"frequency_penalty": 0, "presence_penalty": 0.0, "logit_bias": {}, "user": "me", "best_of": None, "suffix": None, "stop": None, "n": None}
    assert post(server, "/v1/completions", COMPLETION | neutral | {"best_of": 1})[0] == 200
    assert post(server, "/v1/chat/completions", CHAT | neutral | {"tools": [], "response_format": {"type": "text"}, "store": False})[0] == 200


def test_no_json_no_object_no_route(server):
    for body in ("{", "", "[1", "[" * 100000, '{"model": "tiny", "prompt": "a"', b"\xff\xfe"):
        status, answer = post(server, "/v1/completions", body, raw=True)
        assert status == 400 and answer["error"]["type"] == "invalid_request_error"
    assert post(server, "/v1/completions", "[]", raw=True)[0] == 400
    status, answer = post(server, "/v1/embeddings", {})
    assert status == 404 and answer["error"]["code"] == "not_found"
    status, text = get(server, "/v1/completions")
    assert status == 405 and "error" in json.loads(text)


def test_too_large_a_body_is_refused(server):
    status, answer = post(server, "/v1/completions", b" " * (16 * 2**20 + 1), raw=True)
    assert status == 413 and "16777216 bytes" in answer["error"]["message"]


def test_without_a_chat_template(scripted):
    from areal_jax.models.tokenizer import embedded_tokenizer

    with scripted(tokenizer=embedded_tokenizer()) as server:
        status, answer = post(server, "/v1/chat/completions", CHAT)
        assert status == 400 and answer["error"]["code"] == "chat_template_missing" and "/v1/completions" in answer["error"]["message"]
        assert post(server, "/v1/completions", COMPLETION)[0] == 200


def test_samples_end_at_the_end_token_only_once(server):
    """The scripted answers end in END; nothing comes after it."""
    _, answer = post(server, "/v1/completions", COMPLETION | {"max_tokens": 80, "n": 4, "temperature": 1, "logprobs": 1})
    assert END == 1 and all(len(c["text"]) == 60 and len(c["logprobs"]["tokens"]) == 60 for c in answer["choices"])
