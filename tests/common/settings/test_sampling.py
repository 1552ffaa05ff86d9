"""Sampling settings: what they mean in combination, and which are refused with field and remedy."""

from typing import Any

import pytest

from common.errors import ConfigError
from common.settings.config import from_mapping, load

EMBEDDED = {"rollout.engine": "embedded"}
SGLANG = {"rollout.engine": "sglang"}
OLD_ROUTER = {"rollout.router": "sglang-router"}


@pytest.mark.parametrize(
    ("settings", "field", "words"),
    [
        ({"sampling.top_p": 0}, "sampling.top_p", ("greater than 0",)),
        ({"sampling.top_p": 1.1}, "sampling.top_p", ("less than or equal to 1",)),
        ({"sampling.top_k": 0}, "sampling.top_k", ("greater than 1",)),
        ({"sampling.top_k": 1}, "sampling.top_k", ("greater than 1",)),
        ({"sampling.min_p": 1}, "sampling.min_p", ("less than 1",)),
        ({"sampling.min_p": -0.1}, "sampling.min_p", ("greater than or equal to 0",)),
        ({"sampling.stop": [""]}, "sampling.stop", ("at least 1 character",)),
        (
            {"sampling.stop_token_ids": [-1]},
            "sampling.stop_token_ids",
            ("greater than or equal to 0",),
        ),
        (
            {"sampling.min_new_tokens": 600},
            "sampling.min_new_tokens",
            ("above sampling.max_new_tokens 512", "lower it"),
        ),
        (
            {"sampling.min_new_tokens": 5, "sampling.ignore_eos": True},
            "sampling.min_new_tokens",
            ("not read", "leave it out"),
        ),
        ({"sampling.top_k": 5000, **EMBEDDED}, "sampling.top_k", ("4096", "evaluation.top_k")),
        (
            {"sampling.top_p": 0.9, **OLD_ROUTER},
            "sampling.top_p",
            ("sglang-router removes", "leave rollout.router out", "evaluation.top_p"),
        ),
        (
            {"sampling.min_p": 0.1, "rollout.device": "cpu", **OLD_ROUTER},
            "sampling.min_p",
            ("sglang-router removes",),
        ),
        (
            {"trainer.routing_replay": True, **OLD_ROUTER},
            "trainer.routing_replay",
            ("sglang-router removes", "leave rollout.router or"),
        ),
        (
            {
                "trainer.routing_replay": True,
                "rollout.engine_args": ["--moe-runner-backend", "triton_kernel"],
            },
            "trainer.routing_replay",
            ("triton_kernel do not record", "or name triton"),
        ),
        (
            {"trainer.routing_replay": True, "reproducible": True, **EMBEDDED},
            "trainer.routing_replay",
            ("does not record the experts", "leave one of the two out"),
        ),
        (
            {"trainer.routing_replay": True, "environment.name": "python", **EMBEDDED},
            "trainer.routing_replay",
            ("needs single completions",),
        ),
        (
            {"evaluation.n": 4},
            "evaluation.n",
            ("greedy answers are all the same", "set evaluation.temperature"),
        ),
        (
            {"evaluation.max_new_tokens": 2048, **EMBEDDED},
            "evaluation.max_new_tokens",
            ("no room for a prompt",),
        ),
        ({"evaluation.top_p": 0.9, "evaluation.samples": 0}, "evaluation.top_p", ("not read",)),
        (
            {"algorithm.dynamic_sampling_rounds": 5},
            "algorithm.dynamic_sampling_rounds",
            ("not read",),
        ),
        (
            {"sampling.system_prompt": "S", "data.prompt_template": "plain"},
            "sampling.system_prompt",
            ("not read",),
        ),
    ],
)
def test_conflicting_settings_are_refused(
    settings: dict[str, Any], field: str, words: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as caught:
        from_mapping(settings)
    assert caught.value.field == field
    assert caught.value.remedy
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize("settings", [EMBEDDED, SGLANG])
def test_truncated_sampling_in_training_is_bounded_by_top_k(settings: dict[str, Any]) -> None:
    sampling = from_mapping({"sampling.top_p": 0.9, **settings}).sampling
    assert (sampling.truncation(), sampling.training_truncation()) == (
        {"top_p": 0.9},
        {"top_p": 0.9, "top_k": 4096},
    )
    sampling = from_mapping({"sampling.top_k": 20, **settings}).sampling
    assert sampling.truncation() == sampling.training_truncation() == {"top_k": 20}
    assert from_mapping(settings).sampling.training_truncation() == {}


def test_evaluations_may_truncate_with_any_engine() -> None:
    config = load(
        ["--evaluation.top_p", "0.95", "--evaluation.temperature", "0.6", "--evaluation.n", "4"], {}
    )
    assert config.evaluation.truncation() == {"top_p": 0.95}
    assert config.sampling.truncation() == {}


def test_lists_of_stops_on_a_command_line() -> None:
    config = load(["--sampling.stop", '["\\n\\n", "a, b"]', "--sampling.stop_token_ids", "7,8"], {})
    assert (config.sampling.stop, config.sampling.stop_token_ids) == (["\n\n", "a, b"], [7, 8])
    assert config.sampling.stop_conditions() == {"stop": ["\n\n", "a, b"]}
