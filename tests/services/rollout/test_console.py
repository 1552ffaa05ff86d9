"""Complaints of a child process that repeat are shown a few times; everything else always is."""

import sys
from pathlib import Path

import pytest

from common.process.child import Child, ChildOutput
from services.rollout.console import Console, Repeats

LOST = "ERROR smg::router: request failed worker_url=http://127.0.2.2:30001 error=attempt {}"
OTHER = "ERROR smg::response: request failed with server error"


def _shown(lines: list[str], seconds: float = 0.01) -> list[str]:
    repeats = Repeats("router.log")
    found = [repeats.shown(line, number * seconds) for number, line in enumerate(lines)]
    return [line for line in found if line is not None]


def test_a_complaint_that_repeats_is_shown_three_times_and_says_where_the_others_are() -> None:
    lines = [LOST.format(number) for number in range(50)]
    assert _shown(lines) == [
        *lines[:2],
        f"{lines[2]} (more like this within 10 s are only in router.log)",
    ]


def test_another_complaint_in_between_is_shown() -> None:
    lines = [LOST.format(number) for number in range(50)]
    assert OTHER in _shown([*lines, OTHER])


def test_it_is_shown_again_after_a_while() -> None:
    lines = [LOST.format(number) for number in range(60)]
    assert len(_shown(lines, seconds=0.5)) == 9


@pytest.mark.parametrize(
    "line",
    [
        "Decode batch. #running-req: 5, gen throughput (token/s): 310.22",
        '  File "/usr/lib/python3.11/site-packages/torch/nn/module.py", line 1775, in _call_impl',
        '{"level": "ERROR", "message": "request failed"}',
        "",
    ],
)
def test_lines_that_are_no_complaints_and_lines_for_programs_are_always_shown(line: str) -> None:
    assert _shown([line] * 50) == [line] * 50


@pytest.mark.integration
async def test_the_log_file_has_what_is_not_shown(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "router.log"
    code = "for number in range(50): print(f'\\x1b[31mERROR\\x1b[0m attempt {number}')"
    output = ChildOutput(log, Console("router", log).show, on_loss=print)
    child = await Child.start([sys.executable, "-c", code], output, env={})
    await child.wait()
    await child.end()
    shown = capfd.readouterr().err.splitlines()
    assert shown[:2] == ["router | ERROR attempt 0", "router | ERROR attempt 1"]
    assert len(shown) == 3
    assert len(log.read_text().splitlines()) == 50
