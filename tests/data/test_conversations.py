"""Rows in chat format, and preferences: what they say, and what they must not."""

import pytest

from areal_jax.data.conversations import conversation
from areal_jax.data.preferences import preference
from areal_jax.data.records import Refused

USER, ANSWER = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
SYSTEM = {"role": "system", "content": "Be brief."}
LATER = [{"role": "user", "content": "And?"}, {"role": "assistant", "content": "So."}]


def test_messages_keep_their_turns_and_learn_the_assistants():
    made = conversation({"messages": [SYSTEM, USER, {**ANSWER, "name": None}, *LATER], "tools": [{"type": "function"}], "id": 7})
    assert made.turns == (SYSTEM, USER, ANSWER, *LATER) and made.learnt == (2, 4) and not made.texts
    assert made.tools == [{"type": "function"}] and made.context == "hi"
    assert conversation({"messages": [USER, ANSWER, *LATER]}, "last").learnt == (3,)


def test_weights_say_which_turns_are_learnt():
    made = conversation({"messages": [USER, {**ANSWER, "weight": 0}, LATER[0], {**LATER[1], "weight": 1}]})
    assert made.learnt == (3,) and made.turns[1] == ANSWER and made.context == "hi hello and?"


@pytest.mark.parametrize("names", [("prompt", "completion"), ("prompt", "response"), ("question", "answer")])
def test_pairs_of_texts_or_messages(names):
    texts = conversation(dict(zip(names, ("Hi", "Hello"), strict=True)))
    assert texts.turns == (USER, ANSWER) and texts.learnt == (1,) and texts.texts
    lists = conversation(dict(zip(names, ([SYSTEM, USER, ANSWER, LATER[0]], [LATER[1]]), strict=True)))
    assert lists.turns == (SYSTEM, USER, ANSWER, *LATER) and lists.learnt == (4,) and not lists.texts, "the prompt's own answers are context"
    assert not conversation(dict(zip(names, ("Hi", [ANSWER]), strict=True))).texts


@pytest.mark.parametrize(
    "row, parts",
    [
        ({"text": "x"}, ("must have messages, prompt and completion", "it has text")),
        ({"chosen": "a", "rejected": "b"}, ("sft.objective=dpo",)),
        ({"messages": [USER, ANSWER], "prompt": "a", "response": "b"}, ("messages as well as prompt and response",)),
        ({"prompt": "a", "response": "b", "completion": "c"}, ("prompt and completion as well as prompt and response",)),
        ({"messages": []}, ("at least one message", "got none")),
        ({"messages": "Hi"}, ("must be a list", "got str")),
        ({"messages": [USER, "Hello"]}, ("'messages', turn 2", "got str")),
        ({"messages": [USER]}, ("must hold an assistant turn", "got user")),
        ({"messages": [USER, {**ANSWER, "weight": 0}]}, ("must hold an assistant turn",)),
        ({"messages": [USER, {**ANSWER, "weight": 0.5}]}, ("'weight' must be 0", "0.5")),
        ({"messages": [USER, {"role": "bot", "content": "x"}]}, ("turn 2", "'role' must be one of", "'bot'")),
        ({"messages": [USER, {"from": "gpt", "value": "x"}]}, ("'role' must be one of", "None")),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}, ANSWER]}, ("turn 1", "'content' must be a text; got list")),
        ({"messages": [USER, {"role": "assistant", "content": " "}]}, ("must hold a text",)),
        ({"messages": [{"role": "user", "content": "\ud83d"}, ANSWER]}, ("surrogate",)),
        ({"prompt": "a", "completion": 7}, ("'completion' must be a list", "got int")),
    ],
)
def test_refusals_name_the_rule_and_the_value(row, parts):
    with pytest.raises(Refused) as caught:
        conversation(row)
    assert all(part in str(caught.value) for part in parts), str(caught.value)


def test_preferences_of_texts_messages_and_whole_conversations():
    chosen, rejected = preference({"prompt": "Hi", "chosen": "Hello", "rejected": "Go away"})
    assert chosen.turns == (USER, ANSWER) and rejected.turns == (USER, {"role": "assistant", "content": "Go away"})
    assert chosen.learnt == rejected.learnt == (1,) and chosen.texts and chosen.context == rejected.context
    bad = {"role": "assistant", "content": "No."}
    lists, _ = preference({"prompt": [SYSTEM, USER], "chosen": [ANSWER], "rejected": [bad]})
    whole, other = preference({"prompt": "Hi", "chosen": [SYSTEM, USER, ANSWER], "rejected": [SYSTEM, USER, bad]})
    assert lists == whole and not whole.texts and other.turns == (SYSTEM, USER, bad)
    longer, _ = preference({"chosen": [USER, ANSWER, LATER[0], LATER[1]], "rejected": [USER, ANSWER, LATER[0], bad]})
    assert longer.learnt == (3,), "turns that both share are context"


@pytest.mark.parametrize(
    "row, parts",
    [
        ({"prompt": "a", "chosen": "b"}, ("'rejected' is missing", "it has chosen, prompt")),
        ({"chosen": "b", "rejected": "c"}, ("must have 'prompt'",)),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, ("must differ",)),
        ({"prompt": "a", "chosen": [ANSWER], "rejected": [USER, ANSWER]}, ("only 'rejected' is a whole one",)),
        ({"chosen": [USER, ANSWER], "rejected": [{"role": "user", "content": "Ho"}, ANSWER]}, ("must begin with the same turns",)),
        ({"prompt": "Ho", "chosen": [USER, ANSWER], "rejected": [USER, LATER[1]]}, ("'prompt' must be the user's last turn",)),
        ({"prompt": [SYSTEM], "chosen": [USER, ANSWER], "rejected": [USER, LATER[1]]}, ("'prompt' must be the turns",)),
        ({"chosen": [USER, ANSWER], "rejected": [USER, LATER[0]]}, ("'rejected' must have an assistant's turn", "got user")),
        ({"chosen": [USER, ANSWER], "rejected": [USER]}, ("'rejected' must have an assistant's turn", "got none")),
    ],
)
def test_preferences_are_refused_by_name(row, parts):
    with pytest.raises(Refused) as caught:
        preference(row)
    assert all(part in str(caught.value) for part in parts), str(caught.value)
