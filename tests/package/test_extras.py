"""Every task's program imports only what the extras that `jobgroup/setup.sh` installs for it bring,
by uv.lock."""

import sys
from importlib.metadata import packages_distributions

import grimp
import pytest
from packaging.utils import canonicalize_name

from tests.support.package.lock import locked

OURS = ("common", "learning", "services", "trainer")
PROGRAMS: dict[str, tuple[list[str], set[str]]] = {
    "services.data": (["services"], set()),
    "services.reward": (
        ["services"],
        {"torch", "transformers"},
    ),  # a reward model needs the extra `trainer` too
    "services.replay": (["services"], set()),
    "services.rollout": (["rollout"], set()),
    "services.engine": (["rollout", "trainer"], set()),
    # setup.sh adds transformers, for the tokenizer.
    "services.environment": (["services"], {"transformers"}),
    "trainer": (["trainer"], {"mlflow", "tensorboard", "trackio", "wandb"}),  # extras of their own
}
"""The extras of every program, and the packages that it needs only if they are asked for."""


@pytest.fixture(scope="module")
def graph() -> grimp.ImportGraph:
    return grimp.build_graph(
        *OURS, include_external_packages=True, exclude_type_checking_imports=True, cache_dir=None
    )


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_task_imports_only_what_it_installs(graph: grimp.ImportGraph, program: str) -> None:
    extras, optional = PROGRAMS[program]
    reached = {
        name
        for name in graph.find_upstream_modules(f"{program}.__main__")
        if graph.is_module_squashed(name)
    }
    packages = reached - set(sys.stdlib_module_names) - optional
    assert {"numpy", "pydantic"} <= packages
    providers, here = packages_distributions(), locked(extras)
    assert {
        name
        for name in packages
        if not here.intersection(map(canonicalize_name, providers.get(name, [])))
    } == set()
