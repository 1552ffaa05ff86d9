"""Prompt and sampling settings in `ModelEvaluator`, in `OnlineRLTrainer`, and in `evaluate_model
--set`."""

import itertools
import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from common.errors import ConfigError
from common.wire.schemas import Prompt
from services.data.tiny import problems
from tests.support.errors import raises
from trainer import MathRewardFunction, ModelEvaluator, OnlineRLTrainer, TrainerConfig
from trainer.cli.evaluate_model import main

pytestmark = pytest.mark.integration
ROWS = [
    Prompt(id=f"p{i}", prompt=p.question, ground_truth=str(p.answer), columns={"level": i})
    for i, p in enumerate(itertools.islice(problems("test"), 8))
]
STYLE: dict[str, Any] = {
    "data.prompt_template": "L{level} {question}\nA:",
    "sampling.prefill": "So",
    "sampling.stop": ["####"],
}


@pytest.fixture(scope="module")
def reward() -> Iterator[MathRewardFunction]:
    with closing(MathRewardFunction()) as function:
        yield function


def test_the_same_settings_give_the_same_prompts_in_training_and_evaluation(
    base_model: Path, tmp_path: Path, reward: MathRewardFunction
) -> None:
    config = TrainerConfig(
        model_name_or_path=str(base_model),
        output_dir=tmp_path / "run",
        max_new_tokens=16,
        per_device_train_batch_size=16,
        gradient_accumulation_steps=1,
        max_steps=1,
        verbose=False,
        settings=STYLE | {"sampling.top_p": 0.9},
    )
    trainer = OnlineRLTrainer(config, reward, ROWS[3:], ROWS[:3])
    before = trainer.evaluate()
    result = trainer.train()
    assert result.history[0]["update"]["delta_logprob"] < 1e-5
    assert all(answer.startswith("So") and "####" not in answer for answer in before["responses"])
    apart = ModelEvaluator(base_model, max_new_tokens=16, progress=False, settings=STYLE).evaluate(
        ROWS[:3], reward
    )
    assert apart["responses"] == before["responses"]
    plain = ModelEvaluator(base_model, max_new_tokens=16, progress=False).evaluate(ROWS[:3], reward)
    assert plain["responses"] != apart["responses"]


def test_evaluate_model_takes_prompts_and_sampling(base_model: Path, tmp_path: Path) -> None:
    out = tmp_path / "r.json"
    words = [
        "--model",
        str(base_model),
        "--dataset",
        "tiny",
        "--num-samples",
        "4",
        "--k",
        "2",
        "--max-new-tokens",
        "16",
    ]
    more = [
        "data.prompt_template=plain",
        'sampling.stop=["##", "!"]',
        "sampling.top_k=2",
        "sampling.prefill=So",
    ]
    main(
        [
            *words,
            "--output-file",
            str(out),
            *(part for setting in more for part in ("--set", setting)),
        ]
    )
    report = json.loads(out.read_text())
    answers = [
        *report["responses"],
        *(each["response"] for row in report["samples"] for each in row),
    ]
    assert all(answer.startswith("So") and "##" not in answer for answer in answers)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"trainer.batch_size": 3}, ("an evaluation does not read this setting",)),
        ({"sampling.group_size": 3}, ("an evaluation does not read this setting",)),
        ({"sampling.temperature": 3}, ("give the argument temperature instead",)),
        ({"sampling.top_p": 0}, ("greater than 0",)),
        ({"data.prompt_template": "no place"}, ("no {question}",)),
    ],
)
def test_settings_that_an_evaluation_ignores_are_refused(
    settings: dict[str, Any], words: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as caught:
        ModelEvaluator("anything", settings=settings)
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize("name", ["sampling.prefill", "model.chat_template"])
def test_some_settings_need_the_tokenizer_of_a_chat_server(name: str) -> None:
    value: Any = {
        "sampling.prefill": "So",
        "model.chat_template": "{{ messages }}",
    }[name]
    with raises(ConfigError, field="settings", value=str({name: value})):
        ModelEvaluator("http://127.0.0.1:1", settings={name: value})
    ModelEvaluator("http://127.0.0.1:1", tokenizer="somewhere", settings={name: value})
