"""Data sets of the hub: the library's own code with a small hub on this machine, and hubs that do
not answer."""

import json
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from common.models.hub import REACH_S
from services.data.hub import is_hub_name
from tests.support.paths import ROOT
from tests.support.processes.hub import data_set, hub

pytestmark = pytest.mark.integration

LOAD = """
import json, sys
from services.data.loaders import CustomDatasetLoader, GSM8KLoader, MATHLoader
from services.data import hub
hub.STALL_S = float(sys.argv[1]) or hub.STALL_S
found = []
for load in sys.argv[2:]:
    try:
        found.append({"lines": [prompt.model_dump_json() for prompt in eval(load)], "error": ""})
    except Exception as error:
        found.append({"lines": [], "error": f"{type(error).__name__}: {error}"})
print(json.dumps(found))
"""
SILENT_S = 2.0


@dataclass
class Loaded:
    """What one loader gave."""

    lines: list[str]
    error: str


HUB = {
    "openai/gsm8k": data_set(
        "main",
        [{"question": f"q{n}", "answer": f"Count.\n#### {n},000"} for n in range(1, 30)],
        [{"question": "held out", "answer": "#### -2"}],
    ),
    "DigitalLearningGmbH/MATH-lighteval": data_set(
        "default",
        [
            {
                "problem": f"p{n}",
                "level": f"Level {n}",
                "type": "Algebra",
                "solution": rf"$\boxed{{\frac{{{n}}}{{7}}}}$",
            }
            for n in range(1, 6)
        ],
        [
            {
                "problem": "held out",
                "level": "Level ?",
                "type": "Algebra",
                "solution": r"$\boxed{1}$",
            }
        ],
    ),
    "someone/chats": data_set(
        "default",
        [
            {
                "messages": [
                    {"role": "user", "content": "1+1?"},
                    {"role": "assistant", "content": "#### 2"},
                ],
                "tests": ["a"],
            },
        ],
        [
            {
                "messages": [
                    {"role": "user", "content": "2+1?"},
                    {"role": "assistant", "content": "#### 3"},
                ],
                "tests": [],
            }
        ],
    ),
}


def run(loads: list[str], endpoint: str, home: Path, stall_s: float = 0) -> list[Loaded]:
    """Loads in a separate process with the hub's address in its environment; with `stall_s` it has
    less patience."""
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("RLHF_", "HF_"))
    }
    env = kept | {"HF_ENDPOINT": endpoint, "HF_HOME": str(home)}
    command = [sys.executable, "-c", LOAD, str(stall_s), *loads]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    return [Loaded(**each) for each in json.loads(done.stdout)]


def test_built_in_data_sets_load_from_the_hub(tmp_path: Path) -> None:
    loads = [
        "GSM8KLoader().load('train', num_samples=2) + GSM8KLoader().load('test')",
        "MATHLoader(levels=['Level 5']).load('train')",
    ]
    with hub(HUB) as url:
        gsm8k, math = run(loads, url, tmp_path)
    assert gsm8k.lines == [
        '{"id":"gsm8k-train-0","prompt":"q1","ground_truth":"1000"}',
        '{"id":"gsm8k-train-1","prompt":"q2","ground_truth":"2000"}',
        '{"id":"gsm8k-test-0","prompt":"held out","ground_truth":"-2"}',
    ], gsm8k.error
    columns = '{"level":5,"subject":"Algebra"}'
    expected = rf'{{"id":"math-train-4","prompt":"p5","ground_truth":"\\frac{{5}}{{7}}","columns":{columns}}}'
    assert math.lines == [expected], math.error


def test_any_data_set_of_the_hub_loads_by_its_name(tmp_path: Path) -> None:
    loader = "CustomDatasetLoader('someone/chats', messages_field='messages').load"
    loads = [
        f"{loader}('train')",
        f"{loader}('validation')",
        "CustomDatasetLoader('someone/absent').load('train')",
    ]
    with hub(HUB) as url:
        train, validation, absent = run(loads, url, tmp_path)
    assert train.lines == [
        '{"id":"chats-train-0","prompt":"1+1?","ground_truth":"2","columns":{"tests":["a"]}}'
    ], train.error
    assert re.search(
        r"^ConfigError: someone/chats cannot be loaded .*split validation.*train", validation.error
    )
    assert absent.error.startswith("ConfigError: someone/absent cannot be loaded")
    assert "RepositoryNotFoundError" in absent.error


@pytest.mark.parametrize("answers", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.slow
def test_a_hub_that_takes_connections_and_is_silent_is_given_up_at_once(
    tmp_path: Path, answers: int
) -> None:
    begin = time.monotonic()
    with hub(HUB, silent_after=answers) as url:
        [loaded] = run(["GSM8KLoader().load('train')"], url, tmp_path, SILENT_S)
    assert "openai/gsm8k cannot be loaded" in loaded.error
    assert "use a copy in files: data.source PATH" in loaded.error
    assert (
        time.monotonic() - begin < REACH_S + 80
    )  # the library alone takes minutes; a busy machine starts a process slowly


@pytest.mark.slow
def test_a_hub_that_falls_silent_while_it_is_read_is_given_up(tmp_path: Path) -> None:
    begin = time.monotonic()
    with hub(HUB, silent_after=4) as url:
        [loaded] = run(["GSM8KLoader().load('train')"], url, tmp_path, SILENT_S)
    assert re.search(r"openai/gsm8k cannot be loaded .*did not answer for 2 s", loaded.error)
    assert time.monotonic() - begin < 80


def test_names_of_the_hub_are_recognised() -> None:
    assert all(map(is_hub_name, ("openai/gsm8k", "a-b/c_d.e", "A/1")))
    assert not any(
        map(is_hub_name, ("gsm8k", "a/b/c", "/a/b", "./a", "a/b.jsonl", "../b", "a/", "", "a b/c"))
    )
