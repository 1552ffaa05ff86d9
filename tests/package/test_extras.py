"""Every task's program imports only what the extras that `jobgroup/setup.sh` installs for it bring, by uv.lock."""

import re
import sys
import tomllib
from importlib.metadata import packages_distributions

import grimp
import pytest

from tests.support.paths import ROOT

OURS = ("common", "learning", "services", "trainer")
PROGRAMS: dict[str, tuple[list[str], set[str]]] = {
    "services.data": (["services"], set()),
    "services.reward": (["services"], {"torch", "transformers"}),  # a reward model needs the extra `trainer` too
    "services.replay": (["services"], set()),
    "services.rollout": (["rollout"], set()),
    "services.engine": (["rollout", "trainer"], set()),
    "services.critic": (["trainer"], set()),
    "services.environment": (["services", "trainer"], {"verifiers"}),  # in an environment of its own
    "trainer": (["trainer"], {"mlflow", "tensorboard", "trackio", "wandb"}),  # extras of their own
}
"""The extras of every program, and the packages that it needs only if they are asked for."""


@pytest.fixture(scope="module")
def graph() -> grimp.ImportGraph:
    return grimp.build_graph(*OURS, include_external_packages=True, exclude_type_checking_imports=True, cache_dir=None)


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def installed(extras: list[str]) -> set[str]:
    """Returns the distributions that the package and these extras bring."""
    packages = {package["name"]: package for package in tomllib.loads((ROOT / "uv.lock").read_text())["package"]}
    waiting, seen = [("rlhf-math", tuple(extras))], set()
    while waiting:
        if (found := waiting.pop()) in seen:
            continue
        seen.add(found)
        package, optional = packages[found[0]], packages[found[0]].get("optional-dependencies", {})
        needed = [*package.get("dependencies", []), *(each for extra in found[1] for each in optional.get(extra, []))]
        waiting += [(each["name"], tuple(each.get("extra", []))) for each in needed]
    return {normal(name) for name, _ in seen}


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_task_imports_only_what_it_installs(graph: grimp.ImportGraph, program: str) -> None:
    extras, optional = PROGRAMS[program]
    reached = {name for name in graph.find_upstream_modules(f"{program}.__main__") if graph.is_module_squashed(name)}
    packages = reached - set(sys.stdlib_module_names) - optional
    assert {"numpy", "pydantic"} <= packages
    providers, here = packages_distributions(), installed(extras)
    assert {name for name in packages if not here.intersection(map(normal, providers.get(name, [])))} == set()
