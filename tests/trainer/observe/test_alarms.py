"""Alarms: silent when all is well, otherwise with a likely cause that fits the measurements."""

from dataclasses import replace

import msgspec
import numpy as np
import pytest

from common.settings.algorithm import AlgorithmSection
from common.settings.config import Config
from tests.support.batches.groups import make_group
from trainer.observe.alarms import Agreement, alarms, other_reference, same_prompts
from trainer.policy.update_metrics import Sums

WELL = replace(
    Sums().metrics([0.1], 1e-6, 0.0, skipped=0, stopped=False),
    delta_logprob_current=0.01,
    kl_rollout=5e-4,
    effective_sample_size=0.99,
)


def test_silent_when_all_is_well() -> None:
    assert alarms(WELL, 0.0, Config()) == {}
    assert (
        alarms(replace(WELL, kl_rollout=5e-3), 1.0, Config()) == {}
    )  # old experience may be further away


def test_on_policy_the_cause_of_a_difference_is_the_engine() -> None:
    found = alarms(replace(WELL, delta_logprob_current=0.1, kl_rollout=0.02), 0.0, Config())
    assert set(found) == {"delta_logprob", "kl_rollout"}
    assert "0.1" in found["delta_logprob"]
    assert "model.dtype is bfloat16" in found["delta_logprob"]
    assert "precision" in found["kl_rollout"]


def test_dropout_of_the_model_is_the_cause_that_is_named() -> None:
    measured = replace(WELL, delta_logprob_current=0.1, kl_rollout=0.02)
    found = alarms(measured, 0.0, Config(), ["attn_pdrop 0.1", "lora.dropout 0.05"])
    for text in found.values():
        assert (
            "dropout (attn_pdrop 0.1, lora.dropout 0.05), which applies in updates and not in the engine"
            in text
        )
        assert "config.json" in text
        assert "precision" not in text
    old = alarms(measured, 1.5, Config(), ["attn_pdrop 0.1"])
    assert "weight versions old" in old["kl_rollout"]


@pytest.mark.parametrize("reuse", [0.0, 0.5])
def test_off_policy_the_cause_is_the_age_and_the_remedy_names_the_settings(reuse: float) -> None:
    config = Config(algorithm=AlgorithmSection(rollout_correction="none"))
    config.trainer.max_staleness, config.replay.reuse_ratio = 3, reuse
    text = alarms(replace(WELL, effective_sample_size=0.2, kl_rollout=1.0), 1.5, config)
    assert set(text) == {"effective_sample_size", "kl_rollout"}
    for line in text.values():
        assert "1.5 weight versions old" in line
        assert "trainer.max_staleness (3)" in line
        assert "algorithm.rollout_correction" in line
        assert ("replay.max_reuse_staleness" in line) == (reuse > 0)
    config.algorithm = AlgorithmSection.model_validate({"rollout_correction": "truncate"})
    assert (
        "rollout_correction" not in alarms(replace(WELL, kl_rollout=1.0), 1.5, config)["kl_rollout"]
    )


def test_weights_are_the_cause_when_both_agreed_before() -> None:
    measured = replace(WELL, delta_logprob_current=0.2)
    text = alarms(measured, 0.0, Config(), agreement=Agreement(step=7, delta=3e-7))["delta_logprob"]
    assert "until step 7 both agreed (3e-07)" in text
    assert "the engines do not serve the weights of their version" in text
    assert "precision" not in text


def test_a_difference_that_grew_is_a_drift() -> None:
    measured = replace(WELL, delta_logprob_current=0.022)
    agreement = Agreement(step=7, delta=0.017)
    text = alarms(measured, 0.0, Config(), agreement=agreement)["delta_logprob"]
    assert "it grew from 0.017 in step 7: numbers that drift apart" in text


def test_a_difference_of_one_sign_is_another_distribution() -> None:
    measured = replace(WELL, delta_logprob_current=0.2, logprob_gap=0.18)
    text = alarms(measured, 0.0, Config())["delta_logprob"]
    assert "higher, by 0.18 on average: it truncates the distribution" in text
    assert "temperature" in text


def test_tokens_that_are_too_likely_were_not_sampled_from_the_policy() -> None:
    """Their log-probabilities may be right all the same: no other alarm is raised."""
    measured = replace(
        WELL, trained_tokens=9, entropy=0.5, likelihood_gap=0.1, likelihood_error=0.005
    )
    found = alarms(measured, 0.0, Config())
    assert set(found) == {"likelihood"}
    assert "likelier than sampling from the policy makes them, by 0.1 nats" in found["likelihood"]
    assert "top_p" in found["likelihood"]
    few_tokens = replace(measured, likelihood_error=0.03)
    assert alarms(few_tokens, 0.0, Config()) == {}
    config = Config()
    config.sampling.top_p = 0.9  # which the trainer knows
    assert alarms(measured, 0.0, config) == {}


def test_a_reference_that_differs_in_the_first_step_is_another_model() -> None:
    config = Config()
    # The reference is the model that training starts from; dropout or several updates differ.
    assert other_reference(0.7, config) == {}
    config.model.reference = "some/other"
    assert other_reference(1e-6, config) == {}
    text = other_reference(0.7, config)["reference"]
    assert "0.7 nats per token in the first step already" in text
    assert "(some/other)" in text


def test_different_problems_with_one_prompt_are_named() -> None:
    """A chat template that leaves out the user's message: the model answers nothing that it sees."""
    rng = np.random.default_rng(0)
    first, second = (make_group(rng, [0.0, 1.0], position=i) for i in range(2))
    assert same_prompts([first, second], Config()) == {}, "one problem, drawn twice"
    second.prompt = "How far?"
    assert same_prompts([first, second], Config()) == {}, "two problems with two prompts"
    second.prompt_token_ids = first.prompt_token_ids
    assert (
        "2 different problems are the same"
        in same_prompts([first, second], Config())["same_prompts"]
    )
    assert same_prompts([first], Config()) == {}
    trimmed = msgspec.structs.replace(first, prompt=f" {first.prompt}\n")
    assert same_prompts([first, trimmed], Config()) == {}, "a template may trim white space"
