"""Data sets of the hub: the library's own code with a small hub on this machine, and hubs that do not answer."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from common.hub import REACH_S
from services.data.hub import is_hub_name
from tests.support.hub import data_set, hub
from tests.support.paths import ROOT

pytestmark = pytest.mark.integration

LOAD = """
import sys
from services.data.loaders import CustomDatasetLoader, GSM8KLoader, MATHLoader
from services.data import hub
hub.STALL_S = 2.0
for prompt in {loader}:
    print(prompt.model_dump_json())
"""


HUB = {
    "openai/gsm8k": data_set(
        "main",
        [{"question": f"q{n}", "answer": f"Count.\n#### {n},000"} for n in range(1, 30)],
        [{"question": "held out", "answer": "#### -2"}],
    ),
    "DigitalLearningGmbH/MATH-lighteval": data_set(
        "default",
        [
            {"problem": f"p{n}", "level": f"Level {n}", "type": "Algebra", "solution": rf"$\boxed{{\frac{{{n}}}{{7}}}}$"}
            for n in range(1, 6)
        ],
        [{"problem": "held out", "level": "Level ?", "type": "Algebra", "solution": r"$\boxed{1}$"}],
    ),
    "someone/chats": data_set(
        "default",
        [
            {"messages": [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "#### 2"}], "tests": ["a"]},
        ],
        [{"messages": [{"role": "user", "content": "2+1?"}, {"role": "assistant", "content": "#### 3"}], "tests": []}],
    ),
}


def run(loader: str, endpoint: str, home: Path) -> tuple[list[str], str, float]:
    """Loads in a separate process with the hub's address in its environment; returns (lines, error, seconds)."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("RLHF_", "HF_"))}
    env = kept | {"HF_ENDPOINT": endpoint, "HF_HOME": str(home)}
    begin = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", LOAD.format(loader=loader)], cwd=ROOT, env=env, capture_output=True, text=True, timeout=400
    )
    return done.stdout.splitlines(), done.stderr, time.monotonic() - begin


def test_built_in_data_sets_load_from_the_hub(tmp_path: Path) -> None:
    with hub(HUB) as url:
        lines, error, _ = run("GSM8KLoader().load('train', num_samples=2) + GSM8KLoader().load('test')", url, tmp_path)
        assert lines == [
            '{"id":"gsm8k-train-0","prompt":"q1","ground_truth":"1000"}',
            '{"id":"gsm8k-train-1","prompt":"q2","ground_truth":"2000"}',
            '{"id":"gsm8k-test-0","prompt":"held out","ground_truth":"-2"}',
        ], error
        lines, error, _ = run("MATHLoader(levels=['Level 5']).load('train')", url, tmp_path)
        columns = '{"level":5,"subject":"Algebra"}'
        expected = rf'{{"id":"math-train-4","prompt":"p5","ground_truth":"\\frac{{5}}{{7}}","columns":{columns}}}'
        assert lines == [expected], error


def test_any_data_set_of_the_hub_loads_by_its_name(tmp_path: Path) -> None:
    loader = "CustomDatasetLoader('someone/chats', messages_field='messages').load"
    with hub(HUB) as url:
        lines, error, _ = run(f"{loader}('train')", url, tmp_path)
        assert lines == ['{"id":"chats-train-0","prompt":"1+1?","ground_truth":"2","columns":{"tests":["a"]}}'], error
        _, error, _ = run(f"{loader}('validation')", url, tmp_path)
        assert re.search(r"someone/chats cannot be loaded .*split validation.*train", error)
        _, error, _ = run("CustomDatasetLoader('someone/absent').load('train')", url, tmp_path)
        assert "someone/absent cannot be loaded" in error
        assert "RepositoryNotFoundError" in error


@pytest.mark.parametrize("answers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_hub_that_takes_connections_and_is_silent_is_given_up_at_once(tmp_path: Path, answers: int) -> None:
    with hub(HUB, silent_after=answers) as url:
        _, error, seconds = run("GSM8KLoader().load('train')", url, tmp_path)
    assert "openai/gsm8k cannot be loaded" in error
    assert "use a copy in files: --data.source PATH" in error
    assert seconds < REACH_S + 80  # the library alone takes minutes; a busy machine starts a process slowly


def test_a_hub_that_falls_silent_while_it_is_read_is_given_up(tmp_path: Path) -> None:
    with hub(HUB, silent_after=4) as url:
        _, error, seconds = run("GSM8KLoader().load('train')", url, tmp_path)
    assert re.search(r"openai/gsm8k cannot be loaded .*did not answer for 2 s", error)
    assert seconds < 80


def test_names_of_the_hub_are_recognised() -> None:
    assert all(map(is_hub_name, ("openai/gsm8k", "a-b/c_d.e", "A/1")))
    assert not any(map(is_hub_name, ("gsm8k", "a/b/c", "/a/b", "./a", "a/b.jsonl", "../b", "a/", "", "a b/c")))
