"""The algorithm of docs/how-to/add-an-algorithm.md, as the page has it; and functions that a run cannot
use."""

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch

import trainer.algorithms.advantages
from common.errors import ConfigError
from common.settings import algorithm
from common.settings.algorithm import AlgorithmSection
from common.settings.config import Config
from learning.ranks import Ranks
from tests.support.batches.groups import off_policy_groups, prepared, with_algorithm
from tests.support.errors import raises
from tests.support.paths import ROOT
from tests.support.runs.in_process import metrics, quiet
from trainer.algorithms.advantages import NEED_MORE_THAN_REWARDS, named_advantage
from trainer.algorithms.losses import named_loss
from trainer.policy.policy import Policy
from trainer.start.in_process import train_in_process

pytestmark = pytest.mark.integration
PAGE = ROOT / "docs/how-to/add-an-algorithm.md"
OWN = {"advantage": "qae:quantile_normalised", "policy_loss": "qae:not_clipped"}
WRONG = """
def whole(*_):
    return torch.zeros(())


def scalar(ratio, tokens, settings):
    return PolicyLoss(loss=tokens.advantages.sum(), ratio=ratio, clipped=ratio)
"""


@pytest.fixture(autouse=True)
def qae(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Puts the file of the page where Python finds it, with two functions more that are wrong."""
    found = re.search(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert found is not None
    (tmp_path / "qae.py").write_text(f"{found[1]}\nimport torch\n{WRONG}")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("qae", None)


def test_the_advantage_of_the_page_is_that_of_the_paper() -> None:
    settings = AlgorithmSection(advantage=OWN["advantage"])
    rewards = torch.tensor([[0.0, 0.0, 0.0, 1.0], [1.0, 1.0, 1.0, 1.0]])
    found = named_advantage(settings)(rewards, torch.ones(2, 4), settings)
    assert torch.allclose(found[0], torch.tensor([0.0, 0.0, 0.0, 2.0]), atol=1e-4)
    assert (found[1] == 0).all()


def test_an_update_with_the_loss_of_the_page(config: Config) -> None:
    """Its gradient is that of REINFORCE, to which GRPO's is equal at a ratio of 1, on the policy's
    own samples."""
    own = with_algorithm(config, policy_loss=OWN["policy_loss"], old_logprobs="trainer")
    clip = with_algorithm(config, old_logprobs="trainer")
    groups = off_policy_groups()
    norms = []
    for each in (own, clip):
        policy = Policy(each, Ranks())
        norms.append(policy.update(prepared(policy, groups)).metrics.grad_norm)
    assert norms[0] > 0
    np.testing.assert_allclose(norms[0], norms[1], rtol=1e-5)


@pytest.mark.slow
def test_a_run_with_both(settings: Callable[..., Config]) -> None:
    words = [word for name, value in OWN.items() for word in (f"--algorithm.{name}", value)]
    config = settings(*words, "--trainer.max_steps", "2")
    train_in_process(config, quiet())
    assert [line["update"]["updates"] for line in metrics(config)] == [1, 1]


@pytest.mark.parametrize(
    ("setting", "path", "why"),
    [
        ("advantage", "qae:nothing", "has no attribute 'nothing'"),
        ("policy_loss", "nowhere:loss", "No module named"),
    ],
)
def test_a_path_that_is_wrong_is_named_before_the_model_is_loaded(
    config: Config, setting: str, path: str, why: str
) -> None:
    with pytest.raises(ConfigError, match=why) as error:
        Policy(with_algorithm(config, **{setting: path}), Ranks())
    assert (error.value.field, error.value.value) == (f"algorithm.{setting}", path)


@pytest.mark.parametrize(("setting", "name"), [("advantage", "whole"), ("policy_loss", "scalar")])
def test_a_result_of_another_shape_is_refused(config: Config, setting: str, name: str) -> None:
    """It would broadcast, and train on something else without a word."""
    policy = Policy(with_algorithm(config, **{setting: f"qae:{name}"}), Ranks())
    with raises(ConfigError, field=f"algorithm.{setting}", value=f"qae:{name}"):
        policy.update(prepared(policy, off_policy_groups()))


def test_the_settings_name_what_the_tables_have() -> None:
    tables = trainer.algorithms
    assert {*tables.advantages.ADVANTAGES, *NEED_MORE_THAN_REWARDS} == set(algorithm.ADVANTAGES)
    assert tables.losses.LOSSES.keys() == set(algorithm.LOSSES)
    for name in algorithm.LOSSES:
        settings = AlgorithmSection(policy_loss=name)
        assert named_loss(settings) is tables.losses.LOSSES[name]
    assert set(get_args(algorithm.Recipe)) == algorithm.RECIPES.keys()
