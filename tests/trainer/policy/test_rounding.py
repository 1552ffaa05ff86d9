"""Engine and trainer round differently in bfloat16: what clipping makes of it before the policy has
moved."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import trainer.policy.policy
import trainer.policy.scorer
from common.settings.config import Config, load
from common.wire.schemas import Completion, Group
from learning.head import make_float32_logits
from learning.ranks import Ranks
from tests.support.batches.groups import VOCABULARY, prepared
from trainer.policy.policy import Policy

PROMPTS, GROUP, TOKENS = 4, 8, 8


def sampled(model_dir: Path) -> list[Group]:
    """Groups that the model generates in bfloat16, with the log-probabilities it sampled them
    with."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.bfloat16).eval()
    make_float32_logits(model)
    rng, found = np.random.default_rng(0), []
    torch.manual_seed(0)
    for position in range(PROMPTS):
        prompt = rng.integers(3, VOCABULARY, 5).astype(np.int32)
        ids = torch.from_numpy(prompt.astype(np.int64)).repeat(GROUP, 1)
        scores = []
        with torch.no_grad():
            for _ in range(TOKENS):
                logs = model(ids).logits[:, -1].log_softmax(-1)
                ids = torch.cat([ids, logs.exp().multinomial(1)], 1)
                scores.append(logs.gather(-1, ids[:, -1:]))
        chosen = torch.cat(scores, 1)
        completions = [
            Completion(
                token_ids=row[len(prompt) :].numpy().astype(np.int32),
                logprobs=logprobs.numpy(),
                text="x",
                finish_reason="length",
                weight_versions=[(0, 0, TOKENS)],
                reward=float(i % 2),
                correct=bool(i % 2),
            )
            for i, (row, logprobs) in enumerate(zip(ids, chosen, strict=True))
        ]
        found.append(
            Group(
                id=f"group-{position}",
                prompt_id=f"prompt-{position}",
                prompt="How many?",
                ground_truth="1",
                prompt_token_ids=prompt,
                completions=completions,
                position=position,
            )
        )
    return found


@pytest.fixture(scope="module")
def groups(policy_dir: Path) -> list[Group]:
    return sampled(policy_dir)


@pytest.fixture
def low(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the trainer multiply in bfloat16 on this CPU, as on a GPU; its states stay float32, so
    that it rounds differently from the engine."""
    monkeypatch.setattr("learning.loading._keep_states_in_bfloat16", lambda _: None)
    for module in (trainer.policy.policy, trainer.policy.scorer):
        monkeypatch.setattr(module, "computes_in_bfloat16", lambda *_: True)


def clipped(policy_dir: Path, groups: list[Group], *words: str) -> tuple[float, float]:
    """Returns the share of clipped tokens and the mean |Δ logprob| of an update on the policy's own
    samples."""
    names = (
        "--model.name",
        str(policy_dir),
        "--algorithm.name",
        "gspo",
        "--rollout.engine",
        "embedded",
    )
    config = load(
        [
            *names,
            "--sampling.group_size",
            str(GROUP),
            "--sampling.max_new_tokens",
            str(TOKENS),
            *words,
        ],
        {},
    )
    policy = Policy(config, Ranks())
    metrics = policy.update(prepared(policy, groups)).metrics
    return metrics.clip_fraction, metrics.delta_logprob


@pytest.mark.usefixtures("low")
def test_the_engines_rounding_is_not_clipped_as_if_the_policy_had_moved(
    policy_dir: Path, groups: list[Group]
) -> None:
    before, distance = clipped(policy_dir, groups, "--algorithm.old_logprobs", "engine")
    assert before > 0.05
    assert distance > 1e-4
    assert clipped(policy_dir, groups) == (0, distance)
    for words in (["truncate"], ["mask"], ["none", "--algorithm.old_logprobs", "trainer"]):
        assert clipped(policy_dir, groups, "--algorithm.rollout_correction", *words)[0] == 0


@pytest.mark.usefixtures("low")
def test_with_several_updates_the_first_ratio_is_still_one(
    policy_dir: Path, groups: list[Group]
) -> None:
    """A pass over other rows rounds differently too, so the first update uses its own
    log-probabilities."""
    words = (
        "--algorithm.update_epochs",
        "2",
        "--optimizer.learning_rate",
        "1e-12",
        "--trainer.micro_batch_tokens",
        "300",
    )
    config = load(
        [
            "--model.name",
            str(policy_dir),
            "--algorithm.name",
            "gspo",
            "--rollout.engine",
            "embedded",
            *words,
        ],
        {},
    )
    policy = Policy(config, Ranks())
    batch = prepared(policy, groups)
    assert batch.old_logprobs is not None
    indices = np.arange(len(batch.rows))
    sums, _ = policy._accumulate(batch, indices, first=True)
    assert (sums["clipped"], sums["ratio"]) == (0, sums["tokens"])


def test_in_float32_the_engines_log_probabilities_are_kept(
    policy_dir: Path, groups: list[Group]
) -> None:
    """Nothing is computed twice if the result would be the same."""
    config = load(
        [
            "--model.name",
            str(policy_dir),
            "--algorithm.name",
            "gspo",
            "--rollout.engine",
            "embedded",
        ],
        {},
    )
    assert not config.algorithm.own_old_logprobs(low_precision=False)
    assert not load(["--algorithm.rollout_correction", "none"], {}).algorithm.own_old_logprobs(
        low_precision=True
    )
    assert Policy(config, Ranks()).logprobs(prepared(Policy(config, Ranks()), groups)) is None


def test_on_gpus_the_difference_is_corrected_by_default() -> None:
    assert Config().algorithm.rollout_correction == "truncate"
    assert load(["--rollout.device", "cpu"], {}).algorithm.rollout_correction == "none"
    assert load(["--rollout.engine", "embedded"], {}).algorithm.rollout_correction == "none"
    assert (
        load(["--algorithm.rollout_correction", "none"], {}).algorithm.rollout_correction == "none"
    )
