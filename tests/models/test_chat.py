"""Chat templates: byte for byte what transformers renders, and what was rendered by it before."""

import datetime
import json

import pytest

from areal_jax.models.chat import ChatError, ChatTemplate
from areal_jax.models.tokenizer import embedded_tokenizer, load_tokenizer

NAMES = ("qwen2.5", "qwen3", "smollm2")


def turn(role, content, **more):
    return {"role": role, "content": content, **more}


QUESTION, THOUGHT = turn("user", "What is 2+2?"), turn("assistant", "<think>\nIt is\n</think>\n\n4 ")
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": "é<&>", "b": [1, None]}}}
CONVERSATIONS = {
    "one turn": [QUESTION],
    "system": [turn("system", "Be brief.\n"), QUESTION],
    "empty system": [turn("system", ""), QUESTION],
    "history": [QUESTION, turn("assistant", "4"), turn("user", " Sure?\n")],
    "thought in history": [turn("system", "S"), QUESTION, THOUGHT, turn("user", "again")],
    "thought last": [QUESTION, THOUGHT],
    "reasoning key": [QUESTION, turn("assistant", "4", reasoning_content="It is\n"), turn("tool", "x"), turn("assistant", "5", reasoning="because")],
    "tool calls": [QUESTION, {"role": "assistant", "content": "", "tool_calls": [CALL]}, turn("tool", "4"), turn("tool", "5")],
    "keys without values": [QUESTION | {"name": None}, turn("assistant", "4", tool_calls=None, reasoning_content=None), QUESTION],
    "other scripts and special names": [turn("user", "数学 🙂 é<|im_end|>\u2028{{ x }}")],
}
VARIABLES = {
    "plain": {},
    "thinking": {"enable_thinking": True},
    "no thinking": {"enable_thinking": False},
    "tools": {"tools": [{"type": "function", "function": {"name": "add", "description": "a<b & 'c' é", "parameters": {"z": 1, "a": None}}}]},
}


@pytest.fixture(scope="module", params=NAMES)
def pair(request, tokenizer_files):
    """(ours, transformers') of one checkpoint."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    directory = tokenizer_files / request.param
    return load_tokenizer(directory), transformers.AutoTokenizer.from_pretrained(directory)


@pytest.mark.parametrize("variables", VARIABLES)
@pytest.mark.parametrize("conversation", CONVERSATIONS)
def test_text_and_ids_are_those_of_transformers(pair, conversation, variables):
    ours, theirs = pair
    turns, more = CONVERSATIONS[conversation], VARIABLES[variables]
    text = theirs.apply_chat_template(turns, tokenize=False, add_generation_prompt=True, **more)
    assert ours.chat.render(turns, **more) == text
    assert ours.encode(text).tolist() == theirs.apply_chat_template(turns, add_generation_prompt=True, **more)["input_ids"]
    assert ours.chat.render(turns, add_generation_prompt=False) == theirs.apply_chat_template(turns, tokenize=False)


@pytest.mark.parametrize("name", NAMES)
def test_texts_and_ids_made_before(tokenizer_files, name):
    golden = json.loads((tokenizer_files / "golden.json").read_text(encoding="utf-8"))[name]
    tokenizer = load_tokenizer(tokenizer_files / name)
    for case in golden["encode"]:
        assert tokenizer.encode(case["text"]).tolist() == case["ids"]
        assert tokenizer.backend.decode(case["ids"], skip_special_tokens=False) == case["decoded"]
    for case in golden["chat"]:
        options = {key: value for key, value in case.items() if key not in ("messages", "text")}
        assert tokenizer.chat.render(case["messages"], **options) == case["text"]
    assert len(golden["encode"]) == 16 and len(golden["chat"]) >= 4
    assert tokenizer.decode(tokenizer.encode("<think>\nhmm\n</think>\n\n4")) == "<think>\nhmm\n</think>\n\n4", "the verifier looks for these"


TEMPLATES = {
    "blocks on lines of their own": "{% for m in messages %}\n    {% if m.role == 'user' %}\n  {{ m.content }}\n    {% endif %}\n{% endfor %}\nend\n",
    "loop controls": "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
    "json": "{{ {'b': 'é<&>', 'a': [1, none]} | tojson }}{{ messages | tojson(indent=2) }}",
    "json options": "{{ {'b': 1, 'a': 2} | tojson(sort_keys=true, separators=(',', ':')) }}",
    "the day": "{{ strftime_now('%d %b %Y') }}",
    "the day is known": "{% if strftime_now is defined %}{% set day = strftime_now('%Y') %}{% else %}{% set day = 'never' %}{% endif %}{{ day }}",
    "special tokens": "{{ bos_token }}|{{ eos_token }}|{{ pad_token }}|{{ sep_token }}|{{ bos_token is defined }}|{{ sep_token is defined }}",
    "generation": "{% set x = 1 %}{% for m in messages %}{% generation %}{% set x = 2 %}\n  {{ m.content }}{{ x }}{% endgeneration %}{% endfor %}{{ x }}",
    "names that are given": "{{ tools is none }}{{ documents is none }}{{ add_generation_prompt }}{{ enable_thinking is defined }}",
    "namespace": "{% set n = namespace(k=0) %}{% for m in messages %}{% set n.k = n.k + 1 %}{% endfor %}{{ n.k }}",
    "macro": "{% macro f(x) %}<{{ x }}>{% endmacro %}{{ f(1) }}",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_templates_are_given_is_what_transformers_gives(tmp_path, name):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    checkpoint(tmp_path, TEMPLATES[name])
    turns = CONVERSATIONS["history"]
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    assert load_tokenizer(tmp_path).chat.render(turns) == theirs


def checkpoint(directory, template):
    """The embedded tokenizer with a chat template in its configuration."""
    embedded_tokenizer().save(directory)
    file = directory / "tokenizer_config.json"
    config = json.loads(file.read_text()) | {"bos_token": {"__type": "AddedToken", "content": "####"}}
    file.write_text(json.dumps(config if template is None else config | {"chat_template": template}))


def test_where_the_template_is_found(tmp_path):
    checkpoint(tmp_path, None)
    assert load_tokenizer(tmp_path).chat is None and embedded_tokenizer().chat is None
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "legacy"}))
    assert load_tokenizer(tmp_path).chat.render([]) == "legacy"
    checkpoint(tmp_path, [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "{{ bos_token }}{{ eos_token }}"}])
    assert load_tokenizer(tmp_path).chat.render([]) == "####<eos>"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert load_tokenizer(tmp_path).chat.render([]) == "file"


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ([{"name": "rag", "template": "x"}, {"name": "a", "template": "y"}], "named 'default'; they are a, rag"),
        (3, "must be a text.*int"),
        ([{"name": "default"}], "must be a text.*list"),
        ({"a": 1}, "'default'"),
    ],
)
def test_templates_that_cannot_be_chosen_from(tmp_path, template, words):
    checkpoint(tmp_path, template)
    with pytest.raises(ValueError, match=words) as caught:
        load_tokenizer(tmp_path)
    assert "tokenizer_config.json" in str(caught.value)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{% for m in messages %}", r"is broken in line 1: "),
        ("a\n{{ x | no_filter }}", r"is broken in line 2: .*no_filter"),
        ("{{ raise_exception('not\n\nthis') }}", r"refuses the prompt: not this;"),
        ("{{ messages[0].content + 1 }}", r"refuses the prompt: "),
        ("{{ messages.append(1) }}", r"refuses the prompt: .*append"),
        ("{{ ''.__class__.__mro__ }}", r"refuses the prompt: .*__class__"),
    ],
)
def test_broken_templates_and_those_that_reach_out_end_in_one_line(source, words):
    with pytest.raises(ChatError, match=words) as caught:
        ChatTemplate(source, {}, "dir/chat_template.jinja").render([QUESTION])
    assert "\n" not in str(caught.value) and "dir/chat_template.jinja" in str(caught.value) and "task.chat=off" in str(caught.value)


def test_variables_and_the_time():
    template = ChatTemplate("{% set y = 1 %}{{ x }}{{ y }}{{ strftime_now('%Y') }}", {}, "t")
    assert {"x"} <= template.variables and "y" not in template.variables
    assert template.render([], x="a", now=datetime.datetime(1999, 1, 1)) == "a11999"
