"""Prompts with and without a chat template, and what of them reaches the verifier and the warm-up."""

import json

import numpy as np
import pytest

from areal_jax.assembly import load_problems
from areal_jax.config import ConfigError, base_config, validate
from areal_jax.data.problems import Problem
from areal_jax.data.prompts import PromptDataset
from areal_jax.data.render import Renderer
from areal_jax.data.task import demonstrations, load_task
from areal_jax.models.chat import ChatTemplate
from areal_jax.models.tokenizer import Tokenizer, embedded_tokenizer, load_tokenizer

PLAIN = embedded_tokenizer()
CHATML = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }};{% endfor %}[assistant]"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
)


def tokenizer_of(template, prefix=()):
    tokenizer = Tokenizer(PLAIN.backend, 0, (1,), ChatTemplate(template, {}, "chat.jinja"))
    tokenizer.prefix = prefix
    return tokenizer


CHAT = tokenizer_of(CHATML, prefix=(9,))
SYSTEM = {"role": "system", "content": "Be brief."}
TALK = ({"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"})


def problem(*turns):
    return Problem("row-1", "1+1?", "2", turns=turns)


@pytest.mark.parametrize(
    ("options", "turns", "text"),
    [
        ({}, (), "[user]1+1?;[assistant]"),
        ({"template": "Q: {question}"}, (), "[user]Q: 1+1?;[assistant]"),
        ({"chat": "on", "system_prompt": "Think."}, (), "[system]Think.;[user]1+1?;[assistant]"),
        ({"system_prompt": "Think."}, (SYSTEM,), "[system]Be brief.;[user]1+1?;[assistant]"),
        ({"system_prompt": "Think.", "template": "Q: {question}"}, TALK, "[system]Think.;[user]Hi;[assistant]Hello!;[user]Q: 1+1?;[assistant]"),
        ({}, (SYSTEM, *TALK), "[system]Be brief.;[user]Hi;[assistant]Hello!;[user]1+1?;[assistant]"),
        ({"enable_thinking": False}, (), "[user]1+1?;[assistant]<think></think>"),
        ({"enable_thinking": True}, (), "[user]1+1?;[assistant]"),
    ],
)
def test_question_is_the_users_turn(options, turns, text):
    rendered = Renderer(CHAT, **options)(problem(*turns))
    assert rendered.text == text and rendered.tokens.tolist() == PLAIN.encode(text).tolist(), "a chat template writes its own beginning token"
    assert not rendered.opens_thinking


def test_without_chat_the_template_is_the_text_after_what_the_tokenizer_puts_before_it():
    off = Renderer(CHAT, "Q: {question}", chat="off")
    assert off(problem()).text == "Q: 1+1?" and off(problem()).tokens.tolist() == [9, *PLAIN.encode("Q: 1+1?")]
    assert off(problem(SYSTEM)).text == "Q: Be brief.\n\n1+1?"
    assert Renderer(PLAIN)(problem()).tokens.tolist() == PLAIN.encode("1+1?").tolist() and Renderer(PLAIN)(problem()).tokens.dtype == np.int32
    with pytest.raises(ValueError, match=r"'row-1' is a conversation of 3 turns, which needs a chat template"):
        off(problem(*TALK))


@pytest.mark.parametrize(
    ("tokenizer", "options", "words"),
    [
        (PLAIN, {"chat": "on"}, r"'task\.chat=on'.*has none"),
        (PLAIN, {"system_prompt": "x"}, r"'task\.system_prompt'.*has none"),
        (PLAIN, {"enable_thinking": False}, r"'task\.enable_thinking'.*has none"),
        (tokenizer_of("{{ messages[0].content }}"), {"enable_thinking": False}, r"'task\.enable_thinking'.*chat\.jinja' does not"),
        (tokenizer_of("{{ messages[-1].content }}"), {"system_prompt": "x"}, r"'chat\.jinja' leaves 'task\.system_prompt' out"),
        (tokenizer_of("{% if %}"), {}, r"'chat\.jinja' is broken in line 1: .*'task\.chat=off'"),
        (tokenizer_of("{{ raise_exception('no\n system') }}"), {}, r"'chat\.jinja' refuses the prompt: no system; .*'task\.chat=off'"),
        (tokenizer_of("{{ messages[5].content.split() }}"), {}, r"'chat\.jinja' refuses the prompt: "),
    ],
)
def test_what_the_chat_template_cannot_do_is_one_line_of_configuration_error(tmp_path, tokenizer, options, words):
    config = base_config()
    config.task.update(path=str(rows(tmp_path)), **options)
    config.task.name = "jsonl"
    with pytest.raises(ConfigError, match=words) as caught:
        load_task(config, tokenizer)
    assert "\n" not in str(caught.value)


def rows(tmp_path, count=4):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"question": f"{i}+1?", "answer": f"add\n#### {i + 1}"}) + "\n" for i in range(count)))
    return path


def test_a_broken_template_does_not_hinder_a_run_without_chat():
    assert Renderer(tokenizer_of("{% if %}"), chat="off")(problem()).text == "1+1?"


def test_the_verifier_is_told_where_the_prompt_opens_thinking():
    """As DeepSeek-R1's distillations do."""
    render = Renderer(tokenizer_of("{{ messages[0].content }}<|Assistant|><think>\n"))
    (prompt,) = PromptDataset([Problem("row-1", "1+1?", "2", {"task": "rows"})], render).prompts
    assert prompt.metadata == {"task": "rows", "in_thinking": True}
    (other,) = PromptDataset([Problem("row-1", "1+1?", "2", {"task": "rows"})], Renderer(CHAT)).prompts
    assert other.metadata == {"task": "rows"}


def test_the_prompt_does_not_depend_on_the_day():
    assert Renderer(tokenizer_of("{{ strftime_now('%d %b %Y') }}"))(problem()).text == "26 Jul 2024"


def test_demonstrations_stand_in_the_chat(tmp_path):
    config = base_config()
    config.task.update(path=str(rows(tmp_path)), name="jsonl", system_prompt="Think.")
    task = load_task(config, CHAT)
    pairs = demonstrations(config, task, CHAT)
    assert len(pairs) == len(task.train) >= 2
    for (prompt, response), row in zip(pairs, task.train, strict=True):
        assert PLAIN.decode(prompt) == f"[system]Think.;[user]{row.question};[assistant]"
        assert PLAIN.decode(response) == row.metadata["solution"] and response[-1] == 1
    held = [p.tokens for p in task.heldout]
    assert all(PLAIN.decode(tokens).startswith("[system]Think.;[user]") for tokens in held)


def test_gsm8k_in_the_chat_of_smollm2(tokenizer_files):
    train = tokenizer_files.parent / "data" / "gsm8k" / "train.jsonl"
    if not train.is_file():
        pytest.skip(f"{train} is not here")
    config = base_config()
    config.model.path = str(tokenizer_files / "smollm2")
    config.task.update(path=str(train), eval_path=str(train.with_name("test.jsonl")), max_prompt_tokens=160)
    tokenizer, task, _ = load_problems(validate(config))
    assert len(task.heldout) > 1000 and task.longest_prompt <= 160 and not task.bad_rows
    assert len(task.prompts) + len(task.heldout) + len(task.overlong) == 7473 + 1319
    assert 0 < len(task.overlong) < 1000 and all(row.length > 160 for row in task.overlong)
    assert "longer than 'task.max_prompt_tokens'" in task.report()[-1] and task.overlong[0].problem_id in task.report()[-1]
    prompt = task.prompts.prompts[0]
    assert prompt.text.endswith(f"<|im_start|>user\n{task.train[0].question}<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.backend.decode(prompt.tokens.tolist(), skip_special_tokens=False) == prompt.text


def test_prompts_are_those_that_smollm2_was_asked_with(tokenizer_files):
    golden = tokenizer_files.parent / "models" / "smollm2_135m_instruct_gguf" / "golden.json"
    if not golden.is_file():
        pytest.skip(f"{golden} is not here")
    render = Renderer(load_tokenizer(tokenizer_files / "smollm2"))
    cases = json.loads(golden.read_text())["greedy"]
    for case in cases:
        assert render(Problem("q", case["question"], "?")).tokens.tolist() == case["prompt_ids"]
    assert len(cases) >= 2
