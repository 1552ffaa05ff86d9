"""Every source loads completely, or the start fails with the file, the row, the column and the
remedy."""

import csv
import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from common.errors import ConfigError
from common.settings.sections import DataSection
from services.data.files import read_file
from services.data.loaders import Split, load_split
from services.data.rows import MAX_TEXT_CHARS, final_answer
from tests.support.errors import raises
from tests.support.paths import SHARED_DATA

GSM8K = SHARED_DATA / "gsm8k"
ROWS: list[dict[str, Any]] = [
    {"question": f"What is {n} + {n}?", "answer": f"Add.\n#### {2 * n}"} for n in range(40)
]


def section(source: Path | str, **settings: Any) -> DataSection:
    return DataSection(source=str(source), **settings)


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows), encoding="utf-8")
    elif path.suffix == ".csv":
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def refused(source: Path | str, split: Split = "train", **settings: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load_split(section(source, **settings), split, 0)
    assert caught.value.field
    assert caught.value.field.startswith("data.")
    assert caught.value.remedy
    return str(caught.value)


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".parquet"])
def test_every_format_loads_the_same_problems(tmp_path: Path, suffix: str) -> None:
    folder = tmp_path / "sums"
    folder.mkdir()
    write(folder / f"train{suffix}", ROWS[:30])
    write(folder / f"test{suffix}", ROWS[30:])
    train = load_split(section(folder), "train", 0)
    evaluation = load_split(section(folder), "eval", 0)
    assert [prompt.prompt for prompt in train + evaluation] == [row["question"] for row in ROWS]
    assert [prompt.ground_truth for prompt in train + evaluation] == [str(2 * n) for n in range(40)]
    assert train[3].id == "sums-train-3"
    assert evaluation[0].id == "sums-test-0"


def test_a_single_file_holds_out_a_tenth_that_no_row_crosses(tmp_path: Path) -> None:
    rows = [{"question": f"Problem {n}", "answer": n} for n in range(1000)]
    path = write(tmp_path / "many.jsonl", [*rows, *rows])
    train, evaluation = load_split(section(path), "train", 0), load_split(section(path), "eval", 0)
    assert len(train) + len(evaluation) == 2000
    assert 140 <= len(evaluation) <= 260
    assert not {prompt.prompt for prompt in train} & {prompt.prompt for prompt in evaluation}
    assert not {prompt.id for prompt in train} & {prompt.id for prompt in evaluation}
    grown = write(tmp_path / "grown.jsonl", [*rows, *rows, {"question": "one more", "answer": 1}])
    before = {prompt.prompt for prompt in evaluation}
    assert {prompt.prompt for prompt in load_split(section(grown), "eval", 0)} - {
        "one more"
    } == before


def test_a_short_file_still_has_a_held_out_problem(tmp_path: Path) -> None:
    path = write(tmp_path / "two.jsonl", ROWS[:2])
    assert len(load_split(section(path), "train", 0)) == 1
    assert len(load_split(section(path), "eval", 0)) == 1
    assert "at least two" in refused(write(tmp_path / "one.jsonl", ROWS[:1]))


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("so\n#### 1,080", "1080"),
        ("#### 1\n#### -2 ", "-2"),
        ("#### 1 000", "1000"),
        (" \\frac{1}{2} ", "\\frac{1}{2}"),
        ("1,080", "1,080"),
        ("nothing ####", ""),
    ],
)
def test_final_answer(text: str, answer: str) -> None:
    assert final_answer(text) == answer


def test_numbers_own_ids_and_other_columns(tmp_path: Path) -> None:
    rows = [
        {"id": 7, "problem": "a", "solution": 72.0},
        {"id": "x/y.json", "problem": "b", "solution": -1.5},
    ]
    path = write(tmp_path / "train.jsonl", rows)
    (tmp_path / "test.jsonl").write_text('{"problem": "c", "solution": 3}\n', encoding="utf-8")
    prompts = load_split(
        section(path.parent, prompt_field="problem", answer_field="solution"), "train", 0
    )
    assert [(prompt.id, prompt.ground_truth) for prompt in prompts] == [
        ("7", "72"),
        ("x/y.json", "-1.5"),
    ]


def test_an_answer_may_be_a_list_of_one_and_keeps_a_lost_backslash(tmp_path: Path) -> None:
    answers = [["5"], [[7]], "\x0crac{1}{2} ", " 8\n"]
    rows = [{"question": f"{i}?", "answer": answer} for i, answer in enumerate(answers)]
    write(tmp_path / "train.jsonl", rows)
    prompts = load_split(section(tmp_path), "train", 0)
    # The check of ground truths must see the form feed.
    assert [prompt.ground_truth for prompt in prompts] == ["5", "7", "\x0crac{1}{2}", "8"]


def test_num_samples_is_seeded_and_keeps_the_order(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", ROWS)
    some = load_split(section(tmp_path, num_samples=10), "train", 3)
    assert some == load_split(section(tmp_path, num_samples=10), "train", 3)
    assert some != load_split(section(tmp_path, num_samples=10), "train", 4)
    everything = load_split(section(tmp_path), "train", 3)
    assert some == [prompt for prompt in everything if prompt in some]
    assert len(some) == 10
    assert "only 40 problems" in refused(tmp_path, num_samples=41)


BAD_LINES = [
    ('{"question": "q"}', "line 2: there is no column 'answer'; there are question"),
    ('{"problem": "q", "answer": "1"}', "no column 'question'; there are problem, answer"),
    ('{"question": "", "answer": "1"}', "line 2: column 'question' is empty"),
    ('{"question": "  ", "answer": "1"}', "column 'question' is empty"),
    ('{"question": "q", "answer": ""}', "column 'answer' is empty"),
    ('{"question": "q", "answer": "#### "}', "the answer in column 'answer' is empty"),
    ('{"question": "q", "answer": null}', "column 'answer' is None, not a text or a number"),
    ('{"question": ["q"], "answer": "1"}', "column 'question' is ['q'], not a text"),
    ('{"question": "q", "answer": ["1", "2"]}', "column 'answer' is ['1', '2'], not a text"),
    ('{"question": "q", "answer": []}', "column 'answer' is [], not a text"),
    ('{"question": "q", "answer": true}', "column 'answer' is True"),
    ('{"question": "q", "answer": NaN}', "NaN is not JSON"),
    ('{"question": "q", "answer": 1e999}', "column 'answer' is inf"),
    ('{"question": "\\ud800", "answer": "1"}', "column 'question' is not text"),
    ('{"id": "", "question": "q", "answer": "1"}', "column 'id' is empty"),
    ('{"question": "q", ', "train.jsonl, line 2"),
    ("[1, 2]", "line 2 is not an object"),
    ("[" * 100_000, "train.jsonl, line 2"),
    ('{"question": "q", "answer": ' + "9" * 5000 + "}", "train.jsonl, line 2"),
]


@pytest.mark.parametrize(("line", "message"), BAD_LINES)
def test_a_bad_row_stops_the_start_and_is_named(tmp_path: Path, line: str, message: str) -> None:
    (tmp_path / "train.jsonl").write_text(
        '{"question": "q", "answer": "1"}\n' + line + "\n", encoding="utf-8"
    )
    text = refused(tmp_path)
    assert message in text
    assert "train.jsonl" in text


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".parquet"])
def test_bytes_that_are_not_of_the_format_are_refused(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"train{suffix}"
    path.write_bytes(b'question,answer\n"\xff\xfe,{')
    assert path.name in refused(tmp_path)
    path.write_bytes(b"")
    refused(tmp_path)


def test_a_file_of_another_encoding_is_told_what_to_do(tmp_path: Path) -> None:
    row = '{"question": "caf\u00e9?", "answer": "1"}\n'
    (tmp_path / "train.jsonl").write_bytes(b"\n" + row.encode("latin-1"))
    (tmp_path / "test.json").write_bytes(row.encode("utf-16"))
    told = refused(tmp_path)
    assert "train.jsonl, line 2 is not in UTF-8: byte 17 is 0xe9" in told
    assert "save the file in UTF-8" in told
    assert "test.json is not in UTF-8: byte 0 is 0xff" in refused(tmp_path, "eval")


def test_a_cell_may_be_as_long_as_any_text(tmp_path: Path) -> None:
    rows = [{"question": "x" * length, "answer": "1"} for length in (200_000, MAX_TEXT_CHARS + 1)]
    write(tmp_path / "train.csv", rows[:1])
    assert len(load_split(section(tmp_path), "train", 0)[0].prompt) == 200_000
    write(tmp_path / "train.csv", rows)
    assert "line 3" in refused(tmp_path)


def test_a_table_with_a_wrong_shape_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "train.csv"
    path.write_text("question,answer\nq,1,2\n", encoding="utf-8")
    assert "line 2 has more cells" in refused(tmp_path)
    path.write_text("question,answer\nq\n", encoding="utf-8")
    assert "column 'answer' is None" in refused(tmp_path)
    path.write_text("question,question,answer\na,b,1\n", encoding="utf-8")
    assert "two columns have the same name" in refused(tmp_path)
    path.unlink()
    (tmp_path / "train.json").write_text('{"question": "q", "answer": "1"}', encoding="utf-8")
    assert "not a list of rows" in refused(tmp_path)


def test_duplicate_ids_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", [{"id": "a", **ROWS[0]}, {"id": "a", **ROWS[1]}])
    assert "two problems have the id 'a'" in refused(tmp_path)


def test_wrong_sources_and_splits_are_named(tmp_path: Path) -> None:
    assert "no such file or directory" in refused(tmp_path / "absent.jsonl")
    assert "gsm8k, math, tiny, the path" in refused("gsm8")
    assert "it has nothing" in refused(tmp_path)
    write(tmp_path / "train.jsonl", ROWS)
    assert "no file for the split 'test'; it has train.jsonl" in refused(tmp_path, "eval")
    write(tmp_path / "train.csv", ROWS)
    assert "more than one file for the split 'train'" in refused(tmp_path)
    (tmp_path / "data.txt").write_text("x", encoding="utf-8")
    assert "not of a known format" in refused(tmp_path / "data.txt")
    assert "no split 'validation'" in refused("tiny", "eval", eval_split="validation")
    assert "the same problems" in refused("tiny", eval_split="train")


def test_tiny_is_fixed_and_its_splits_are_apart() -> None:
    train, evaluation = (
        load_split(section("tiny"), "train", 0),
        load_split(section("tiny"), "eval", 0),
    )
    assert (len(train), len(evaluation)) == (8192, 1024)
    assert train == load_split(section("tiny"), "train", 1)
    assert (train[0].id, evaluation[0].id) == ("tiny-train-0", "tiny-test-0")
    assert not {prompt.prompt for prompt in train} & {prompt.prompt for prompt in evaluation}


@pytest.mark.skipif(not GSM8K.is_dir(), reason="the GSM8K files are not here")
def test_every_gsm8k_answer_is_read() -> None:
    prompts = load_split(section(GSM8K), "train", 0) + load_split(section(GSM8K), "eval", 0)
    assert len(prompts) == 8792
    assert len({prompt.id for prompt in prompts}) == 8792
    assert prompts[0].id == "gsm8k-train-0"
    assert all(prompt.ground_truth.removeprefix("-").isdecimal() for prompt in prompts)
    assert sum(prompt.ground_truth.startswith("-") for prompt in prompts) == 5
    lines = [
        line
        for name in ("train", "test")
        for line in (GSM8K / f"{name}.jsonl").read_text("utf-8").splitlines()
    ]
    written = [json.loads(line)["answer"].split("#### ")[1].strip() for line in lines]
    assert sum("," in answer for answer in written) == 93
    assert [answer.replace(",", "") for answer in written] == [
        prompt.ground_truth for prompt in prompts
    ]


def test_a_template_that_a_row_cannot_fill_ends_the_start_with_the_row(tmp_path: Path) -> None:
    rows = [{"id": f"r{i}", "question": f"{i}?", "answer": str(i), "level": i} for i in range(40)]
    del rows[7]["level"]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    template = "Level {level}. {question}"
    config = DataSection(source=str(tmp_path / "rows.jsonl"), prompt_template=template)
    with raises(ConfigError, field="data.prompt_template"):
        load_split(config, "train", 0) + load_split(config, "eval", 0)
    with raises(ConfigError, field="data.prompt_template"):
        load_split(DataSection(source="tiny", prompt_template=template), "train", 0)
    assert load_split(DataSection(source="tiny", prompt_template="plain"), "train", 0)


def test_the_remedy_for_a_file_that_is_not_there_is_its_name(tmp_path: Path) -> None:
    with raises(ConfigError, field="data.source", value=str(tmp_path / "none.jsonl")) as absent:
        list(read_file(tmp_path / "none.jsonl"))
    (tmp_path / "cut.jsonl").write_text("{\n")
    with raises(ConfigError, field="data.source", value=str(tmp_path / "cut.jsonl")) as damaged:
        list(read_file(tmp_path / "cut.jsonl"))
    assert "name" in str(absent.value.remedy)
    assert "repair" in str(damaged.value.remedy)
