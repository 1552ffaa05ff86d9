"""What a person reads about a run: one line per step, alarms and hints once, and the same as
JSON."""

import io
import json
import logging
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from common.process.logs import setup_logging
from common.settings.config import Config, from_mapping
from tests.support.batches.groups import make_group
from trainer.api.callbacks import Callbacks
from trainer.api.settings import TrainerConfig
from trainer.observe.catalogue import Said
from trainer.observe.run_dir import DETAILS, Recorder, read_lines, step_line, tell
from trainer.timing import STAGES, WAITING

GROUP = make_group(np.random.default_rng(0), [1.0, 0.0])
SECONDS = dict.fromkeys((*STAGES, WAITING), 0.0) | {
    "update": 35.2,
    "publish": 4.9,
    "generation": 80.1,
}
STEP: dict[str, Any] = {
    "step": 12,
    "reward": 0.5124,
    "accuracy": 0.5,
    "zero_variance_groups": 0,
    "solved_groups": 0,
    "failed_groups": 0,
    "reused_groups": 0,
    "staleness": 0.0,
    "completion_tokens": 123.4,
    "truncated": 0.0,
    "unparsable": 0.0,
    "dropped": {},
    "seconds": SECONDS | {"generation": 0.251, "update": 0.2, "publish": 0.1},
    "generating": 0.5,
    "in_flight": 48.0,
    "coordinator": 0.25,
    "cpu_seconds": 1.0,
    "update": {
        "kl_reference": 0.0,
        "ratio": 1.0,
        "clip_fraction": 0.0,
        "entropy": 0.5,
        "skipped": 0,
        "delta_logprob": 0.0,
    },
    "critic": None,
    "alarms": {},
    "lost_episodes": {},
    "refused_calls": 0,
}


def test_a_step_is_one_line_that_fits() -> None:
    line = step_line(STEP, 1000)
    assert (
        line == "step   12/1000  reward 0.512  acc 0.500  tokens 123  0.55 s (gen 0.25, train 0.30)"
    )
    busy = STEP | {
        "step": 1000,
        "reward": -0.5,
        "completion_tokens": 4096,
        "truncated": 0.25,
        "staleness": 1.5,
        "seconds": SECONDS,
    }
    line = step_line(busy | {"dropped": {"stale": 120, "reward": 3}}, 1000)
    assert line.endswith(
        "tokens 4096  120 s (gen 80.1, train 40.1)  cut 25%  stale 1.5  dropped 123"
    )
    assert len(line) <= 120
    episodes = STEP | {"lost_episodes": {"timeout": 2, "died": 1}, "refused_calls": 37}
    assert step_line(episodes, 1000).endswith("train 0.30)  lost 3  refused 37")


def run(recorder: Recorder, steps: int, truncated: float) -> None:
    """Records steps 1 to `steps`, each with too many truncated completions and an alarm."""
    with recorder.progress(0, steps):
        for step in range(1, steps + 1):
            alarms = {"kl_rollout": Said("too far")}
            record = {"step": step, "truncated": truncated, "accuracy": 0.2, "alarms": alarms}
            recorder.step(STEP | record, GROUP)


def test_hints_and_alarms_are_reported_when_they_begin_and_repeated_later(tmp_path: Path) -> None:
    said = io.StringIO()
    recorder = Recorder(tmp_path, Config(), Console(file=said, width=120))
    run(recorder, 35, 0.5)
    lines = said.getvalue().splitlines()
    steps, after = 0, dict[str, list[int]]()
    for line in lines:
        kind = line.split(maxsplit=1)[0]
        steps += kind == "step"
        if kind != "step":
            after.setdefault(kind, []).append(steps)
    assert after == {"alarm:": [1, 21], "hint:": [10, 30]}
    assert "hint: 50% of the completions are cut at sampling.max_new_tokens" in said.getvalue()
    written = read_lines(tmp_path / "metrics.jsonl")
    assert [sorted(line["hints"]) for line in written] == [[]] * 9 + [["truncated"]] * 26

    resumed = Recorder(
        tmp_path, Config(), Console(file=said), step=30
    )  # it has read the earlier steps
    resumed.step(STEP | {"step": 31, "truncated": 0.5, "accuracy": 0.2}, GROUP)
    assert list(read_lines(tmp_path / "metrics.jsonl")[-1]["hints"]) == ["truncated"]


def test_a_sample_has_no_details_of_its_sampling(tmp_path: Path) -> None:
    """The experts of a mixture are hundreds of numbers for every token."""
    group = make_group(np.random.default_rng(0), [1.0, 0.0])
    for completion in group.completions:
        completion.routed_experts = np.ones(400, np.uint8)
    Recorder(tmp_path, Config(), Console(file=io.StringIO())).step(STEP | {"step": 1}, group)
    (line,) = read_lines(tmp_path / "samples.jsonl")
    assert line["completions"][0]["token_ids"] == group.completions[0].token_ids.tolist()
    assert not DETAILS & (line.keys() | line["completions"][0].keys())


def test_a_resumed_run_says_which_settings_have_changed(tmp_path: Path) -> None:
    first = {
        "optimizer.learning_rate": 5e-4,
        "algorithm.kl_coef": 0.1,
        "reward.functions": [{"name": "math", "weight": -1.0}],
        "trainer.run_dir": tmp_path / "elsewhere",
    }
    said = io.StringIO()
    console = Console(file=said, width=120)
    Recorder(tmp_path, from_mapping(first), console)
    Recorder(tmp_path, from_mapping(first | {"trainer.run_dir": tmp_path}), console, step=3)
    assert "changed" not in said.getvalue()

    second = {"optimizer.learning_rate": 1e-6, "algorithm.kl_coef": 0.0}
    Recorder(
        tmp_path,
        from_mapping(second),
        console,
        step=3,
        in_user_names=Callbacks(TrainerConfig(), tmp_path).in_user_names,
    )
    line = next(line for line in said.getvalue().splitlines() if "changed" in line)
    assert "learning_rate 0.0005 → 1e-06" in line
    assert "kl_coef 0.1 → 0.0" in line
    assert "reward.functions [{'name': 'math', 'weight': -1.0}] → ['math']" in line
    assert "dir" not in line

    Recorder(tmp_path, from_mapping(first), console)  # a new run, which replaces the old one
    assert said.getvalue().count("changed") == 1


def test_a_hint_appears_once_and_in_the_words_of_the_python_api(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A script with handlers of its own would show every line twice."""
    said = io.StringIO()
    in_user_names = Callbacks(TrainerConfig(), tmp_path).in_user_names
    recorder = Recorder(
        tmp_path, Config(), Console(file=said, width=120), in_user_names=in_user_names
    )
    run(recorder, 12, 0.5)
    assert said.getvalue().count("hint: 50% of the completions are cut at") == 1
    assert "sampling.max_new_tokens is max_new_tokens here" in " ".join(said.getvalue().split())
    assert caplog.messages == []


@pytest.fixture
def own_logging(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Switches logs to JSON and restores the logging setup after the test."""
    monkeypatch.setenv("LOG_FORMAT", "json")
    root, hooks = logging.getLogger(), (sys.excepthook, threading.excepthook)
    before, level = root.handlers[:], root.level
    yield
    for handler in root.handlers:
        if handler not in before:
            handler.close()
    root.handlers[:] = before
    sys.excepthook, threading.excepthook = hooks
    root.setLevel(level)
    logging.captureWarnings(False)


def test_with_json_the_lines_of_the_console_go_to_the_log(
    own_logging: None, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    setup_logging("ppo-trainer-rank0", tmp_path, service="ppo-trainer", rank=0)
    json_log = tmp_path / "ppo-trainer-rank0.log"
    said = io.StringIO()
    recorder = Recorder(
        tmp_path / "run", Config(), Console(file=said, width=120, force_terminal=True)
    )
    run(recorder, 12, 0.5)
    recorder.report(tmp_path / "checkpoint")
    assert said.getvalue() == ""  # no progress bar either
    assert json_log.read_text() == capfd.readouterr().err
    lines: list[dict[str, Any]] = [json.loads(line) for line in json_log.read_text().splitlines()]
    told = [(line["level"], line["message"]) for line in lines]
    assert [text[:12] for level, text in told if level == "INFO"][:12] == [
        f"step {step:>4}/12" for step in range(1, 13)
    ]
    assert [text[:6] for level, text in told if level == "WARNING"] == ["alarm:", "hint: "]
    assert any(
        "seconds of a step" in text and "\n" in text and "\x1b" not in text for _, text in told
    )
    assert all((line["service"], line["rank"]) == ("ppo-trainer", 0) for line in lines)


def test_progress_bars_appear_only_on_terminals(tmp_path: Path) -> None:
    for name, terminal in (("pipe", False), ("terminal", True)):
        said = io.StringIO()
        run(
            Recorder(
                tmp_path / name, Config(), Console(file=said, width=120, force_terminal=terminal)
            ),
            2,
            0.0,
        )
        assert ("training" in said.getvalue()) == terminal
        assert ("\x1b" in said.getvalue()) == terminal


def test_an_import_path_is_not_read_as_an_emoji() -> None:
    said = io.StringIO()
    tell(Console(file=said, width=120), "the tracker module:Fire: it burns")
    assert said.getvalue() == "the tracker module:Fire: it burns\n"
