"""The trainer's scores of sampled tokens equal the engine's log-probabilities, however the trainer
computes them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from common.clients.rollout import RolloutClient
from common.settings.algorithm import AlgorithmSection
from common.settings.config import Config
from common.wire.schemas import Completion, Group
from learning.layout import Packed, Packing, Padded
from learning.ranks import Ranks
from tests.support.batches.groups import known, learner_logprobs, prepared
from trainer.algorithms.batch import Batch
from trainer.policy.policy import Policy

pytestmark = pytest.mark.integration

LENGTHS, COMPLETIONS = (3, 17, 9, 40), (24, 5, 1, 32)
TOLERANCE = 1e-4


STOPS = [2, *range(240, 270)]


async def sampled(url: str, temperature: float, repeats: bool = False, **shape: Any) -> list[Group]:
    """Samples groups for long and short prompts, as the collector does."""
    rng, groups = np.random.default_rng(0), []
    async with RolloutClient("rollout", url) as client:
        client.repeats_prompt = repeats
        for position, (length, limit) in enumerate(zip(LENGTHS, COMPLETIONS, strict=True)):
            prompt, least = (
                rng.integers(3, 280, length).astype(np.int32),
                min(limit, shape.get("min_new_tokens", 0)),
            )
            completions = await client.generate(
                prompt.tolist(),
                n=4,
                max_new_tokens=limit,
                temperature=temperature,
                stop_token_ids=STOPS,
                sampling_seed=position,
                parameters=shape | ({"min_new_tokens": least} if least else {}),
            )
            rewards = [
                replace(completion, reward=float(i % 2)) for i, completion in enumerate(completions)
            ]
            name = f"prompt-{position}"
            groups.append(
                Group(
                    id=name,
                    prompt_id=name,
                    prompt="",
                    ground_truth="",
                    prompt_token_ids=prompt,
                    completions=rewards,
                    position=position,
                    min_new_tokens=least,
                    barred=np.array(STOPS, np.int32),
                )
            )
    return groups


def completions_of(groups: list[Group]) -> list[Completion]:
    return [completion for group in groups for completion in group.completions]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_contract_the_trainers_scores_are_the_engines(
    target_url: str, model_dir: Path, temperature: float
) -> None:
    """Padded and packed, in several micro-batches, before an update and in the update itself."""
    groups = await sampled(target_url, temperature)
    completions = completions_of(groups)
    assert len({len(completion.token_ids) for completion in completions}) > 4
    assert {completion.finish_reason for completion in completions} == {"stop", "length"}
    packings: tuple[tuple[Packing, type], ...] = (("off", Padded), ("on", Packed))
    for packing, layout in packings:
        config = Config(
            algorithm=AlgorithmSection(kl_coef=0.1, kl_in="reward", rollout_correction="none")
        )
        config.model.name, config.sampling.temperature = str(model_dir), temperature
        config.trainer.packing, config.trainer.micro_batch_tokens = packing, 128
        policy = Policy(config, Ranks())
        assert policy.scorer.layout is layout
        policy.step = groups[0].weight_version
        batch: Batch = prepared(policy, groups)
        for column in (known(batch.old_logprobs), known(batch.ref_logprobs)):
            assert [len(row) for row in column] == batch.lengths
            for row, completion in zip(column, completions, strict=True):
                np.testing.assert_allclose(row, completion.logprobs, rtol=0, atol=TOLERANCE)
        metrics = policy.update(batch).metrics
        assert metrics.trained_tokens == sum(batch.lengths)
        assert metrics.delta_logprob_current == metrics.delta_logprob < TOLERANCE
        assert abs(metrics.ratio - 1) < TOLERANCE


async def assert_scored_alike(
    url: str, model_dir: Path, repeats: bool = False, **shape: Any
) -> list[Completion]:
    groups = await sampled(url, 0.7, repeats, **shape)
    completions = completions_of(groups)
    for row, completion in zip(learner_logprobs(model_dir, groups, 0.7), completions, strict=True):
        np.testing.assert_allclose(row, completion.logprobs, rtol=0, atol=TOLERANCE)
    return completions


async def test_contract_end_of_a_completion_changes_no_score(
    target_url: str, model_dir: Path
) -> None:
    """Covers stop texts, a minimum length (stop tokens are barred before it) and an ignored end of
    sequence."""
    stopped = await assert_scored_alike(target_url, model_dir, stop=["a", "e"])
    assert "stop" in {completion.finish_reason for completion in stopped}
    assert not any({"a", "e"} & set(completion.text) for completion in stopped)
    longer = await assert_scored_alike(target_url, model_dir, min_new_tokens=4)
    for completion in longer:
        assert completion.finish_reason == "length" or len(completion.token_ids) >= 4
        assert not np.isin(completion.token_ids[:4], STOPS).any()
    endless = await assert_scored_alike(target_url, model_dir, ignore_eos=True)
    assert {completion.finish_reason for completion in endless} == {"length"}


@pytest.mark.parametrize(
    "shape", [{"top_k": 5}, {"top_k": 4096, "top_p": 0.8}, {"top_k": 4096, "min_p": 0.1}]
)
async def test_contract_truncated_tokens_have_no_probability_for_the_trainer(
    target_url: str, model_dir: Path, shape: dict[str, float], request: pytest.FixtureRequest
) -> None:
    repeats = "sglang" in request.node.name
    completions = await assert_scored_alike(target_url, model_dir, repeats, **shape)
    assert all(
        len(completion.kept_counts) == len(completion.token_ids) for completion in completions
    )
    assert max(completion.kept_counts.max() for completion in completions) > 1
