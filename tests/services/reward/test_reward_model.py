"""RewardModelFunction with a tiny generated model: batching, chat template, precision, the
reward-server."""

import asyncio
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForSequenceClassification

from common.errors import ConfigError, InvalidInput
from common.settings.config import load
from common.settings.rewards import ModelReward
from common.settings.sections import RewardSection
from common.wire.schemas import RewardItem
from services.reward.functions import RewardModelFunction
from services.reward.service import RewardService
from tests.support.errors import raises

pytestmark = pytest.mark.integration

TEXTS = ["5", "The answer is 5. " * 10, "no", "maybe it is 7"]
PROMPTS = ["2+3?", "Dan has 8 apples.", "2+3?", "x"]


def chats(texts: list[str]) -> list[list[dict[str, str]]]:
    return [[{"role": "assistant", "content": text}] for text in texts]


def make_model(directory: Path, tokenizer: Any, labels: int) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=512, num_labels=labels, pad_token_id=None,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    LlamaForSequenceClassification(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def model(base_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(
        tmp_path_factory.mktemp("scores"), AutoTokenizer.from_pretrained(base_model), 1
    )


def by_hand(model: Path, prompt: str, text: str) -> float:
    """Computes the logit of one chat with plain transformers, without padding."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    network = LlamaForSequenceClassification.from_pretrained(
        model, pad_token_id=tokenizer.eos_token_id, dtype=torch.float32
    )
    chat = [{"role": "user", "content": prompt}, {"role": "assistant", "content": text}]
    ids = tokenizer(
        tokenizer.apply_chat_template(chat, tokenize=False),
        add_special_tokens=False,
        return_tensors="pt",
    ).input_ids
    with torch.inference_mode():
        return float(network(input_ids=ids).logits[0, 0])


def test_scores_are_the_models_logits_whatever_the_batch(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = [by_hand(model, prompt, text) for prompt, text in zip(PROMPTS, TEXTS, strict=True)]
    assert len(set(expected)) == 4
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # float32, on the CPU
    for batch_size in (1, 3, 8):
        function = RewardModelFunction(str(model), batch_size)
        assert function(chats(TEXTS), prompt=PROMPTS, ground_truth=[""] * 4) == pytest.approx(
            expected, abs=1e-5
        )
    function = RewardModelFunction(str(model))
    as_chat = [{"role": "user", "content": PROMPTS[0]}]
    assert function(chats(TEXTS[:1]), prompt=[as_chat]) == pytest.approx(expected[:1], abs=1e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_bfloat16_on_a_gpu(model: Path) -> None:
    expected = [by_hand(model, prompt, text) for prompt, text in zip(PROMPTS, TEXTS, strict=True)]
    function = RewardModelFunction(str(model))
    assert function._model.dtype == torch.bfloat16
    assert function._model.device.type == "cuda"
    assert function(chats(TEXTS), prompt=PROMPTS) == pytest.approx(expected, abs=2e-2)


def test_chat_over_the_limit_has_no_score(model: Path) -> None:
    function = RewardModelFunction(str(model), max_tokens=60)
    short, long = function(chats(["5", "x" * 2000]), prompt=["p", "p"])
    assert math.isfinite(short)
    assert math.isnan(long)
    assert (
        function.scores(chats(["x" * 2000]), prompt=["p"])[0].reason
        == "the chat is longer than 60 tokens"
    )
    with raises(InvalidInput, field="prompt"):
        function(chats(["5"]))


def test_two_classes_give_a_probability_and_three_are_refused(
    base_model: Path, tmp_path: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(base_model)
    tokenizer.chat_template = None
    two = RewardModelFunction(str(make_model(tmp_path / "two", tokenizer, 2)))
    values = two(chats(TEXTS), prompt=PROMPTS)
    assert all(0 < value < 1 for value in values)
    assert len(set(values)) == 4
    with raises(ConfigError, field="reward.functions.reward_model.model"):
        RewardModelFunction(str(make_model(tmp_path / "three", tokenizer, 3)))


def test_missing_model_is_named(tmp_path: Path) -> None:
    with raises(ConfigError, field="reward.functions.reward_model.model"):
        RewardModelFunction(str(tmp_path / "nothing"))
    with raises(ConfigError, field="reward.functions.reward_model.model", value=None):
        load(["--reward.functions", "reward_model"], {})


def test_a_chat_model_in_place_of_a_reward_model_is_refused(base_model: Path) -> None:
    """It has no head that scores: transformers would make one of random numbers."""
    with raises(ConfigError, field="reward.functions.reward_model.model") as caught:
        RewardModelFunction(str(base_model))
    assert "score.weight" in caught.value.message


def test_a_directory_that_also_has_an_adapter_is_refused(model: Path, tmp_path: Path) -> None:
    both = shutil.copytree(model, tmp_path / "both")
    (both / "adapter_config.json").write_text("{}")
    with raises(ConfigError, field="reward.functions.reward_model.model", value=str(both)):
        RewardModelFunction(str(both))


async def test_a_reward_model_in_the_reward_server(model: Path) -> None:
    config = RewardSection(
        functions=[
            "math",
            {"name": "reward_model", "model": str(model), "max_tokens": 100, "weight": 10.0},
        ]
    )
    async with RewardService(config) as scorer:
        assert scorer.not_ready() is not None
        await scorer.ready()
        texts = ["\\boxed{5}", "x" * 4000]
        fits, long = await scorer.score(
            [RewardItem(prompt="2+3?", response=text, ground_truth="5") for text in texts]
        )
    expected = by_hand(model, "2+3?", texts[0])
    assert fits.components["reward_model"] == pytest.approx(expected, abs=1e-5)
    assert fits.reward == pytest.approx(1 + 10 * expected, abs=1e-4)
    assert (fits.correct, fits.status) == (True, "ok")
    assert (long.reward, long.status) == (None, "error")


async def test_health_says_why_a_reward_model_does_not_load(tmp_path: Path) -> None:
    config = RewardSection(functions=[ModelReward(model=str(tmp_path / "nothing"))])
    with raises(ConfigError, field="reward.functions.reward_model.model"):
        RewardService(config)
    (tmp_path / "nothing").mkdir()
    (tmp_path / "nothing" / "config.json").write_text('{"model_type": "unheard-of"}')
    async with RewardService(config) as scorer:
        async with asyncio.timeout(120):
            while "cannot be loaded" not in str(scorer.not_ready()):  # noqa: ASYNC110
                await asyncio.sleep(0.1)


def test_assigned_but_unusable_gpus_end_the_start(
    monkeypatch: pytest.MonkeyPatch, model: Path
) -> None:
    monkeypatch.setenv("SKYPILOT_NUM_GPUS_PER_NODE", "2")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    config = RewardSection(functions=[ModelReward(model=str(model))])
    with pytest.raises(
        ConfigError,
        match=r"torch finds no GPU, but SKYPILOT_NUM_GPUS_PER_NODE is 2: .*reward\.functions",
    ):
        RewardService(config)
