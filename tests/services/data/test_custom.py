"""A user's own data sets: extra columns, tasks, chats, and a function applied to the rows."""

import csv
import datetime
import json
from collections.abc import Callable, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from common.errors import ConfigError
from common.settings.config import Config, load
from common.settings.sections import DataSection
from common.wire.schemas import Prompt
from services.data.loaders import CustomDatasetLoader, load_split

QUESTION: dict[str, Any] = {"role": "user", "content": "2 + 2?"}
MAPS = """
def swap(row):
    return None if row["a"] == "skip" else {"question": row["q"], "answer": row["a"]}

def one(row):
    return row["q"]

NUMBER = 1
"""


def one_row(folder: Path, row: Mapping[str, Any], **arguments: Any) -> Prompt:
    path = folder / "train.jsonl"
    path.write_text(json.dumps(row) + "\n", encoding="utf-8")
    (prompt,) = CustomDatasetLoader(folder, **arguments).load("train")
    return prompt


def refused(call: Callable[[], object]) -> str:
    with pytest.raises(ConfigError) as caught:
        call()
    assert caught.value.field
    assert caught.value.remedy
    return str(caught.value)


def test_columns_that_are_not_read_travel_along(tmp_path: Path) -> None:
    row = {
        "id": "x",
        "question": "q",
        "answer": "1",
        "test_cases": [{"in": 1, "out": None}],
        "difficulty": 0.5,
    }
    prompt = one_row(tmp_path, row)
    assert prompt.columns == {"test_cases": [{"in": 1, "out": None}], "difficulty": 0.5}
    assert prompt.model_dump() == {
        "id": "x",
        "prompt": "q",
        "ground_truth": "1",
        "columns": prompt.columns,
    }
    assert one_row(tmp_path, row, columns=["difficulty"]).columns == {"difficulty": 0.5}
    assert one_row(tmp_path, row, columns=[]).columns == {}
    assert "there is no column 'level'" in refused(
        lambda: one_row(tmp_path, row, columns=["level"])
    )


def test_tasks_of_the_data_set_and_of_each_row(tmp_path: Path) -> None:
    row = {"question": "q", "answer": "1", "kind": "code"}
    assert one_row(tmp_path, row, task="math").task == "math"
    prompt = one_row(tmp_path, row, task="math", task_field="kind")
    assert (prompt.task, prompt.columns) == ("code", {})
    assert "column 'kind' is None" in refused(
        lambda: one_row(tmp_path, row | {"kind": None}, task_field="kind")
    )


@pytest.mark.parametrize("kind", ["float16", "float32", "float64"])
def test_numbers_of_narrow_columns_are_as_they_were_written(tmp_path: Path, kind: str) -> None:
    numbers = pyarrow.array(np.array([0.1, 0.7, 2.5], kind))
    lists = pyarrow.array([[np.float32(0.1)]] * 3, pyarrow.list_(pyarrow.float32()))
    table = pyarrow.table({"question": ["a", "b", "c"], "answer": numbers, "parts": lists})
    pyarrow.parquet.write_table(table, tmp_path / "train.parquet")

    prompts = CustomDatasetLoader(tmp_path).load("train")

    assert [prompt.ground_truth for prompt in prompts] == ["0.1", "0.7", "2.5"]
    assert prompts[0].columns == {"parts": [0.1]}


def test_rows_with_tests_need_no_answer(tmp_path: Path) -> None:
    tests = [{"input": "1", "output": "1"}]

    prompt = one_row(tmp_path, {"question": "q", "test_cases": tests})

    assert (prompt.ground_truth, prompt.columns) == ("", {"test_cases": tests})


def test_values_of_parquet_become_json(tmp_path: Path) -> None:
    row = {
        "question": "q",
        "answer": 3,
        "day": datetime.date(2024, 2, 29),
        "price": Decimal("1.50"),
        "score": float("nan"),
        "tags": ["a", None],
    }
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "train.parquet")
    (prompt,) = CustomDatasetLoader(tmp_path).load("train")
    assert prompt.columns == {
        "day": "2024-02-29",
        "price": "1.50",
        "score": None,
        "tags": ["a", None],
    }
    assert Prompt.model_validate_json(prompt.model_dump_json()) == prompt
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist([{**row, "image": b"\x89PNG"}]), tmp_path / "train.parquet"
    )
    assert "column 'image' is of type bytes, which JSON cannot represent" in refused(
        lambda: CustomDatasetLoader(tmp_path).load("train")
    )
    assert CustomDatasetLoader(tmp_path, columns=["tags"]).load("train")[0].columns == {
        "tags": ["a", None]
    }


def test_splits_of_a_single_file(tmp_path: Path) -> None:
    path = tmp_path / "sums.csv"
    path.write_text(
        "question,answer,unit\n" + "".join(f"q{n},{n},m\n" for n in range(50)), encoding="utf-8"
    )
    loader = CustomDatasetLoader(path)
    train, test, everything = (loader.load(split) for split in ("train", "test", "all"))
    assert {prompt.prompt for prompt in train + test} == {prompt.prompt for prompt in everything}
    assert len(train) + len(test) == len(everything) == 50
    assert everything[7].columns == {"unit": "m"}
    assert loader.load("test") == load_split(
        DataSection(source=str(path), eval_split="held out"), "eval", 0
    )
    assert "no split 'dev'" in refused(lambda: loader.load("dev"))


@pytest.mark.parametrize(
    ("messages", "prompt", "answer"),
    [
        ([QUESTION, {"role": "assistant", "content": "2+2=4.\n#### 4"}], "2 + 2?", "4"),
        (
            [QUESTION, {"role": "assistant", "content": r"So \boxed{\frac{8}{2}}."}],
            "2 + 2?",
            r"\frac{8}{2}",
        ),
        ([QUESTION, {"role": "assistant", "content": " four "}], "2 + 2?", "four"),
        ([QUESTION, {"role": "assistant", "content": "Add 2. The answer is 4."}], "2 + 2?", "4"),
        (
            [QUESTION, {"role": "assistant", "content": r"<think>\boxed{5}</think> Final: 4"}],
            "2 + 2?",
            "4",
        ),
        (
            [QUESTION, {"role": "assistant", "content": "<think>#### 3</think>The answer is $4$."}],
            "2 + 2?",
            "4",
        ),
        (
            [QUESTION, {"role": "assistant", "content": r"$x=\boxed{2}$ or $x=\boxed{3}$."}],
            "2 + 2?",
            "2, 3",
        ),
        (
            [
                {"role": "system", "content": "Be brief."},
                QUESTION,
                {"role": "assistant", "content": "4"},
            ],
            "Be brief.\n\n2 + 2?",
            "4",
        ),
        (
            [
                {
                    "role": "user",
                    "content": [{"type": "text", "text": "2 +"}, {"type": "text", "text": "2?"}],
                },
                {"role": "assistant", "content": "4"},
            ],
            "2 +\n2?",
            "4",
        ),
    ],
)
def test_chats(tmp_path: Path, messages: list[dict[str, Any]], prompt: str, answer: str) -> None:
    read = one_row(tmp_path, {"chat": messages, "source": "s"}, messages_field="chat")
    assert (read.prompt, read.ground_truth, read.columns) == (prompt, answer, {"source": "s"})
    as_text = one_row(tmp_path, {"chat": json.dumps(messages)}, messages_field="chat")
    assert (as_text.prompt, as_text.ground_truth) == (prompt, answer)
    both = one_row(tmp_path, {"chat": messages, "answer": "#### 1,000"}, messages_field="chat")
    assert (both.prompt, both.ground_truth, both.columns) == (prompt, "1000", {})


@pytest.mark.parametrize(
    ("chat", "message"),
    [
        ([], "is not a list of messages"),
        ("hello", "is not a list of messages"),
        (7, "is not a list of messages"),
        (["hello"], "not an object with role and content"),
        ([{"content": "x"}], "not an object with role and content"),
        ([QUESTION], "no column 'answer'"),
        ([{"role": "system", "content": "x"}], "has the roles system;"),
        (
            [QUESTION, {"role": "assistant", "content": "4"}, QUESTION],
            "has the roles user, assistant, user;",
        ),
        ([QUESTION, {"role": "assistant", "content": None}], r"column 'chat (assistant)' is None"),
        ([{"role": "user", "content": " "}], "column 'chat (user)' is empty"),
        ([{"role": "user", "content": [{"type": "image", "url": "u"}]}], "not a text"),
    ],
)
def test_chat_without_exactly_one_problem_is_refused(
    tmp_path: Path, chat: object, message: str
) -> None:
    text = refused(lambda: one_row(tmp_path, {"chat": chat}, messages_field="chat"))
    assert message in text
    assert "train.jsonl, line 1" in text


@pytest.mark.parametrize(
    "text",
    [
        str([{"role": "user", "content": "2+3?"}]),
        json.dumps([{"role": "user", "content": None}, {"content": "2+3?", "role": "user"}]),
    ],
)
def test_a_chat_written_as_text_is_no_problem(tmp_path: Path, text: str) -> None:
    """A CSV file has no lists: the model would be asked brackets and quotes."""
    path = tmp_path / "rows.csv"
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["prompt", "answer"])
        rows.writerow(["Is [{'role': 1}] a list?", "yes"])
        rows.writerow([text, "5"])
    said = refused(lambda: CustomDatasetLoader(path, prompt_field="prompt").load("train"))
    assert "line 3: column 'prompt' is a list of messages written as a text" in said
    assert "data.messages_field" in said


def test_a_function_changes_rows_and_leaves_some_out(tmp_path: Path) -> None:
    def swapped(row: dict[str, Any]) -> dict[str, Any] | None:
        return {"question": row.pop("q"), "answer": row["a"]} if row["a"] else None

    path = tmp_path / "train.jsonl"
    path.write_text('{"q": "p0", "a": ""}\n{"q": "p1", "a": "1"}\n', encoding="utf-8")
    (prompt,) = CustomDatasetLoader(tmp_path, map=swapped).load("train")
    assert (prompt.id, prompt.prompt, prompt.ground_truth) == (
        f"{tmp_path.name}-train-1",
        "p1",
        "1",
    )

    def broken(row: dict[str, Any]) -> Any:
        return row["absent"]

    text = refused(lambda: CustomDatasetLoader(tmp_path, map=broken).load("train"))
    assert "line 1: the function failed (KeyError: 'absent')" in text
    assert "broken" in text


def test_the_operator_names_the_function_by_its_import_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "maps_of_mine.py").write_text(MAPS, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "train.jsonl").write_text(
        '{"q": "p0", "a": "skip"}\n{"q": "p1", "a": "1"}\n', encoding="utf-8"
    )

    def prompts(name: str) -> list[Prompt]:
        return load_split(DataSection(source=str(tmp_path), map=name), "train", 0)

    assert [prompt.prompt for prompt in prompts("maps_of_mine:swap")] == ["p1"]
    assert "the function returned 'p0'" in refused(lambda: prompts("maps_of_mine:one"))
    assert "has no attribute 'absent'" in refused(lambda: prompts("maps_of_mine:absent"))
    assert "it is of type int" in refused(lambda: prompts("maps_of_mine:NUMBER"))
    assert "cannot be imported" in refused(lambda: prompts("no_such_module:f"))


@pytest.mark.parametrize(
    ("arguments", "setting"),
    [
        (["--data.levels", "5"], "data.levels"),
        (["--data.source", "tiny", "--data.map", "a:b"], "data.map"),
        (["--data.source", "math", "--data.prompt_field", "text"], "data.prompt_field"),
        (
            [
                "--data.source",
                "rows.csv",
                "--data.messages_field",
                "chat",
                "--data.prompt_field",
                "text",
            ],
            "data.prompt_field",
        ),
        (["--data.source", "rows.csv", "--data.subjects", "Algebra"], "data.subjects"),
        (["--data.hub_config", "socratic"], "data.hub_config"),
    ],
)
def test_unused_settings_are_refused(arguments: list[str], setting: str) -> None:
    assert f"{setting} is set but not read" in refused(lambda: load(arguments, {}))


def test_settings_of_the_data_by_command_line_and_environment() -> None:
    def levels(config: Config) -> list[str]:
        return [str(level) for level in config.data.levels]

    assert levels(load(["--data.source", "math", "--data.levels", "3,Level 4"], {})) == [
        "3",
        "Level 4",
    ]
    assert levels(load(["--data.source", "math"], {"RLHF_DATA__LEVELS": "[3, 4]"})) == ["3", "4"]
    config = load(
        ["--data.source", "rows.csv", "--data.columns", "level,tests", "--data.map", "my.maps:f"],
        {},
    )
    assert (config.data.columns, config.data.map) == (["level", "tests"], "my.maps:f")
    assert "data.map" in refused(lambda: load(["--data.map", "not a path"], {}))
