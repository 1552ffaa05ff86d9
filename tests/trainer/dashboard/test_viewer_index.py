"""The index of groups: filters, order, pages, new lines, damaged lines, and very many groups."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.runs.recorded_groups import entry, write_lines
from trainer.dashboard.group_index import GroupIndex, Query
from trainer.observe.group_files import LINES


def found(index: GroupIndex, **query: Any) -> list[int]:
    """Returns the numbers of the groups found, in order."""
    total, _, rows = index.search(Query(**query), limit=1000, offset=0)
    assert total == len(rows)
    return [int(row["id"].removeprefix("group-")) for row in rows]


def write(directory: Path, *lines: object) -> None:
    text = "".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines)
    (directory / LINES).write_text(text, encoding="utf-8")


def test_every_filter_finds_its_groups_and_no_others(tmp_path: Path) -> None:
    dropped = entry(
        9,
        reason="reward",
        detail="no grader",
        reward=None,
        rewards=[None],
        marks=["timeout"],
        tokens=[400],
    )
    write(
        tmp_path,
        {
            "step": 1,
            "groups": [
                entry(1, reward=0.25, tokens=[5, 50]),
                entry(2, reward=0.5, prompt="Straße", marks=["truncated"]),
            ],
        },
        {
            "step": 2,
            "groups": [entry(3, reward=1.0, tokens=[70]), entry(4, reward=0.0, reused=True)],
            "dropped": [dropped],
        },
    )
    index = GroupIndex(tmp_path)
    assert found(index, sort="step") == [1, 2, 3, 4, 9]
    assert found(index, step_from=2, sort="step") == [3, 4, 9]
    assert found(index, step_to=1, sort="step") == [1, 2]
    assert found(index, reward_min=0.5, sort="-reward") == [3, 2]
    assert found(index, reward_max=0.25, sort="reward") == [4, 1]
    assert found(index, length_min=50, sort="length") == [1, 3, 9]
    assert found(index, length_max=50, step_to=1, length_min=20) == [1]
    assert found(index, text="STRASSE") == [2]
    assert found(index, text="prompt-4") == [4]
    assert found(index, text="group-3") == [3]
    assert found(index, text="% _ ' \" ;--") == []
    assert found(index, error="truncated") == [2]
    assert (
        found(index, error="timeout")
        == found(index, error="dropped")
        == found(index, error="reward")
        == [9]
    )
    assert found(index, error="any", sort="step") == [2, 9]
    assert found(index, error="none", sort="step") == [1, 3, 4]
    assert found(index, error="reused") == [4]
    row = index.find("group-9")
    assert row is not None
    assert (row["step"], row["place"], row["reason"], row["detail"], row["rewards"]) == (
        2,
        2,
        "reward",
        "no grader",
        [None],
    )
    assert (row["tokens"], row["marks"]) == ([400], ["timeout", "dropped", "reward"])


def test_pages_follow_each_other(tmp_path: Path) -> None:
    write_lines(tmp_path, 1, 10)
    index = GroupIndex(tmp_path)
    everything = found(index, sort="-reward")
    pages = [
        index.search(Query(sort="-reward"), limit=50, offset=offset)[2]
        for offset in range(0, 320, 50)
    ]
    assert [len(page) for page in pages] == [50] * 6 + [20]
    assert [int(row["id"].removeprefix("group-")) for page in pages for row in page] == everything
    assert index.search(Query(), limit=50, offset=10_000) == (320, 10_000, [])


def test_one_group_may_be_trained_on_in_several_steps(tmp_path: Path) -> None:
    write(tmp_path, *({"step": step, "groups": [entry(1, reused=step > 2)]} for step in (2, 5, 9)))
    index = GroupIndex(tmp_path)
    newest, middle = index.find("group-1"), index.find("group-1", 5)
    assert newest is not None
    assert middle is not None
    assert (newest["step"], middle["step"], index.find("group-1", 3)) == (9, 5, None)
    assert [row["step"] for row in index.of_prompt("prompt-1", 10)] == [2, 5, 9]
    assert [row["step"] for row in index.of_prompt("prompt-1", 2)] == [5, 9]


def test_only_new_lines_are_read_but_a_rewritten_file_is_read_again(tmp_path: Path) -> None:
    write_lines(tmp_path, 1, 3, each=2)
    index = GroupIndex(tmp_path)
    assert found(index, sort="position") == list(range(6))
    with (tmp_path / LINES).open("a") as file:
        file.write(json.dumps({"step": 4, "groups": [entry(6)]})[:-5])
    assert len(found(index)) == 6  # the last line is incomplete
    with (tmp_path / LINES).open("a") as file:
        file.write(json.dumps({"step": 4, "groups": [entry(6)]})[-5:] + "\n")
    assert len(found(index)) == 7
    write(tmp_path, {"step": 1, "groups": [entry(0), entry(1)]}, {"step": 2, "groups": [entry(50)]})
    assert found(index, sort="position") == [0, 1, 50]
    (tmp_path / LINES).unlink()
    assert found(index) == []
    assert index.problems() == [
        "groups.jsonl is missing: which groups a step trained on is not known"
    ]


OLD = {
    "id": "group-7",
    "prompt_id": "p",
    "position": 3,
    "versions": [1, 2],
    "reward": 0.5,
    "correct": 2,
    "reused": False,
}


def test_damaged_lines_are_named_and_lines_of_another_version_partly_shown(tmp_path: Path) -> None:
    write(
        tmp_path,
        "{",
        "[1]",
        {"step": "one", "groups": [entry(2)]},
        {"step": 3},
        {"step": 6, "groups": [OLD | {"of a later version": 1}]},
    )
    index = GroupIndex(tmp_path)
    assert found(index, sort="step") == [7]
    assert [problem.partition(":")[0] for problem in index.problems()] == [
        "line 1 of groups.jsonl is damaged and left out",
        "line 2 of groups.jsonl is damaged and left out",
        "line 3 of groups.jsonl is damaged and left out",
    ]
    old = index.find("group-7")
    assert old is not None
    assert (old["reward"], old["correct"], old["completions"], old["prompt"], old["tokens"]) == (
        0.5,
        2,
        None,
        None,
        None,
    )
    assert old["versions"] == [1, 2]


@pytest.mark.parametrize("steps", [310, pytest.param(3125, marks=pytest.mark.slow)])
def test_a_hundred_thousand_groups_are_searched(steps: int, tmp_path: Path) -> None:
    """The short form has ten thousand. `python -m benchmarks.groups searching` measures the speed."""
    write_lines(tmp_path, 1, steps)
    groups = steps * 32
    index = GroupIndex(tmp_path)
    total, _, rows = index.search(Query(), limit=50, offset=groups - 50)
    assert (total, len(rows), rows[-1]["step"], rows[-1]["id"]) == (groups, 50, 1, "group-31")
    total, _, rows = index.search(
        Query(text="is 123 +", error="none", sort="-length"), limit=50, offset=0
    )
    assert total == sum(number % 7 != 0 for number in range(123, groups, 1000))
    assert {row["prompt"] for row in rows} == {"What is 123 + 1?"}
    longest = [max(row["tokens"]) for row in rows]
    assert longest == sorted(longest, reverse=True)
    write_lines(tmp_path, steps + 1, 1)
    assert index.search(Query(step_from=steps + 1), limit=50, offset=0)[0] == 32


def test_the_first_answer_waits_for_only_a_part_of_the_file(tmp_path: Path) -> None:
    write_lines(tmp_path, 1, 100)
    index = GroupIndex(tmp_path)
    totals = [index.search(Query(), limit=50, offset=0, patience_s=0.0)[0]]
    assert 0 < totals[0] < 3200
    while (left := index.left()) is not None:
        assert 0 < left["done"] <= left["of"]
        totals.append(index.search(Query(), limit=50, offset=0, patience_s=0.0)[0])
    assert totals == sorted(set(totals))
    assert totals[-1] == 3200
