"""Injects faults that users of RL systems report, and measures whether the cause is named.

`python -m checks.faults [NAMES…] --seed 0 --json FILE` runs every fault, or those whose name or
subject is given, each in a process of its own on the built-in task. A fault is named when a line of
the run's output contains the words of its cause, which were chosen beforehand (`Fault.words`). The
exit status is 1 if one was not. `--list` prints the faults and who reported them.
"""

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.command import command_parser, figures_table
from checks.faults import lab as labs
from checks.faults.child import run_child
from checks.faults.evidence import Evidence, read_evidence
from checks.faults.fault import FAULTS, Fault
from checks.faults.judge import Judgement, Line, judge
from checks.faults.trl_side import SIDES
from common.process.cli import run
from common.process.imports import heavy_imports

_LIMIT_S = 330.0
"""Longest time of one fault, with the start of its run."""


@dataclass(frozen=True)
class Result:
    """One fault, measured."""

    fault: Fault
    judgement: Judgement
    evidence: Evidence
    seconds: float
    status: int | None

    @property
    def is_right(self) -> bool:
        return self.judgement.is_right and not (self.evidence.falsified or self.evidence.lost)

    def as_json(self) -> dict[str, Any]:
        fault = self.fault
        return {
            "name": fault.name,
            "subject": fault.subject,
            "cause": fault.cause,
            "reported": fault.reported,
            "timeout": fault.timeout,
            "timeout_s": fault.timeout_s,
            "in_steps": fault.in_steps,
            **asdict(self.judgement),
            **asdict(self.evidence),
            "status": self.status,
            "seconds": self.seconds,
        }


def inject(
    fault: Fault, seed: int, directory: Path, model: Path, trl: Path | None = None
) -> Result:
    """Runs one fault in `directory`, which is made, and measures it; with `trl`, the Python that
    has it, in a script of TRL.
    """
    directory.mkdir(parents=True)
    output = directory / "output.txt"

    def work() -> int:
        if trl is not None:
            words = [str(trl), "-m", "checks.faults.trl_side", fault.name, str(seed)]
            return subprocess.run([*words, str(directory), str(model)], check=False).returncode
        lab = labs.Lab(fault.name, seed, directory, model)
        return labs.run(fault.run, lab)

    struck = directory / labs.STRUCK

    def seen(line: str) -> str:
        # The names of our own files and functions explain nothing.
        return line.replace(str(directory), "DIRECTORY").replace(f"_{fault.name}", "_run")

    def is_named(line: str) -> bool:
        return struck.exists() and fault.is_named_by(seen(line))

    outcome = run_child(work, output, _LIMIT_S, is_named)
    at = float(struck.read_text()) if struck.exists() else outcome.began
    lines = [Line(line.at, seen(line.text)) for line in outcome.lines]
    judgement = judge(fault, lines, at, ended_well=outcome.status == 0)
    if not struck.exists():
        judgement = replace(judgement, verdict="not injected", named_s=None)
    return Result(
        fault=fault,
        judgement=judgement,
        evidence=read_evidence(_run_dir(directory), output.read_text(), fault.oracle),
        seconds=outcome.seconds,
        status=outcome.status,
    )


def _run_dir(directory: Path) -> Path:
    """Returns the directory of the run of a fault, which a job group has in its own folder."""
    own = directory / "group" / "run"
    return own if own.exists() else directory / "run"


def chosen(names: Sequence[str]) -> list[Fault]:
    """Returns the faults of these names or subjects; all without names."""
    found = [
        fault
        for fault in FAULTS.values()
        if not names or fault.name in names or fault.subject in names
    ]
    known = {name for fault in found for name in (fault.name, fault.subject)}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise SystemExit(f"there is no fault or subject {', '.join(unknown)}: see --list")
    return found


def show(results: Sequence[Result], console: Console) -> None:
    """Prints the table and the counts."""
    table = figures_table(
        "faults",
        ("fault", "verdict", "detected s", "named s", "steps", "before", "falsified", "lost"),
    )
    for result in results:
        seen = result.judgement
        table.add_row(
            result.fault.name,
            seen.verdict,
            _seconds(seen.detected_s),
            _seconds(seen.named_s),
            "–" if seen.steps is None else str(seen.steps),
            str(len(seen.before)),
            str(result.evidence.falsified),
            str(result.evidence.lost),
        )
    console.print(table)
    named = sum(result.judgement.is_right for result in results)
    falsified = sum(result.evidence.falsified for result in results)
    lost = sum(result.evidence.lost for result in results)
    checked = sum(result.evidence.checked for result in results)
    console.print(
        f"{named} of {len(results)} right; {falsified} of {checked} rewards falsified; "
        f"{lost} prompts lost"
    )


def _seconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}"


def main() -> None:
    """Runs the command line."""
    parser = command_parser("checks.faults", __doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="faults or subjects; all if none")
    parser.add_argument("--seed", type=int, default=0, help="of the moment and the place")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures here")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the runs here")
    parser.add_argument(
        "--trl",
        type=Path,
        metavar="PYTHON",
        help="inject those that it can have into a script of TRL instead, with this Python",
    )
    parser.add_argument("--list", action="store_true", help="print the faults and end")
    parser.add_argument("--base-model", type=Path, default=labs.ROOT / ".cache" / "tiny-base")
    options = parser.parse_args()
    console = Console(width=150, highlight=False)

    with heavy_imports():
        load_subjects()
    faults = chosen(options.names)
    if options.trl:
        faults = [fault for fault in faults if fault.name in SIDES]
    if options.list:
        for fault in faults:
            console.print(f"{fault.name}: {fault.cause} ({fault.reported})", markup=False)
        return

    place = Path(tempfile.mkdtemp(prefix="faults-", dir=options.keep))
    results: list[Result] = []
    for fault in faults:
        directory = place / f"{len(results):03}"
        model = options.base_model.resolve()
        result = inject(fault, options.seed, directory, model=model, trl=options.trl)
        results.append(result)
        seen = result.judgement
        took = f"{result.seconds:.0f} s"
        console.print(
            f"{fault.name}: {seen.verdict} after {_seconds(seen.named_s)} s ({took}): "
            f"{seen.line[:300]}",
            markup=False,
            soft_wrap=True,
        )
        if options.json:
            contents = [each.as_json() for each in results]
            options.json.write_text(json.dumps(contents, indent=1, ensure_ascii=False) + "\n")
    show(results, console)
    if options.keep is None:
        shutil.rmtree(place)
    sys.exit(int(not all(result.is_right for result in results)))


def load_subjects() -> None:
    """Imports all faults, and what their processes would import again."""
    import torch
    import transformers.models.qwen2.modeling_qwen2

    from checks.faults import (
        data,
        engine,
        episodes,
        processes,
        rewards,
        runs,
        sampling,
        scripts,
        settings,
        updates,
    )

    torch.set_num_threads(1)
    _ = (
        data,
        engine,
        episodes,
        processes,
        settings,
        rewards,
        runs,
        sampling,
        scripts,
        updates,
        transformers,
    )


if __name__ == "__main__":
    run(main, "")
