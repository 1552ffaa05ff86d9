"""Numbers of data sets, and settings that TRL does not name."""

from pathlib import Path

import pytest

from trainer.api.grpo import GRPOConfig, RLOOConfig
from trainer.api.online import by_data_set
from trainer.api.settings import TrainerConfig


def test_the_number_beside_the_deviation_is_that_of_trl() -> None:
    """TRL divides by the standard deviation plus 1e-4, where it divides at all."""

    def epsilon(config: TrainerConfig) -> float:
        return config.to_config(64, 0, Path("out")).algorithm.advantage_eps

    own = epsilon(TrainerConfig())
    assert epsilon(GRPOConfig(output_dir="out")) == 1e-4 != own
    assert epsilon(GRPOConfig(output_dir="out", settings={"algorithm.advantage_eps": 1e-3})) == 1e-3
    assert epsilon(RLOOConfig(output_dir="out")) == own


@pytest.mark.parametrize("has_verdicts", [True, False])
def test_a_data_set_has_its_own_numbers_whatever_another_is_called(has_verdicts: bool) -> None:
    rewards = {"math": [1.0, 0.0], "math-hard": [0.0, 0.0, 0.0, 1.0], "m": [1.0]}
    answers = [
        {
            "prompt_id": f"{name}/{place}",
            "reward": reward,
            "correct": reward > 0 if has_verdicts else None,
        }
        for name, values in rewards.items()
        for place, reward in enumerate(values)
    ]
    means = {"math": 0.5, "math-hard": 0.25, "m": 1.0}
    figures = ("reward", "accuracy") if has_verdicts else ("reward",)
    assert by_data_set(answers, [*rewards, "empty"]) == {
        f"eval_{name}_{figure}": mean for name, mean in means.items() for figure in figures
    }
