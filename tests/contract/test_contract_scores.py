"""The trainer's own scores of what an engine sampled are the engine's log-probabilities, however the trainer computes them."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from common.algorithm import AlgorithmSection
from common.config import Config
from common.rollout_client import RolloutClient
from common.schemas import Group
from learning.layout import Packed, Packing, Padded
from learning.ranks import Ranks
from tests.support.groups import known, prepared
from trainer.algorithms.batch import Batch
from trainer.policy.policy import Policy

pytestmark = pytest.mark.process

LENGTHS, COMPLETIONS = (3, 17, 9, 40), (24, 5, 1, 32)
TOLERANCE = 1e-4


async def sampled(url: str, temperature: float) -> list[Group]:
    """Groups of several prompts, long and short ones, as the collector makes them."""
    rng, groups = np.random.default_rng(0), []
    async with RolloutClient("rollout", url) as client:
        for position, (length, limit) in enumerate(zip(LENGTHS, COMPLETIONS, strict=True)):
            prompt = rng.integers(3, 280, length).astype(np.int32)
            completions = await client.generate(
                prompt.tolist(),
                n=4,
                max_new_tokens=limit,
                temperature=temperature,
                stop_token_ids=[2, *range(240, 270)],
                sampling_seed=position,
            )
            rewards = [replace(completion, reward=float(i % 2)) for i, completion in enumerate(completions)]
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
                )
            )
    return groups


@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_contract_the_trainers_scores_are_the_engines(target_url: str, model_dir: Path, temperature: float) -> None:
    """Padded and packed, in several micro-batches; before an update, and in the update itself."""
    groups = await sampled(target_url, temperature)
    completions = [completion for group in groups for completion in group.completions]
    assert len({len(completion.token_ids) for completion in completions}) > 4
    assert {completion.finish_reason for completion in completions} == {"stop", "length"}
    packings: tuple[tuple[Packing, type], ...] = (("off", Padded), ("on", Packed))
    for packing, layout in packings:
        config = Config(algorithm=AlgorithmSection(kl_coef=0.1, kl_in="reward", rollout_correction="none"))
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
