"""Rows of one's own: layouts, broken rows by file and line, and the split."""

import base64
import json
import math

import pytest

from areal_jax.data import rows


def write(path, *lines):
    path.write_bytes(b"".join((line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n" for line in lines))
    return path


EXPECTED = {  # records, or words of the error; the line of the bad row where there is one
    "data-003": (2, None, None),
    "data-006": (2, 2, "not JSON"),
    "data-015": (3, None, None),
    "data-017": (2, None, None),  # long prompts are dropped where the tokenizer is known
    "data-019": (1, None, None),
    "data-021": (2, 3, "text or a finite number"),
    "data-022": (1, None, None),
    "data-024": (1, 1, "not UTF-8"),
    "data-025": (None, None, "JSON list"),
    "data-028": (None, None, "gzip"),
    "data-029": (None, None, "Git LFS"),
    "data-033": (None, 1, "no answer"),
}


@pytest.mark.parametrize("case_id", EXPECTED)
def test_shared_cases(cases, tmp_path, case_id):
    with open(cases / "data.jsonl", encoding="utf-8") as stream:
        case = next(case for case in map(json.loads, stream) if case["id"] == case_id)
    path = tmp_path / case["file"]
    path.write_bytes(base64.b64decode(case["bytes_b64"]))
    count, line, words = EXPECTED[case_id]
    if count is None:
        with pytest.raises(rows.RowsError, match=words) as caught:
            rows.read_rows(path)
        assert str(path) in str(caught.value)
        return
    problems, bad = rows.read_rows(path)
    assert len(problems) == count
    assert len({problem.problem_id for problem in problems}) == count
    if line is None:
        assert not bad
        return
    assert [(row.file, row.line) for row in bad] == [(str(path), line)] and words in bad[0].reason
    with pytest.raises(rows.RowsError, match=words) as caught:
        rows.read_rows(path, on_bad_row="error")
    assert f"{path}:{line}:" in str(caught.value)


def test_separators_stay_inside_the_text(tmp_path):
    path = write(tmp_path / "a.jsonl", json.dumps({"question": "a\u2028b\u0085c", "answer": "1"}, ensure_ascii=False).encode())
    assert rows.read_rows(path)[0][0].question == "a\u2028b\u0085c"


def test_gsm8k(tmp_path):
    worked = "5*200=<<5*200=1000>>1000\n#### 1,000"
    problem = rows.read_rows(write(tmp_path / "gsm8k.jsonl", {"question": "How many?", "answer": worked}))[0][0]
    assert (problem.question, problem.answer, problem.problem_id) == ("How many?", "1,000", "gsm8k.jsonl:1")
    assert problem.metadata == {"task": "rows", "file": "gsm8k.jsonl", "line": 1, "solution": worked}
    assert json.loads(json.dumps(problem.metadata)) == problem.metadata


@pytest.mark.parametrize(
    ("row", "question", "answer"),
    [
        ({"problem": "p", "solution": "so $\\boxed{\\frac{1}{2}}$."}, "p", "\\frac{1}{2}"),
        ({"problem": "p", "solution": "long way", "answer": "3"}, "p", "3"),
        ({"prompt": "p", "target": 4}, "p", "4"),
        ({"input": "p", "output": 0.5}, "p", "0.5"),
        ({"question": "p", "answer": 0}, "p", "0"),
        ({"prompt": [{"role": "user", "content": "1+1?"}], "reward_model": {"ground_truth": "2"}}, "1+1?", "2"),
        ({"messages": [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "1+1=2\n#### 2"}]}, "1+1?", "2"),
    ],
)
def test_layouts(tmp_path, row, question, answer):
    problems, bad = rows.read_rows(write(tmp_path / "a.jsonl", row))
    assert not bad
    assert (problems[0].question, problems[0].answer) == (question, answer)


def turn(role, content, **more):
    return {"role": role, "content": content, **more}


SYSTEM, ASKED = turn("system", "Be brief."), turn("user", "1+1?")
TOLD = turn("assistant", "It is 2.", reasoning_content="1 and 1")


@pytest.mark.parametrize(
    ("row", "turns", "question", "answer"),
    [
        ({"prompt": [SYSTEM, ASKED], "answer": "2"}, (SYSTEM,), "1+1?", "2"),
        ({"prompt": [ASKED, TOLD, turn("user", "Sure?")], "answer": "yes"}, (ASKED, TOLD), "Sure?", "yes"),
        ({"messages": [SYSTEM, ASKED, TOLD, turn("user", "Sure?"), turn("assistant", "so\n#### 2")]}, (SYSTEM, ASKED, TOLD), "Sure?", "2"),
        ({"messages": [SYSTEM, ASKED, TOLD], "answer": "2"}, (SYSTEM,), "1+1?", "2"),
        ({"messages": [SYSTEM, ASKED], "answer": "2"}, (SYSTEM,), "1+1?", "2"),
    ],
)
def test_turns_of_a_conversation_are_kept(tmp_path, row, turns, question, answer):
    (problem,), bad = rows.read_rows(write(tmp_path / "a.jsonl", row))
    assert not bad
    assert (problem.turns, problem.question, problem.answer) == (turns, question, answer)


def test_conversations_are_the_same_by_all_that_was_said_but_the_system_turn(tmp_path):
    lines = [[ASKED], [SYSTEM, ASKED], [turn("user", "2+2?"), TOLD, ASKED], [turn("user", "3+3?"), TOLD, ASKED]]
    problems, _ = rows.read_rows(write(tmp_path / "a.jsonl", *({"prompt": line, "answer": "2"} for line in lines)))
    canonical = [problem.canonical for problem in problems]
    assert canonical[0] == canonical[1] == rows.normalise("1+1?") and len(set(canonical)) == 3


def test_named_keys_win_over_recognised_ones(tmp_path):
    path = write(tmp_path / "a.jsonl", {"question": "not this", "answer": "0", "deep": {"ask": "this", "say": 5}})
    problem = rows.read_rows(path, "deep.ask", "deep.say")[0][0]
    assert (problem.question, problem.answer) == ("this", "5")
    with pytest.raises(rows.RowsError, match=r"no answer under 'deep.tell'; the row has answer, deep, question"):
        rows.read_rows(path, "deep.ask", "deep.tell")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"[1, 2]", "JSON object"),
        ({"answer": "1"}, "no question"),
        ({"question": "q"}, "no answer"),
        ({"question": "q", "answer": None}, "no answer"),
        ({"question": " ", "answer": "1"}, "question is empty"),
        ({"question": 3, "answer": "1"}, "question under 'question'"),
        ({"question": "q", "answer": " "}, "answer is empty"),
        ({"question": "q", "answer": "work ####"}, "answer is empty"),
        ({"question": "q", "answer": True}, "finite number"),
        ({"question": "q", "answer": math.nan}, "finite number"),
        ({"question": "q", "answer": "\\boxed{5"}, "never closed"),
        ({"question": "q", "answer": "x" * 2000}, "at most 1000"),
        (b'{"question": "q", "answer": ' + b"9" * 5000 + b"}", "not JSON"),
        (b'{"question": "\\ud800", "answer": "1"}', "surrogate"),
        ({"prompt": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}], "answer": "1"}, "in turn up to the user's question; got user, user"),
        ({"prompt": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "answer": "1"}, "got user, assistant"),
        ({"prompt": [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}], "answer": "1"}, "got user, system"),
        ({"prompt": [{"role": "system", "content": "a"}], "answer": "1"}, "got system"),
        ({"prompt": [], "answer": "1"}, "got none"),
        ({"prompt": [{"role": "tool", "content": "a"}], "answer": "1"}, "a role of system, user"),
        ({"prompt": [{"role": "user", "content": [{"type": "text", "text": "a"}]}], "answer": "1"}, "a text as content"),
        ({"prompt": [{"role": "user", "content": "\ud800"}], "answer": "1"}, "surrogate"),
        ({"messages": [{"role": "user", "content": "a"}]}, "an assistant's turn"),
        ({"messages": []}, "got none"),
        ({"prompt": ["a"], "answer": "1"}, "chat messages"),
    ],
)
def test_bad_rows_are_named(tmp_path, line, reason):
    path = write(tmp_path / "a.jsonl", {"question": "q1", "answer": "1"}, b"", line, {"question": "q2", "answer": "2"})
    problems, bad = rows.read_rows(path)
    assert [problem.problem_id for problem in problems] == ["a.jsonl:1", "a.jsonl:4"]
    assert [row.line for row in bad] == [3] and reason in bad[0].reason
    assert str(bad[0]).startswith(f"{path}:3: ")


def test_files_without_a_row(tmp_path):
    with pytest.raises(rows.RowsError, match="readable file"):
        rows.read_rows(tmp_path / "absent.jsonl")
    with pytest.raises(rows.RowsError, match="it is empty"):
        rows.read_rows(write(tmp_path / "empty.jsonl", b"", b"  "))
    with pytest.raises(rows.RowsError, match=r"2 bad ones: .*bad.jsonl:1: not JSON"):
        rows.read_rows(write(tmp_path / "bad.jsonl", b"{", b"{"))


def test_byte_order_mark_and_windows_line_ends(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"question": "q", "answer": "1"}\r\n{"question": "r", "answer": "2"}\r\n')
    assert [problem.question for problem in rows.read_rows(path)[0]] == ["q", "r"]


def many(tmp_path, count, start=0):
    path = write(tmp_path / f"many{start}.jsonl", *({"question": f"What is {i} + 1?", "answer": i + 1} for i in range(start, start + count)))
    return rows.read_rows(path)[0]


def test_split_is_disjoint_whole_and_about_the_fraction(tmp_path):
    problems = many(tmp_path, 2000)
    train, held_out = rows.split_rows(problems, 0.1)
    assert len(train) + len(held_out) == 2000 and not {p.canonical for p in train} & {p.canonical for p in held_out}
    assert 150 < len(held_out) < 250  # 200 ± 13 is one standard deviation


def test_split_does_not_depend_on_the_other_rows(tmp_path):
    few, more = many(tmp_path, 200), many(tmp_path, 1000)
    held_out = {p.question for p in rows.split_rows(more, 0.2)[1]}
    assert {p.question for p in rows.split_rows(few, 0.2)[1]} == {p.question for p in few} & held_out
    assert rows.split_rows(few[::-1], 0.2)[1] == rows.split_rows(few, 0.2)[1][::-1]


def test_twins_stay_on_one_side(tmp_path):
    lines = [{"question": text.format(i), "answer": "1"} for i in range(50) for text in ("Is {} prime?", "  is {}  PRIME?", "Is {}\u00a0prime?")]
    train, held_out = rows.split_rows(rows.read_rows(write(tmp_path / "a.jsonl", *lines))[0], 0.3)
    assert len(train) % 3 == 0 and len(held_out) % 3 == 0 and held_out and train


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("fraction", [0.001, 0.9])
def test_small_files_have_both_sides(tmp_path, count, fraction):
    train, held_out = rows.split_rows(many(tmp_path, count), fraction)
    assert train and held_out and len(train) + len(held_out) == count


def test_one_question_cannot_be_split(tmp_path):
    with pytest.raises(rows.RowsError, match=r"task\.eval_path"):
        rows.split_rows(many(tmp_path, 1), 0.5)


def test_without_takes_away_what_is_held_out(tmp_path):
    problems = many(tmp_path, 10)
    kept, removed = rows.without(problems, many(tmp_path, 4, start=8))
    assert (len(kept), removed) == (8, 2)
