"""Commands are named in the way in which the program itself was started."""

import sys
import tomllib

import pytest

from common.process.cli import in_own_words, program
from rlhf_math import commands
from tests.support.paths import ROOT

TOLD = "merge it: python -m trainer.export A B, then python -m trainer.evaluate_model --model B"


@pytest.mark.parametrize(
    ("started", "told"),
    [
        (["python", "-m", "trainer.sft"], TOLD),
        (
            ["python", "-m", "rlhf_math", "trainer.sft"],
            "merge it: python -m rlhf_math trainer.export A B, then python -m rlhf_math "
            "trainer.evaluate_model --model B",
        ),
        (
            ["/env/bin/python", "/env/bin/rlhf-sft"],
            "merge it: python -m rlhf_math trainer.export A B, then rlhf-eval --model B",
        ),
    ],
    ids=["checkout", "module", "script"],
)
def test_commands_in_a_text_are_those_of_this_installation(
    started: list[str], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "orig_argv", started)
    assert in_own_words(TOLD) == told
    assert in_own_words("python -m pip install x") == "python -m pip install x"


def test_every_console_script_is_known_by_its_module(monkeypatch: pytest.MonkeyPatch) -> None:
    modules = list[str]()
    monkeypatch.setattr(commands, "run", modules.append)
    monkeypatch.setattr(sys, "orig_argv", ["python", "/env/bin/rlhf-train"])
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    for target in scripts.values():
        getattr(commands, target.partition(":")[2])()
    assert [program(module) for module in modules] == list(scripts)
