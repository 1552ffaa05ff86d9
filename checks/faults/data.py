"""Faults of data sets and of the stream of prompts."""

import json
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from checks.faults.fault import fault
from checks.faults.lab import Lab, replaced
from common.clients.data import DataClient
from common.wire.schemas import PromptBatch
from services.http.sqlite_store import sum_of

Row = dict[str, Any]


def _rows(lab: Lab, count: int = 48) -> list[Row]:
    return [
        {"question": row["prompt"][0]["content"], "answer": row["ground_truth"]}
        for row in lab.rows(count)
    ]


def _files(lab: Lab, train: Sequence[Row], test: Sequence[Row] = ()) -> Path:
    """Writes a data set of two files, and returns its directory."""
    folder = lab.directory / "data"
    folder.mkdir(exist_ok=True)
    for name, rows in (("train", train), ("test", test or _rows(lab, 8))):
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(text)
    return folder


def _train(lab: Lab, folder: Path, **settings: Any) -> None:
    lab.strike()
    lab.train(lab.settings(data__source=folder, **settings))


@fault(
    "the rows have no column of answers",
    r"answer",
    r"column",
    reported="https://github.com/verl-project/verl/issues/2443",
)
def data_without_answers(lab: Lab) -> None:
    rows = [{"question": row["question"], "solution": row["answer"]} for row in _rows(lab)]
    _train(lab, _files(lab, rows))


@fault(
    "the column of answers is another one: the numbers of pages",
    r"ground truths?|answers?",
    r"column|answer_field",
    in_steps=True,
)
def data_wrong_column(lab: Lab) -> None:
    train, test = (
        [row | {"page": lab.rng.randrange(1000, 9999)} for row in rows]
        for rows in (_rows(lab), _rows(lab, 8))
    )
    folder = _files(lab, train, test)
    _train(lab, folder, data__answer_field="page", trainer__max_steps=14)


@fault(
    "the ground truths of some rows cannot be graded",
    r"ground truths?",
    r"cannot be graded|cannot be read|unreadable",
)
def data_some_ungradable(lab: Lab) -> None:
    rows = _rows(lab, 64)
    for index in lab.rng.sample(range(len(rows)), 3):
        rows[index]["answer"] = "it depends on what you mean"
    _train(lab, _files(lab, rows))


@fault("a line of the data file is cut", r"line \d+", r"JSON")
def data_cut_line(lab: Lab) -> None:
    folder = _files(lab, _rows(lab))
    path = folder / "train.jsonl"
    lines = path.read_text().splitlines()
    index = lab.rng.randrange(1, len(lines))
    lines[index] = lines[index][:20]
    path.write_text("\n".join(lines) + "\n")
    _train(lab, folder)


@fault("a row has no answer (null)", r"(line|row) \d+", r"answer", r"none|null|empty")
def data_null_answer(lab: Lab) -> None:
    rows = _rows(lab)
    rows[lab.rng.randrange(len(rows))]["answer"] = None
    _train(lab, _files(lab, rows))


@fault("the data file is not UTF-8", r"train\.jsonl", r"utf-?8|decode|encoding")
def data_encoding(lab: Lab) -> None:
    folder = _files(lab, _rows(lab))
    path = folder / "train.jsonl"
    path.write_bytes(path.read_bytes() + b'{"question": "caf\xe9?", "answer": "1"}\n')
    _train(lab, folder)


@fault(
    "the data file is empty",
    r"train\.jsonl|data\.source|data set",
    r"no rows?|empty|no problems?|0 (rows|problems)",
)
def data_empty(lab: Lab) -> None:
    folder = _files(lab, _rows(lab))
    (folder / "train.jsonl").write_text("")
    _train(lab, folder)


@fault("there are fewer problems than a batch needs", r"too few|fewer", r"batch")
def data_too_few(lab: Lab) -> None:
    folder = _files(lab, _rows(lab, 3))
    lab.strike()
    config = lab.settings(data__source=folder)
    config.trainer.max_steps = None
    config.trainer.num_epochs = 1
    lab.train(config)


@fault(
    "a prompt is longer than the context",
    r"prompt",
    r"context|max_context_tokens|too long|longer",
    r"\d{3}",
    reported="https://github.com/verl-project/verl/issues/502",
)
def data_long_prompt(lab: Lab) -> None:
    rows = _rows(lab)
    rows[lab.rng.randrange(len(rows))]["question"] = "How many apples now? " * 120
    _train(lab, _files(lab, rows), trainer__max_steps=12)


@fault(
    "most rows are the same problem",
    r"same|duplicate|repeat|twice|identical",
    r"problems?|prompts?|rows?|questions?",
)
def data_duplicates(lab: Lab) -> None:
    rows = _rows(lab, 4) * 12
    _train(lab, _files(lab, rows))


@fault(
    "problems of the evaluation are in the training data",
    r"trained on",
    r"\d+",
)
def data_leak(lab: Lab) -> None:
    rows = _rows(lab, 24)
    folder = _files(lab, rows, test=rows[:12])
    _train(lab, folder, evaluation__samples=12, evaluation__pass_samples=0)


@fault(
    "the prompt template lacks the problem",
    r"prompt_template",
    r"question",
)
def data_template_without_problem(lab: Lab) -> None:
    _train(lab, _files(lab, _rows(lab)), data__prompt_template="Think. Then answer: ")


@fault(
    "the prompt template names a column that the rows lack",
    r"level",
    r"prompt_template|column",
)
def data_template_column(lab: Lab) -> None:
    folder = _files(lab, _rows(lab))
    _train(lab, folder, data__prompt_template="Level {level}: {question}")


@fault(
    "the data set is not there", r"no-such-data", r"no such|not found|no file|hub|cannot|not exist"
)
def data_missing(lab: Lab) -> None:
    _train(lab, lab.directory / "no-such-data.jsonl")


@fault("training and evaluation use the same split", r"split", r"same")
def data_same_split(lab: Lab) -> None:
    _train(lab, _files(lab, _rows(lab)), data__eval_split="train")


# ------------------------------------------------------------ the stream, and resumed runs


@fault(
    "the data set was replaced before the run was resumed",
    r"data",
    r"changed|differ|another|belongs",
    reported="https://github.com/NVIDIA-NeMo/RL/pull/2519",
)
def data_changed_on_resume(lab: Lab) -> None:
    folder = _files(lab, _rows(lab))
    lab.train(lab.settings(data__source=folder, trainer__max_steps=2))
    rows = _rows(lab, 60)
    _files(lab, rows[12:])
    _train(lab, folder, trainer__max_steps=4)


@fault(
    "the rows of the data set were shuffled before the run was resumed",
    r"data",
    r"changed|differ|another|belongs|order",
    reported="https://github.com/verl-project/verl/issues/3457",
)
def data_shuffled_on_resume(lab: Lab) -> None:
    rows = _rows(lab)
    folder = _files(lab, rows)
    lab.train(lab.settings(data__source=folder, trainer__max_steps=2))
    lab.rng.shuffle(rows)
    _files(lab, rows)
    _train(lab, folder, trainer__max_steps=4)


@fault(
    "the stream of prompts starts again from the beginning",
    r"data-server|stream|cursor|position",
    r"set(ting)? .*back|lost|restored?|instead of|from position 0",
    reported="https://github.com/verl-project/verl/issues/3457",
)
def data_stream_restarts(lab: Lab) -> None:
    config = lab.settings()

    def change(number: int, body: Any, answers: Any) -> Any:
        if number == lab.first_call:
            lab.strike()
            path = config.state_dir / "data" / "stream.db"
            with closing(sqlite3.connect(path, timeout=30)) as db, db:
                cursor = ("shuffled", 0, 0)
                db.execute("REPLACE INTO cursors VALUES (?, ?, ?, ?)", (*cursor, sum_of(cursor)))
                db.execute("DELETE FROM answers")
        return answers

    lab.train(config, change)


@fault(
    "the cursor of the stream is lost between two attempts of a run",
    harmless=True,
    reported="https://github.com/verl-project/verl/issues/3457",
)
def data_cursor_lost_on_resume(lab: Lab) -> None:
    lab.train(lab.settings(trainer__max_steps=2))
    for path in (lab.state_dir / "data").iterdir():
        path.unlink()
    lab.strike()
    lab.train(lab.settings(trainer__max_steps=4))


@fault(
    "another client draws from the same stream",
    r"another client",
    r"draws|prompt",
)
def data_second_client(lab: Lab) -> None:
    drawn = 0
    prompts = DataClient.prompts

    async def shared(client: DataClient, count: int, request_id: str) -> PromptBatch:
        nonlocal drawn
        drawn += count
        if drawn > lab.first_call:
            lab.strike()
            await prompts(client, 1, f"{request_id}-of-another")
        return await prompts(client, count, request_id)

    with replaced("common.clients.data.DataClient.prompts", shared):
        lab.train()
