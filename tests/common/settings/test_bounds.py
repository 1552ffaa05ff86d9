"""Settings at their bounds: the last that is accepted, and the first that is refused."""

import pytest

from common.errors import ConfigError
from common.settings.config import load

_ROOM = ["--rollout.engine=embedded", "--rollout.max_context_tokens=64"]
_IN_FLIGHT = [
    "--trainer.max_staleness=2",
    "--trainer.batch_size=4",
    "--sampling.group_size=8",  # 3 × 4 × 8 = 96 completions
]
_POLYNOMIAL = ["--optimizer.lr_schedule=polynomial", "--optimizer.learning_rate=1e-5"]


@pytest.mark.parametrize(
    ("words", "setting", "accepted", "refused"),
    [
        (_ROOM, "sampling.max_new_tokens", "63", "64"),
        (["--sampling.max_new_tokens=64"], "algorithm.overlong_buffer", "63", "64"),
        (["--sampling.max_new_tokens=64"], "sampling.min_new_tokens", "64", "65"),
        (_IN_FLIGHT, "replay.capacity", "96", "95"),
        (_POLYNOMIAL, "optimizer.lr_schedule_args", '{"lr_end": 9.9e-6}', '{"lr_end": 1e-5}'),
        (["--evaluation.temperature=0"], "evaluation.n", "1", "2"),
    ],
)
def test_bounds(words: list[str], setting: str, accepted: str, refused: str) -> None:
    load([*words, f"--{setting}={accepted}"], {})
    with pytest.raises(ConfigError) as caught:
        load([*words, f"--{setting}={refused}"], {})
    assert setting in str(caught.value)
    assert "give a number" not in str(caught.value)


def test_the_later_value_of_a_name_counts_and_the_others_stay() -> None:
    words = [*_POLYNOMIAL]
    for arguments in ('{"power": 1.0, "lr_end": 1e-9}', '{"power": 2.0}'):
        words += ["--optimizer.lr_schedule_args", arguments]
    assert load(words, {}).optimizer.lr_schedule_args == {"power": 2.0, "lr_end": 1e-9}


def test_numbers_of_json_are_numbers() -> None:
    """YAML reads 1e-9, which has no point, as a text."""
    words = [*_POLYNOMIAL, "--optimizer.lr_schedule_args", '{"lr_end": 1e-9, "power": 2E0}']
    assert load(words, {}).optimizer.lr_schedule_args == {"lr_end": 1e-9, "power": 2.0}
    again = ["--optimizer.lr_schedule_args", '{"power": 1.0, "power": 2.0}']
    with pytest.raises(ConfigError, match="stands twice"):
        load([*_POLYNOMIAL, *again], {})
