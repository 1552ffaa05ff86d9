"""`ModelEvaluator` gets the same answers through OpenAI's API, through SGLang's own API and from
the local model."""

from contextlib import closing
from pathlib import Path

import pytest

from services.reward.functions import MathRewardFunction
from trainer.api.evaluator import ModelEvaluator

pytestmark = pytest.mark.integration

# No digit follows a space: there, SGLang splits a chat by tokenizer.json but transformers by the
# class of the model.
ROWS = [
    {"prompt": prompt, "answer": "7"}
    for prompt in ("How many apples?", "Tom has apples", "Tom buys more apples")
]


def test_contract_evaluation_of_a_served_model_equals_that_of_the_local_one(
    target_url: str, model_dir: Path
) -> None:
    with closing(MathRewardFunction()) as reward:
        local = ModelEvaluator(model_dir, max_new_tokens=24, progress=False).evaluate(ROWS, reward)
        chat = ModelEvaluator(target_url, max_new_tokens=24, progress=False).evaluate(
            ROWS, reward, k=2
        )
        native = ModelEvaluator(
            target_url, tokenizer=model_dir, max_new_tokens=24, progress=False
        ).evaluate(ROWS, reward, k=2)
    assert all(local["responses"])
    for served in (chat, native):
        assert served["responses"] == local["responses"]
        assert served["lengths"] == local["lengths"]
        assert len({sample["response"] for row in served["samples"] for sample in row}) > len(ROWS)
