"""What a data set may be: prompts, rows, Hugging Face data sets."""

import datetime
import itertools
from typing import Any

import datasets
import numpy as np
import pandas
import pytest

from common.errors import ConfigError
from common.wire.schemas import Prompt
from tests.support.errors import raises
from trainer.api.datasets import as_held_out, as_prompts


def test_rows_become_prompts() -> None:
    rows = [
        {
            "question": "1+1?",
            "answer": "1+1=2\n#### 2",
            "level": 3,
            "tags": ("a", "b"),
            "vector": np.array([1.0, 2.0]),
        },
        {
            "prompt": "2+2?",
            "ground_truth": 4.0,
            "id": "mine",
            "task": "sums",
            "day": datetime.date(2024, 1, 2),
        },
        {"prompt": [{"role": "user", "content": "3+3?"}]},
    ]
    assert as_prompts(rows, "train") == [
        Prompt(
            id="train-0",
            prompt="1+1?",
            ground_truth="2",
            columns={
                **{"question": "1+1?", "answer": "1+1=2\n#### 2", "level": 3, "tags": ["a", "b"]},
                "vector": [1.0, 2.0],
            },
        ),
        Prompt(
            id="mine",
            prompt="2+2?",
            ground_truth="4",
            task="sums",
            columns={"id": "mine", "task": "sums", "day": "2024-01-02"},
        ),
        Prompt(
            id="train-2",
            prompt="3+3?",
            ground_truth="",
            columns={"prompts": [{"role": "user", "content": "3+3?"}]},
            chat=[{"role": "user", "content": "3+3?"}],
        ),
    ]


def test_prompts_stay_as_they_are() -> None:
    prompts = [Prompt(id="a", prompt="1+1?", ground_truth="2", columns={"x": 1})]
    assert as_prompts(prompts, "train") == prompts


def test_a_chat_keeps_its_messages() -> None:
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}]
    (prompt,) = as_prompts([{"prompt": chat, "answer": 2}], "train")
    assert (prompt.prompt, prompt.chat, prompt.ground_truth) == ("1+1?", chat, "2")


def test_a_hugging_face_dataset() -> None:
    data = datasets.Dataset.from_list([{"question": "1+1?", "answer": "#### 1,002", "hint": "add"}])
    (prompt,) = as_prompts(data, "train")
    assert (prompt.prompt, prompt.ground_truth, prompt.columns) == (
        *("1+1?", "1002"),
        {"question": "1+1?", "answer": "#### 1,002", "hint": "add"},
    )
    with raises(ConfigError, field="train_dataset"):
        as_prompts(datasets.DatasetDict({"train": data}), "train_dataset")


def test_anything_that_yields_rows() -> None:
    rows = [
        {"question": f"{n}+1?", "answer": str(n + 1), "note": None if n % 2 else "even"}
        for n in range(6)
    ]
    data, expected = datasets.Dataset.from_list(rows), as_prompts(rows, "train")
    frame = pandas.DataFrame(rows)
    assert frame["note"].isna().sum() == 3
    for form in (
        data,
        data.to_iterable_dataset(),
        frame,
        data.data.table,
        iter(rows),
        (row for row in rows),
    ):
        assert as_prompts(form, "train") == expected
    assert (
        as_prompts(itertools.cycle(rows[:1]), "train", at_most=2)[1].id == "train-1"
    )  # the iterable never ends


def test_several_data_sets_by_their_names() -> None:
    rows = [{"question": "1+1?", "answer": "2", "id": "a"}]
    found = as_held_out({"first": rows, "second": datasets.Dataset.from_list(rows)}, "eval_dataset")
    assert [prompt.id for prompt in found] == ["first/a", "second/a"]
    with pytest.raises(ConfigError) as caught:
        as_held_out({"x": []}, "eval_dataset")
    assert (caught.value.field, caught.value.value) == ("eval_dataset['x']", "[]")
    with pytest.raises(ConfigError) as caught:
        as_held_out({"a/b": rows}, "eval_dataset")
    assert (caught.value.field, caught.value.value) == ("eval_dataset", "a/b")


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        ([], r"the data set is empty.*field: train.*remedy"),
        ("gsm8k", r"str is not a list of problems.*give one split"),
        (
            [{"question": "a?"}, {"answer": "1"}],
            r"row 1: there is no column prompt or question; there are answer.*field: train",
        ),
        (["1+1?"], r"row 0: '1\+1\?' is not a Prompt or a mapping"),
        ([{"prompt": "  "}], r"row 0: column 'prompt' is empty"),
        ([{"prompt": 7}], r"row 0: column 'prompt' is 7, which is not a list of messages"),
        (
            [{"prompt": [{"role": "robot", "content": "x"}]}],
            r"row 0: the chat in column 'prompt' has the roles robot; they must be system, user, assistant",
        ),
        (
            [{"prompt": [{"role": "assistant", "content": "x"}]}],
            r"has the roles assistant; .*the last one must be user",
        ),
        (
            [{"prompt": "[{'role': 'user', 'content': 'a?'}]"}],
            r"row 0: column 'prompt' is a list of messages written as a text.*give a list",
        ),
        (
            [{"prompt": "a?", "answer": [1, 2]}],
            r"row 0: column 'answer' is \[1, 2\], not a text or a number",
        ),
        (
            [{"prompt": "a?", "blob": object()}],
            r"row 0: column 'blob' is of type object, which JSON cannot represent",
        ),
        (
            [{"prompt": "a?", "id": 1}, {"prompt": "b?", "id": "1"}],
            r"two problems have the id '1'.*field: train",
        ),
    ],
)
def test_unusable_data_is_refused_with_its_place(dataset: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        as_prompts(dataset, "train")
