"""`ModelEvaluator` gets the same answers through OpenAI's API, through SGLang's own API and from
the local model."""

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from services.reward.functions import MathRewardFunction
from trainer.api.evaluator import ModelEvaluator
from trainer.evaluation.results import EvaluationResults

pytestmark = pytest.mark.integration

# No digit follows a space: there, SGLang splits a chat by tokenizer.json but transformers by the
# class of the model.
ROWS = [
    {"prompt": prompt, "answer": "7"}
    for prompt in ("How many apples?", "Tom has apples", "Tom buys more apples")
]


def evaluated(model: str | Path, **options: Any) -> EvaluationResults:
    with closing(MathRewardFunction()) as reward:
        evaluator = ModelEvaluator(model, max_new_tokens=24, progress=False, **options)
        return evaluator.evaluate(ROWS, reward, k=2)


def check(served: EvaluationResults, model_dir: Path) -> None:
    local = evaluated(model_dir)
    assert all(local["responses"])
    assert served["responses"] == local["responses"]
    assert served["lengths"] == local["lengths"]
    assert len({sample["response"] for row in served["samples"] for sample in row}) > len(ROWS)


def test_contract_evaluation_of_a_served_model_equals_that_of_the_local_one(
    target_url: str, model_dir: Path
) -> None:
    check(evaluated(target_url, tokenizer=model_dir), model_dir)


def test_contract_evaluation_by_chats_equals_that_of_the_local_one(
    chat_url: str, model_dir: Path
) -> None:
    check(evaluated(chat_url), model_dir)
