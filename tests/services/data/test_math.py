"""GSM8K and MATH: every answer of the real files, filters by level and subject, nested braces."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from common.errors import ConfigError
from common.prompts.stated_answers import last_box
from common.settings.sections import DataSection
from services.data.loaders import GSM8KLoader, MATHLoader, load_split
from services.data.loaders_math import level_number
from tests.support.errors import raises
from tests.support.paths import SHARED_DATA

needs_gsm8k = pytest.mark.skipif(
    not (SHARED_DATA / "gsm8k").is_dir(), reason="the GSM8K files are not here"
)
needs_math = pytest.mark.skipif(
    not (SHARED_DATA / "math500").is_dir(), reason="the MATH-500 file is not here"
)
PROBLEMS: list[dict[str, Any]] = [
    {"problem": "a", "level": "Level 1", "type": "Algebra", "solution": r"It is $\boxed{1}$."},
    {
        "problem": "b",
        "level": "Level 3",
        "type": "Counting & Probability",
        "solution": r"$\boxed{\frac{1}{2}}$",
    },
    {
        "problem": "c",
        "level": "Level 4",
        "type": "Geometry",
        "solution": r"$\boxed{3}$, no: $\boxed{\sqrt{\frac{a}{b}}}$",
    },
    {
        "problem": "d",
        "level": "Level 5",
        "type": "Algebra",
        "solution": r"$\boxed{\left\{ 1, 2 \right\}}$ {and} more",
    },
    {"problem": "e", "level": "Level ?", "type": "Geometry", "solution": r"$\fbox{5}$"},
]


def write(folder: Path, rows: list[dict[str, Any]], split: str = "train") -> Path:
    (folder / f"{split}.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8"
    )
    return folder


def problems(loader: MATHLoader) -> str:
    return "".join(prompt.prompt for prompt in loader.load("train"))


@needs_gsm8k
def test_all_gsm8k_answers_are_the_right_numbers() -> None:
    """Compares with the plainest reading: the integer after `####`, without commas."""
    loader, found, commas, negative = GSM8KLoader(source=SHARED_DATA / "gsm8k"), 0, [], []
    for split in ("train", "test"):
        lines = (SHARED_DATA / "gsm8k" / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
        written = [
            re.findall(r"#### *([-0-9,.]+)", json.loads(line)["answer"])[-1] for line in lines
        ]
        loaded = loader.load(split)
        assert [int(prompt.ground_truth) for prompt in loaded] == [
            int(text.replace(",", "")) for text in written
        ]
        assert [prompt.ground_truth for prompt in loaded] == [
            str(int(text.replace(",", ""))) for text in written
        ]
        assert [prompt.prompt for prompt in loaded] == [
            json.loads(line)["question"] for line in lines
        ]
        assert loaded[1].id == f"gsm8k-{split}-1"
        found += len(loaded)
        commas.append(sum("," in text for text in written))
        negative.append(sum(text.startswith("-") for text in written))
    assert (found, commas, negative) == (8792, [79, 14], [3, 2])


@needs_gsm8k
def test_num_samples_takes_the_first_or_a_seeded_choice() -> None:
    loader = GSM8KLoader(source=SHARED_DATA / "gsm8k")
    everything = loader.load("train")
    assert loader.load("train", num_samples=100) == everything[:100]
    assert len(loader.load("test", num_samples=50)) == 50
    mixed = loader.load("train", num_samples=100, seed=3, shuffle=True)
    assert mixed == loader.load("train", seed=3, shuffle=True)[:100]
    assert mixed != loader.load("train", num_samples=100, seed=4, shuffle=True)
    assert {prompt.id for prompt in loader.load("train", seed=3, shuffle=True)} == {
        prompt.id for prompt in everything
    }
    for count in (0, 7474):
        with raises(ConfigError, field="data.num_samples", value=str(count)):
            loader.load("train", num_samples=count)


def test_a_gsm8k_answer_that_is_no_number_stops_the_loading(tmp_path: Path) -> None:
    write(
        tmp_path,
        [{"question": "q", "answer": "#### 1,080"}, {"question": "r", "answer": "#### many"}],
    )
    with raises(ConfigError, field="data.source", value="train.jsonl, line 2"):
        GSM8KLoader(source=tmp_path).load("train")


@needs_math
def test_all_500_solutions_of_math_give_their_answers() -> None:
    """The answers come from the solutions alone. A regular expression up to the next brace is wrong
    for 103 of them."""
    rows = [
        json.loads(line)
        for line in (SHARED_DATA / "math500" / "test.jsonl")
        .read_text(encoding="utf-8")
        .splitlines()
    ]
    wrong = 0
    for row in rows:
        assert last_box(row["solution"]) == row["answer"]
        short = re.search(r"\\boxed\{(.*?)\}", row["solution"], re.DOTALL)
        wrong += short is None or short.group(1) != row["answer"]
    assert (len(rows), wrong) == (500, 103)


@needs_math
def test_the_loader_takes_math_answers_out_of_solutions(tmp_path: Path) -> None:
    rows = [
        json.loads(line)
        for line in (SHARED_DATA / "math500" / "test.jsonl")
        .read_text(encoding="utf-8")
        .splitlines()
    ]
    write(
        tmp_path,
        [{name: value for name, value in row.items() if name != "answer"} for row in rows],
        "test",
    )
    loaded = MATHLoader(source=tmp_path).load("test")
    assert [prompt.ground_truth for prompt in loaded] == [row["answer"] for row in rows]
    assert loaded == MATHLoader(source=SHARED_DATA / "math500").load("test")
    assert loaded[0].columns == {"level": 2}
    hard = MATHLoader(source=SHARED_DATA / "math500", levels=["Level 5"]).load("test")
    assert len(hard) == 134
    assert hard[0].id == next(prompt.id for prompt in loaded if prompt.columns["level"] == 5)


@pytest.mark.parametrize(
    ("value", "level"), [(5, 5), (5.0, 5), ("5", 5), ("Level 5", 5), ("level 3", 3), (" 2 ", 2)]
)
def test_levels_in_every_spelling(value: object, level: int) -> None:
    assert level_number(value) == level


@pytest.mark.parametrize(
    "value", [True, None, "Level ?", "Level", "", "5th", 2.5, "Level 5 of 5", [5]]
)
def test_invalid_level_is_refused(value: object) -> None:
    assert level_number(value) is None


def test_filters_by_level(tmp_path: Path) -> None:
    write(tmp_path, PROBLEMS)
    assert problems(MATHLoader(source=tmp_path)) == "abcde"
    assert problems(MATHLoader(levels=[3, "4", "Level 5"], source=tmp_path)) == "bcd"
    with raises(ConfigError, field="data.levels", value="hard"):
        MATHLoader(levels=["hard"], source=tmp_path)
    with raises(ConfigError, field="data.source", value=str(tmp_path)):
        MATHLoader(levels=[2], source=tmp_path).load("train")


def test_filters_by_subject(tmp_path: Path) -> None:
    write(tmp_path, PROBLEMS)
    assert problems(MATHLoader(subjects=["algebra"], source=tmp_path)) == "ad"
    assert (
        problems(MATHLoader(subjects=["counting_and_probability", "Geometry"], source=tmp_path))
        == "bce"
    )
    assert problems(MATHLoader(subjects=["Algebra"], levels=[5], source=tmp_path)) == "d"
    with raises(ConfigError, field="data.subjects", value="Topology") as caught:
        MATHLoader(subjects=["Topology"], source=tmp_path).load("train")
    assert "algebra, counting and probability, geometry" in caught.value.message


def test_ground_truths_columns_and_ids(tmp_path: Path) -> None:
    loaded = MATHLoader(source=write(tmp_path, PROBLEMS)).load("train")
    answers = ["1", r"\frac{1}{2}", r"\sqrt{\frac{a}{b}}", r"\left\{ 1, 2 \right\}", "5"]
    assert [prompt.ground_truth for prompt in loaded] == answers
    assert loaded[1].columns == {"level": 3, "subject": "Counting & Probability"}
    assert loaded[4].columns == {"level": "Level ?", "subject": "Geometry"}
    some = MATHLoader(levels=[5], source=tmp_path, task="math").load("train")
    assert [(prompt.id, prompt.task) for prompt in some] == [("math-train-3", "math")]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"level": "Level 1", "solution": "no box"}, "the solution has no .boxed answer"),
        ({"level": "Level 1", "solution": r"$\boxed{1$"}, "the solution has no .boxed answer"),
        ({"level": "Level 1"}, "there is no column 'solution'"),
        ({"level": "hard", "solution": r"\boxed{1}"}, "the level is 'hard'"),
        ({"solution": r"\boxed{1}"}, "there is no column 'level'"),
    ],
)
def test_a_bad_row_of_math_is_named(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    write(tmp_path, [{"problem": "p", **row}])
    with pytest.raises(ConfigError, match=rf"train.jsonl, line 1: {message}"):
        MATHLoader(levels=[1], source=tmp_path).load("train")


def test_a_box_without_braces_is_read(tmp_path: Path) -> None:
    write(tmp_path, [{"problem": "p", "level": "Level 1", "solution": r"Thus $x = \boxed 12$."}])
    assert MATHLoader(source=tmp_path).load("train")[0].ground_truth == "12"


def test_the_server_reads_math_by_its_settings(tmp_path: Path) -> None:
    write(write(tmp_path, PROBLEMS), [PROBLEMS[0] | {"problem": "f"}], "test")
    section = DataSection(source=f"math:{tmp_path}", levels=["Level 5", 3, 1], subjects=["Algebra"])
    assert [prompt.prompt for prompt in load_split(section, "train", 0)] == ["a", "d"]
    assert [prompt.prompt for prompt in load_split(section, "eval", 0)] == ["f"]
