"""Both engines return the experts that computed each token, behind smg too, and the learner scores
with these as they do.

The mixture's router is nearly tied, so that rounding alone tips its choices. `-s` prints the
differences.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from benchmarks.routing import write_model
from common.clients.rollout import RolloutClient
from common.settings.config import Config, load
from common.wire.schemas import Group
from learning.ranks import Ranks
from tests.support.batches.groups import batch_of
from tests.support.engines.engines import (
    engine_process,
    router_process,
    sglang_is_installed,
    sglang_process,
)
from trainer.algorithms.spool import split_routing
from trainer.policy.scorer import load_scorer
from trainer.policy.scoring import score_batch

pytestmark = [pytest.mark.integration, pytest.mark.slow]
_COMPLETIONS = 8
_NEW_TOKENS = 64


@pytest.fixture(params=["embedded", "sglang"])
def mixture(
    request: pytest.FixtureRequest, model_dir: Path, tmp_path: Path
) -> Iterator[tuple[Path, str]]:
    """Returns a mixture's directory and the URL of a router in front of an engine that serves it."""
    model = tmp_path / "model"
    write_model(model, 32, tied=True, tokenizer=model_dir)
    if request.param == "embedded":
        with (
            engine_process(model, tmp_path / "log", "--weight-version", "7") as (url, _),
            router_process(url, tmp_path / "router.log", router="smg") as router,
        ):
            yield model, router
        return
    if not sglang_is_installed():
        pytest.skip("SGLang is not installed: `make sglang-cpu` does it")
    with (
        sglang_process(model, tmp_path / "log", "7", routing_replay=True) as url,
        router_process(url, tmp_path / "router.log", router="smg") as router,
    ):
        yield model, router


async def generated(url: str) -> list[Group]:
    """Returns a group for each of three prompts; the second begins with the first."""
    rng = np.random.default_rng(0)
    longest = rng.integers(10, 250, 40)
    groups: list[Group] = []
    async with RolloutClient("router", url, deadline_s=300) as client:
        for tokens in (longest[:20], longest, rng.integers(10, 250, 10)):
            completions = await client.generate(
                tokens.tolist(),
                n=_COMPLETIONS,
                max_new_tokens=_NEW_TOKENS,
                temperature=1.0,
                stop_token_ids=[],
                parameters={"ignore_eos": True},
                routed_experts=True,
            )
            group = Group(
                id=str(len(groups)),
                prompt_id="",
                prompt="",
                ground_truth="",
                prompt_token_ids=tokens.astype(np.int32),
                completions=completions,
            )
            split_routing(group)
            groups.append(group)
    return groups


async def test_contract_replayed_experts_leave_rounding(mixture: tuple[Path, str]) -> None:
    model, url = mixture
    groups = await generated(url)
    largest: dict[bool, float] = {}
    for replays in (False, True):
        words = ["--model.name", str(model), "--rollout.engine", "embedded"]
        config: Config = load([*words, "--trainer.routing_replay", str(replays).lower()], {})
        batch = batch_of(groups, config, 7)
        scorer = load_scorer(config.model, Ranks(), config)
        scored = score_batch(scorer, batch, config, Ranks())
        sampled = [row.rollout_logprobs for row in batch.tokens.values()]
        differences = np.abs(np.concatenate(scored) - np.concatenate(sampled))
        largest[replays] = float(differences.max())
        print(
            f"replayed: {replays}, {len(differences)} tokens, |Δ log-probability| "
            f"{differences.mean():.1e} on average, largest {differences.max():.1e}"
        )
    assert largest[True] < 2e-5
    assert largest[False] > 1e-3
