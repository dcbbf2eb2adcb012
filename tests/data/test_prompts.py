"""The prompt stream: once per epoch, reshuffled, no tail lost, exact resume."""

import collections
import json

import pytest

from areal_jax.data.problems import Problem
from areal_jax.data.prompts import PromptDataset, make_prompts
from areal_jax.data.render import Renderer
from areal_jax.models.tokenizer import embedded_tokenizer

TOKENIZER = embedded_tokenizer()
PLAIN = Renderer(TOKENIZER)


def problems(count):
    return [Problem(f"row-{i}", "x" * (1 + i % 7) + str(i), str(i), {"row": i}) for i in range(count)]


def take(iterator, count):
    return [next(iterator) for _ in range(count)]


def test_last_partial_batch():
    """130 prompts in batches of 16: the tail of 2 is carried into the next epoch; each prompt once per epoch; epochs end."""
    iterator = iter(PromptDataset(problems(130), PLAIN))
    batches = [take(iterator, 16) for _ in range(25)]
    stream = [prompt for batch in batches for prompt in batch]
    assert [p.index for p in stream] == list(range(400))
    for epoch in range(3):
        uses = collections.Counter(p.problem_id for p in stream[epoch * 130 : (epoch + 1) * 130])
        assert len(uses) == 130 and set(uses.values()) == {1}
    assert iterator.epoch == 3


def test_every_epoch_and_every_seed_has_its_own_order():
    first = [p.problem_id for p in take(iter(PromptDataset(problems(40), PLAIN, seed=0)), 80)]
    same = [p.problem_id for p in take(iter(PromptDataset(problems(40), PLAIN, seed=0)), 80)]
    other = [p.problem_id for p in take(iter(PromptDataset(problems(40), PLAIN, seed=1)), 80)]
    source = [p.problem_id for p in problems(40)]
    assert first == same and first[:40] != first[40:] and first[:40] != other[:40] and first[:40] != source
    assert take(iter(PromptDataset(problems(4), PLAIN, seed=2**40 + 1)), 1)


def test_resume_is_exact_at_every_place():
    dataset = PromptDataset(problems(13), PLAIN, seed=5)
    whole = take(iter(dataset), 60)
    iterator = iter(dataset)
    for position in range(40):
        state = json.loads(json.dumps(iterator.get_state()))
        fresh = iter(PromptDataset(problems(13), PLAIN, seed=5))
        fresh.set_state(state)
        resumed = take(fresh, 20)
        assert [(p.index, p.problem_id, p.text) for p in resumed] == [(p.index, p.problem_id, p.text) for p in whole[position : position + 20]]
        next(iterator)


@pytest.mark.parametrize(
    "other",
    [
        lambda: PromptDataset(problems(12), PLAIN, seed=5),
        lambda: PromptDataset(problems(13), PLAIN, seed=6),
        lambda: PromptDataset(problems(13), Renderer(TOKENIZER, "{question} ="), seed=5),
        lambda: PromptDataset([*problems(12), Problem("row-12", problems(13)[12].question, "other")], PLAIN, seed=5),
    ],
)
def test_a_state_of_other_data_is_refused(other):
    state = iter(PromptDataset(problems(13), PLAIN, seed=5)).get_state()
    with pytest.raises(ValueError, match="fingerprint"):
        iter(other()).set_state(state)


def test_prompts_carry_what_the_reward_needs():
    rows = problems(9)
    for prompt in take(iter(PromptDataset(rows, Renderer(TOKENIZER, "Q{n}: {question}\n"))), 18):
        row = rows[prompt.metadata["row"]]
        assert prompt.text == f"Q{{n}}: {row.question}\n" == TOKENIZER.decode(prompt.tokens)
        assert (prompt.problem_id, prompt.answer) == (row.problem_id, row.answer)
        assert not prompt.tokens.flags.writeable


def test_long_prompts_are_dropped_by_name():
    rows = [*problems(3), Problem("long", "y" * 30, "1"), Problem("edge", "z" * 10, "1")]
    dataset = PromptDataset(rows, PLAIN, max_prompt_tokens=10)
    assert [(d.problem_id, d.length) for d in dataset.dropped] == [("long", 30)]
    assert len(dataset) == 4 and dataset.longest == 10
    assert {p.problem_id for p in take(iter(dataset), 8)} == {"row-0", "row-1", "row-2", "edge"}
    assert PromptDataset(rows, PLAIN).longest == 30


def test_errors_say_what_is_wrong():
    with pytest.raises(ValueError, match=r"max_prompt_tokens; the shortest has 2 tokens, the limit is 1"):
        make_prompts(problems(3), PLAIN, 1)
    with pytest.raises(ValueError, match="empty"):
        make_prompts([], PLAIN, 0)
    with pytest.raises(ValueError, match="'row-0' comes twice"):
        make_prompts([*problems(2), *problems(1)], PLAIN, 0)
    with pytest.raises(ValueError, match=r"'blank' is empty"):
        make_prompts([Problem("blank", "", "1")], PLAIN, 0)
    with pytest.raises(ValueError, match="prompt_template"):
        PromptDataset(problems(2), Renderer(TOKENIZER, "no place"))
