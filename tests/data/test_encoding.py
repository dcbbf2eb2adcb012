"""What is learnt of a conversation, token by token, with real tokenizers and their chat templates."""

import json

import numpy as np
import pytest

from areal_jax.config import base_config
from areal_jax.data.conversations import conversation
from areal_jax.data.encoding import Encoder
from areal_jax.data.records import Refused
from areal_jax.models.chat import ChatTemplate
from areal_jax.models.tokenizer import embedded_tokenizer, load_tokenizer

TALK = [
    {"role": "system", "content": "Answer in one word."},
    {"role": "user", "content": "Capital of France?"},
    {"role": "assistant", "content": "Paris"},
    {"role": "user", "content": "Of Österreich? 漢🙂"},
    {"role": "assistant", "content": "Wien\n\n  (Vienna)"},
]


@pytest.fixture(scope="module")
def smollm2(tokenizer_files):
    return load_tokenizer(tokenizer_files / "smollm2")


@pytest.fixture(scope="module")
def qwen3(tokenizer_files):
    return load_tokenizer(tokenizer_files / "qwen3")


def section(**keys):
    task = base_config().task
    task.update(keys)
    return task


def by_hand(tokenizer, text):
    """ChatML read again without a template: (ids, mask) with each assistant's text and its <|im_end|> learnt, up to the last of them."""
    ids, mask = [], []
    for number, part in enumerate(text.split("<|im_start|>assistant\n")):
        body, end, rest = part.partition("<|im_end|>") if number else ("", "", part)
        for piece, learnt in ((body + end, 1), (rest + "<|im_start|>assistant\n", 0)):
            piece_ids = tokenizer.backend.encode(piece, add_special_tokens=False).ids
            ids, mask = ids + piece_ids, mask + [learnt] * len(piece_ids)
    last = max(i for i, m in enumerate(mask) if m) + 1
    return np.array(ids[:last]), np.array(mask[:last], bool)


@pytest.mark.parametrize("learn", ["all", "last"])
@pytest.mark.parametrize("name", ["smollm2", "qwen2.5"])
def test_assistant_turns_and_their_ends_are_learnt(tokenizer_files, name, learn):
    tokenizer = load_tokenizer(tokenizer_files / name)
    made = Encoder(tokenizer, section())(conversation({"messages": [*TALK, {"role": "user", "content": "Thanks"}]}, learn))
    text = "".join(f"<|im_start|>{turn['role']}\n{turn['content']}<|im_end|>\n" for turn in TALK)
    ids, mask = by_hand(tokenizer, text)
    if learn == "last":
        mask[: np.flatnonzero(np.diff(mask.astype(int)) == 1)[-1] + 1] = False
    np.testing.assert_array_equal(made.tokens, ids)
    np.testing.assert_array_equal(made.trained, mask)
    assert made.tokens.dtype == np.int32 and not made.trained[0] and made.trained[-1] and made.tokens[-1] == tokenizer.eos_ids[0]


def test_masks_are_those_of_transformers(tokenizer_files):
    """Its own marks ({% generation %}) in the template, its own offsets from text to tokens."""
    transformers = pytest.importorskip("transformers", reason="compares with transformers")
    source = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}"
        "{% else %}{{ m.content + '<|im_end|>' }}{% endif %}\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    theirs = transformers.AutoTokenizer.from_pretrained(tokenizer_files / "smollm2")
    wanted = theirs.apply_chat_template(TALK, chat_template=source, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
    ours = load_tokenizer(tokenizer_files / "smollm2")
    ours.chat = ChatTemplate(source, {}, "here")
    made = Encoder(ours, section())(conversation({"messages": TALK}))
    length = made.tokens.size
    np.testing.assert_array_equal(made.tokens, wanted["input_ids"][:length])
    np.testing.assert_array_equal(made.trained, np.array(wanted["assistant_masks"], bool)[:length])
    assert not any(wanted["assistant_masks"][length:])


def test_texts_become_a_chat_with_the_tasks_template_and_system_turn(smollm2):
    made = Encoder(smollm2, section(prompt_template="Q: {question}", system_prompt="Be brief."))(conversation({"prompt": "1+1?", "completion": "2"}))
    same = Encoder(smollm2, section())(
        conversation({"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Q: 1+1?"}, {"role": "assistant", "content": "2"}]})
    )
    np.testing.assert_array_equal(made.tokens, same.tokens)
    np.testing.assert_array_equal(made.trained, same.trained)
    assert smollm2.decode(made.tokens[made.trained]) == "2"


def test_without_a_template_prompt_and_answer_are_encoded_as_generation_has_them(smollm2, tokenizer_files):
    plain = Encoder(smollm2, section(chat="off"))(conversation({"prompt": "a", "completion": "b c"}))
    expected = [*smollm2.encode("a"), *smollm2.encode("b c"), smollm2.eos_ids[0]]
    assert plain.tokens.tolist() == expected and plain.trained.tolist() == [False] + [True] * (len(expected) - 1)
    stories = load_tokenizer(tokenizer_files / "stories260k")
    began = Encoder(stories, section())(conversation({"prompt": "Once", "completion": "upon"}))
    assert began.tokens[: len(stories.prefix)].tolist() == list(stories.prefix) and len(stories.prefix) == 1
    for chat in ("auto", "off"):
        with pytest.raises(Refused, match="messages need a chat template"):
            Encoder(embedded_tokenizer(), section(chat=chat))(conversation({"messages": TALK}))


def test_qwen3_learns_the_last_turn_but_not_one_that_it_would_write_otherwise(qwen3):
    """Its template writes an empty reasoning before the last answer, and takes it away once more turns follow."""
    encode = Encoder(qwen3, section())
    with pytest.raises(Refused, match=r"turn 3 \(assistant\).*must write a turn alike whether or not others follow.*sft\.learn_turns=last"):
        encode(conversation({"messages": TALK}))
    made = encode(conversation({"messages": TALK}, "last"))
    assert qwen3.backend.decode(made.tokens[made.trained], skip_special_tokens=False) == "<think>\n\n</think>\n\nWien\n\n  (Vienna)<|im_end|>"
    without = Encoder(qwen3, section(enable_thinking=False))(conversation({"messages": TALK}, "last"))
    assert qwen3.backend.decode(without.tokens[without.trained], skip_special_tokens=False) == "Wien\n\n  (Vienna)<|im_end|>"
    np.testing.assert_array_equal(made.tokens, without.tokens)
    thought = [*TALK[:2], {"role": "assistant", "content": "Paris", "reasoning_content": "France: Paris."}]
    made = encode(conversation({"messages": thought}))
    assert qwen3.decode(made.tokens[made.trained]).split() == ["<think>", "France:", "Paris.", "</think>", "Paris"]


def test_tools_reach_the_template(qwen3):
    tools = [{"type": "function", "function": {"name": "capital_of", "parameters": {}}}]
    call = {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": {"name": "capital_of", "arguments": {"x": "FR"}}}]}
    made = Encoder(qwen3, section())(conversation({"messages": [TALK[1], call], "tools": tools}))
    assert "capital_of" in qwen3.decode(made.tokens[~made.trained]) and '"x": "FR"' in qwen3.decode(made.tokens[made.trained])


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize(
    "source, messages, part",
    [
        (CHATML.replace("<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\n<think>\n{% endif %}"), TALK, "the tokens that generation is given"),
        (CHATML, [TALK[1], {"role": "assistant", "content": "\n\nParis"}], "a token reaches over its end"),
        (
            "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}",
            TALK,
            "must end an assistant's turn",
        ),
        (CHATML.replace("{{ m.content }}", "{{ m.content.split('(')[0] }}"), TALK, "must write what is learnt; it leaves a part out"),
        ("{% for m in messages if m.role != 'system' %}" + CHATML.removeprefix("{% for m in messages %}"), TALK, "must write the system turn"),
        (CHATML, [TALK[1], {"role": "assistant", "content": "a<|im_end|>b"}], "turn 2 must not spell out an end-of-text token"),
        (CHATML, [{"role": "user", "content": "<|im_end|>"}, TALK[2]], "turn 1 must not spell out"),
        ("{{ messages[5].x.y }}", TALK, "refuses the prompt"),
        ("{% if add_generation_prompt %}{% else %}{{ messages[-1].content }}{% endif %}", TALK[1:3], "the tokens that generation is given"),
    ],
)
def test_templates_that_do_not_allow_an_exact_mask_are_refused(tokenizer_files, source, messages, part):
    tokenizer = load_tokenizer(tokenizer_files / "smollm2")
    tokenizer.chat = ChatTemplate(source, {}, "here")
    with pytest.raises(ValueError, match=part.replace("(", r"\(")):
        Encoder(tokenizer, section())(conversation({"messages": messages}))


def test_a_last_turn_without_an_end_gets_one(tokenizer_files):
    tokenizer = load_tokenizer(tokenizer_files / "smollm2")
    tokenizer.chat = ChatTemplate(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}", {}, "here"
    )
    made = Encoder(tokenizer, section())(conversation({"messages": TALK[1:3]}))
    assert made.tokens[-1] == tokenizer.eos_ids[0] and tokenizer.decode(made.tokens[made.trained]) == " Paris\n"


@pytest.mark.parametrize("name", ["smollm2", "qwen2.5", "qwen3"])
def test_what_is_not_learnt_is_the_recorded_prompt(tokenizer_files, name):
    recorded = json.loads((tokenizer_files / "golden.json").read_text())[name]["chat"]
    asked = [entry for entry in recorded if entry.keys() == {"messages", "add_generation_prompt", "text"} and entry["add_generation_prompt"]]
    assert asked
    tokenizer = load_tokenizer(tokenizer_files / name)
    for entry in asked:
        made = Encoder(tokenizer, section())(conversation({"messages": [*entry["messages"], {"role": "assistant", "content": "Yes."}]}, "last"))
        np.testing.assert_array_equal(made.tokens[: int(np.argmax(made.trained))], tokenizer.encode(entry["text"]))
