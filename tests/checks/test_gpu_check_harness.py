"""The harness of `checks.gpu_check`: every section yields a line, and only a complete line
counts."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from checks.gpu_check import report
from checks.gpu_check.__main__ import check, parse
from checks.gpu_check.harness import Claim, Findings, Outcome, leave, run
from checks.gpu_check.sections import BASE, PARTS, SECTIONS
from tests.support.processes.processes import alive
from tests.support.processes.waits import until

GOOD = {"error": "", "claims": [], "figures": {"x": 1.5}, "tables": {}}
LEAVE = (
    "import sys; from checks.gpu_check.harness import Findings, leave; from pathlib import Path\n"
)


def section(directory: Path, code: str, limit_s: float = 60) -> Outcome:
    return run("case", "what is done", [sys.executable, "-c", code], limit_s, directory)


def leaving(body: str) -> str:
    """Returns the source of a section that makes one claim and then runs `body`."""
    lines = "\n".join(f"    {line}" for line in body.splitlines())
    return f"{LEAVE}def work(found):\n    found.at_most('early', 1.0, 2.0)\n{lines}\nsys.exit(leave(Path(sys.argv[-1]), work))"


@pytest.mark.integration
def test_a_successful_section_yields_its_line(tmp_path: Path) -> None:
    found = section(
        tmp_path,
        leaving("found.figures = {'x': 1.5}\nfound.tables = {'t': [['a'], ['b']]}\nprint('noise')"),
    )
    assert not found.error
    assert found.findings == Findings(
        [Claim("early", "≤ 2", "1", "holds")], {"x": 1.5}, {"t": [["a"], ["b"]]}
    )
    assert (tmp_path / "case.log").read_text() == "noise\n"
    assert Outcome.of_line(found.line()) == found
    assert report.status([found]) == 0


@pytest.mark.integration
@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("pass", "ended without a result"),
        ("import os; os._exit(3)", "ended with status 3"),
        ("import os; os.abort()", "was ended by SIGABRT"),
        ("import ctypes; ctypes.string_at(0)", "was ended by SIGSEGV"),
        (
            "import os; os.kill(os.getpid(), 9)",
            "was ended by SIGKILL (the kernel does that when memory is short)",
        ),
        ("raise ValueError('of the section')", "ValueError: of the section"),
        ('import sys; open(sys.argv[-1], \'w\').write(\'{"error": "", "cla\')', "cannot be read"),
        ("import sys; open(sys.argv[-1], 'w').write('[1]')", "cannot be read"),
        (
            'import sys; open(sys.argv[-1], \'w\').write(\'{"error": "", "claims": [{}]}\')',
            "cannot be read",
        ),
        ("import sys; open(sys.argv[-1], 'wb').write(b'\\xff\\xfe')", "cannot be read"),
        ("import sys; sys.stdout.buffer.write(b'\\xff\\x00'); sys.exit(4)", "ended with status 4"),
    ],
)
def test_an_unsuccessful_section_fails(tmp_path: Path, code: str, reason: str) -> None:
    (tmp_path / "case.json").write_text(json.dumps(GOOD))  # left by an earlier run
    found = section(tmp_path, code)
    assert reason in found.error
    assert found.all_claims[0].verdict == "fails"
    assert report.status([found]) == 1
    assert "**FAILS**" in report.markdown([found])
    json.loads(found.line())


@pytest.mark.integration
@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (
            "raise RuntimeError('CUDA error: an illegal memory access\\nmore')",
            "RuntimeError: CUDA error: an illegal memory access",
        ),
        (
            "import resource\nresource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))\nbytearray(8 << 30)",
            "out of memory",
        ),
        ("sys.exit(5)", "ended with status 5"),
    ],
)
def test_findings_before_an_error_are_kept(tmp_path: Path, body: str, reason: str) -> None:
    found = section(tmp_path, leaving(body))
    assert reason in found.error
    texts = [claim.text for claim in found.all_claims]
    assert texts == ["what is done", *(["early"] if "sys.exit" not in body else [])]


@pytest.mark.integration
@pytest.mark.slow
def test_a_section_that_hangs_is_killed_with_what_it_started(tmp_path: Path) -> None:
    code = (
        "import signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(3600)'])\n"
        f"open({str(tmp_path / 'child')!r}, 'w').write(str(child.pid))\n"
        f"open(sys.argv[-1], 'w').write({json.dumps({**GOOD, 'claims': []})!r})\n"
        "time.sleep(3600)\n"
    )
    found = section(tmp_path, code, limit_s=15)
    assert "still ran after its limit of 15 s" in found.error
    assert found.findings.figures == {"x": 1.5}, (
        "its line was complete, and it is a failure nevertheless"
    )
    _wait_gone(int((tmp_path / "child").read_text()))


@pytest.mark.integration
def test_processes_that_a_section_leaves_behind_are_ended(tmp_path: Path) -> None:
    code = (
        "import subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(3600)'])\n"
        f"open({str(tmp_path / 'child')!r}, 'w').write(str(child.pid))\n"
        f"open(sys.argv[-1], 'w').write({json.dumps({**GOOD, 'claims': []})!r})\n"
    )
    assert not section(tmp_path, code).error
    _wait_gone(int((tmp_path / "child").read_text()))


def _wait_gone(pid: int) -> None:
    until(lambda: not alive(pid), "it ends")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_non_finite_number_fails_its_claim_and_keeps_the_line_valid(
    value: float, tmp_path: Path
) -> None:
    def work(found: Findings) -> None:
        found.at_most("small", abs(value), 1.0)
        found.at_least("large", -abs(value), 1.0)
        found.figures["x"] = [{"y": value}]

    assert leave(tmp_path / "line", work) == 0
    body = json.loads((tmp_path / "line").read_text())
    assert [claim["verdict"] for claim in body["claims"]] == ["fails", "fails"]
    assert body["figures"] == {"x": [{"y": str(value)}]}


def outcomes(norms: Sequence[float]) -> list[Outcome]:
    """Outcomes of the base update, of the one without packing and of the one with LoRA."""
    names = (BASE, "update-packing-off", "update-lora")
    figures: dict[str, Any] = {
        "seconds": 0.5,
        "first_seconds": 9.0,
        "tokens_per_second": 1e4,
        "mfu": 0.25,
        "sharded": False,
    }
    figures |= {"allocated": 3e9, "reserved": 4e9, "estimate": 3.5e9, "rehearsed": None}
    return [
        Outcome(
            name, f"update of {name}", 1.0, findings=Findings(figures=figures | {"grad_norm": norm})
        )
        for name, norm in zip(names, norms, strict=True)
    ]


def test_variants_must_match_the_base_update() -> None:
    assert report.status(outcomes([1.0, 1.01, 7.0])) == 0, "an adapter has another gradient"
    for norm in (1.03, 0.97, float("nan")):
        assert report.status(outcomes([1.0, norm, 7.0])) == 1
    text = report.markdown(outcomes([1.0, 1.5, 7.0]))
    assert (
        "| variants | --trainer.packing off: the same gradient norm as without | 1 ± 2 % | 1.5 | **FAILS** |"
        in text
    )
    assert (
        "| update-packing-off | 0.500 | 1.00 | 9.0 | 10,000 | 25.0% | 3.00 | 4.00 | 3.50 |  | no |"
        in text
    )


def test_what_this_machine_cannot_show_is_neither_right_nor_wrong() -> None:
    found = Outcome("group", "a process group")
    found.findings.not_reached("two GPUs add up", "needs two GPUs")
    text = report.markdown([found])
    assert "| group | two GPUs add up |  | needs two GPUs | not reached |" in text
    assert "Claims: 0 hold, 0 fail, 0 measured, 1 not reached." in text
    assert report.status([found]) == 0


def test_a_section_that_failed_midway_keeps_its_row_in_the_tables() -> None:
    broken = outcomes([1.0, 1.0, 1.0])
    for name in ("allocated", "reserved", "estimate", "rehearsed", "mfu"):
        del broken[1].findings.figures[name]
    broken[1].error, broken[2].findings.figures["seconds"] = (
        "RuntimeError: CUDA error\nlast line | of the log",
        "nan",
    )
    text = report.markdown(broken)
    assert "| update-packing-off | 0.500 | 1.00 | 9.0 | 10,000 |  |  |  |  |  | no |" in text
    assert "| update-lora | nan | nan |" in text
    assert "last line | of the log\n```" in text


def test_without_time_left_no_section_starts(tmp_path: Path) -> None:
    options = parse(
        ["--out", str(tmp_path / "new" / "out"), "--device", "cpu", "--small", "--minutes", "0.01"]
    )
    with (tmp_path / "console").open("w") as file:
        assert check(options, Console(file=file)) == 3
    lines = report.read(options.out)
    assert [line.name for line in lines] == list(SECTIONS)
    assert all("--only" in line.not_reached for line in lines)
    table = (options.out / "gpu-check.md").read_text()
    assert "**FAILS**" not in table
    assert table.count("| not reached |") == len(SECTIONS)


def test_parts_share_a_table_and_a_repeated_section_counts_once(tmp_path: Path) -> None:
    words = ["--out", str(tmp_path), "--device", "cpu", "--small", "--minutes", "0.01"]
    for part in reversed(PARTS):
        check(parse([*words, "--part", str(part)]), Console(quiet=True))
    assert [outcome.name for outcome in report.read(tmp_path)] == list(SECTIONS), (
        "in their own order"
    )
    check(parse([*words, "--only", BASE]), Console(quiet=True))
    assert len(report.read(tmp_path)) == len(SECTIONS)


def test_real_and_tiny_shapes_do_not_mix(tmp_path: Path) -> None:
    report.write(tmp_path, [Outcome("machine", "speed", 1.0, machine="NVIDIA H100", small=False)])
    words = [
        "--out",
        str(tmp_path),
        "--device",
        "cpu",
        "--small",
        "--minutes",
        "0.01",
        "--only",
        "varlen",
    ]
    check(parse(words), Console(quiet=True))
    assert [outcome.name for outcome in report.read(tmp_path)] == ["varlen"]


def test_the_results_of_several_directories_are_one_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, section, seconds in (
        ("one", "varlen", 1.0),
        ("two", "machine", 2.0),
        ("three", "varlen", 3.0),
    ):
        (tmp_path / name).mkdir()
        report.write(tmp_path / name, [Outcome(section, "", seconds, machine=f"GPU {name}")])
    monkeypatch.setattr(
        sys, "argv", ["report", *(str(tmp_path / name) for name in ("one", "two", "three"))]
    )
    report.main()
    text = capsys.readouterr().out
    assert "# GPU check: GPU three, GPU two" in text
    assert text.index("| machine | GPU two | 2.0 |") < text.index("| varlen | GPU three | 3.0 |")


@pytest.mark.parametrize("body", [None, "{", '{"name": "varlen"}'])
def test_a_directory_without_results_is_named(
    tmp_path: Path,
    body: str | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if body is not None:
        (tmp_path / "gpu-check.jsonl").write_text(body)
    monkeypatch.setattr(sys, "argv", ["report", str(tmp_path)])
    with pytest.raises(SystemExit) as ending:
        report.main()
    assert ending.value.code == 2
    assert str(tmp_path) in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--out", "x", "--minutes", "0"], "--minutes"),
        (["--out", "x", "--minutes", "nan"], "--minutes"),
        (["--out", "x", "--only", "kernals"], "kernels"),
        (["--out", "x", "--part", "7"], "--part"),
        (["--out", "x", "--part", "1", "--only", "kernels"], "--only"),
        (["--device", "cpu"], "--out"),
    ],
)
def test_a_wrong_argument_is_named(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ending:
        parse(words)
    assert ending.value.code == 2
    assert said in capsys.readouterr().err
