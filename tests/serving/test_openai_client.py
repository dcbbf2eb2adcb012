"""The ``openai`` package against the server."""

import threading

import pytest
from scripted_driver import ScriptedDriver

openai = pytest.importorskip("openai", reason="the client whose requests are answered")


@pytest.fixture(scope="module")
def server(serve, tokenizer):
    with serve(lambda on_progress: ScriptedDriver(on_progress, tokenizer)) as server:
        yield server
        assert server.service.driver.unfinished == server.service.unfinished == 0


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0, timeout=30) as client:
        yield client


CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}]}


def test_models(client):
    assert [model.id for model in client.models.list()] == ["tiny"] and client.models.retrieve("tiny").owned_by == "areal_jax"


def test_completion(client):
    answer = client.completions.create(model="tiny", prompt="Hello", max_tokens=20, temperature=0, logprobs=2)
    [choice] = answer.choices
    assert len(choice.text) == 20 and choice.finish_reason == "length" and answer.usage.total_tokens == 25
    assert "".join(choice.logprobs.tokens) == choice.text and choice.logprobs.text_offset[-1] == 19
    assert all(len(top) == 2 for top in choice.logprobs.top_logprobs)
    stopped = client.completions.create(model="tiny", prompt="Hello", max_tokens=20, temperature=0, stop=choice.text[7:10])
    assert stopped.choices[0].text == choice.text[: choice.text.find(choice.text[7:10])] and stopped.choices[0].finish_reason == "stop"


def test_chat_with_seed_and_choices(client):
    one, two = (client.chat.completions.create(**CHAT, n=3, seed=9, max_completion_tokens=15) for _ in range(2))
    texts = [choice.message.content for choice in one.choices]
    assert texts == [choice.message.content for choice in two.choices] and len(set(texts)) == 3
    assert one.usage.completion_tokens == 45 and {choice.message.role for choice in one.choices} == {"assistant"}


def test_streams(client):
    whole = client.chat.completions.create(**CHAT, seed=9, logprobs=True, top_logprobs=3).choices[0]
    chunks = list(client.chat.completions.create(**CHAT, seed=9, logprobs=True, top_logprobs=3, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 61
    choices = [chunk.choices[0] for chunk in chunks[:-1]]
    assert "".join(choice.delta.content or "" for choice in choices) == whole.message.content
    assert choices[0].delta.role == "assistant" and choices[-1].finish_reason == whole.finish_reason == "stop"
    assert [entry for choice in choices if choice.logprobs for entry in choice.logprobs.content] == whole.logprobs.content
    texts = [chunk.choices[0].text for chunk in client.completions.create(model="tiny", prompt="Hello", temperature=0, max_tokens=20, stream=True)]
    assert len(texts) > 5 and "".join(texts) == client.completions.create(model="tiny", prompt="Hello", temperature=0, max_tokens=20).choices[0].text


def test_the_streaming_helper(client):
    with client.chat.completions.stream(**CHAT, temperature=0) as stream:
        deltas = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()
    assert "".join(deltas) == final.choices[0].message.content and len(final.choices[0].message.content) == 60


def test_errors_are_the_clients_own(client, server, wait_until):
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.completions.create(model="other", prompt="a")
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="tiny", prompt="x" * 100)
    assert caught.value.code == "context_length_exceeded" and caught.value.param == "prompt"
    with pytest.raises(openai.BadRequestError, match="penalty"):
        client.chat.completions.create(**CHAT, frequency_penalty=1)


def test_closing_a_stream_ends_the_request(server, client, wait_until):
    driver = server.service.driver
    driver.pause_s, before = 0.02, server.service.totals.cancelled
    try:
        stream = client.chat.completions.create(**CHAT, stream=True)
        next(iter(stream))
        stream.close()
        wait_until(lambda: driver.unfinished == 0, 0.4)
    finally:
        driver.pause_s = 0.0005
    assert server.service.totals.cancelled == before + 1


def test_many_clients_at_once(server):
    """Each gets its own answer."""
    results = {}

    def ask(i):
        with openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", timeout=30) as client:
            results[i] = client.completions.create(model="tiny", prompt=f"{i % 4}", seed=i % 4, max_tokens=30).choices[0].text

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 16 and len(set(results.values())) == 4 and all(results[i] == results[i % 4] for i in results)
