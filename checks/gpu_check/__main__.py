"""Checks on one GPU what needs a GPU to test, in parts of at most eight minutes.

Every section is a process with its own time limit. A section that crashes, hangs or runs out of
memory is a failed line of the table, and the others continue. A section for which no time is left
is `not reached`, and so is a claim that needs
what this machine does not have. Nothing is downloaded: weights are random, in the shapes of
Qwen2.5, and the tokenizer is the built-in one.

DIR receives `gpu-check.md` (claim, predicted, measured, verdict), `gpu-check.jsonl` with a line per
section, and the sections' output. Parts that write to the same DIR share one table; `python -m
checks.gpu_check.report DIR DIR` joins those of several. The exit status is 1 if a claim fails,
and 3 if none fails but the time ended first.

`--device cpu --small` runs the same code on tiny shapes, to show that the check itself works.
"""

import argparse
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console

from checks.gpu_check import harness, report
from checks.gpu_check.harness import Outcome
from checks.gpu_check.sections import PARTS, SECTIONS, Given, command
from common.errors import ConfigError
from common.process.cli import CommandParser, fail

_MINUTES = 8.0
"""The time of a part."""
_LEAST_S = 10
"""The seconds that must be left for a section to start."""


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Returns the options."""
    head, *details = (__doc__ or "").split("\n\n")
    parser = CommandParser("rlhf gpu-check", head, epilog="\n\n".join(details))
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="directory for the results"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny shapes")
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--part", type=int, choices=PARTS, help="only the sections of one part (default: all parts)"
    )
    names = ", ".join(SECTIONS)
    which.add_argument("--only", nargs="+", choices=SECTIONS, metavar="NAME", help=f"of {names}")
    parser.add_argument(
        "--minutes",
        type=_minutes,
        help="for this call (default 8 for a part or for --only); a larger value raises all limits",
    )
    parser.add_argument(
        "--model", type=_existing, metavar="DIR", help="a real model, for the section grpo"
    )
    parser.add_argument(
        "--data",
        type=_existing,
        metavar="DIR",
        help="with train.jsonl in GSM8K's form, for the section grpo",
    )
    parser.add_argument(
        "--sglang",
        type=_existing,
        metavar="PYTHON",
        help="a Python with SGLang (default: this one, if it has it)",
    )
    options = parser.parse_args(argv)
    usual = _MINUTES
    if options.part:
        options.only = list(PARTS[options.part])
    elif not options.only:
        options.only = list(SECTIONS)
        usual = _MINUTES * len(PARTS)
    options.minutes = options.minutes or usual
    options.longer = max(1.0, options.minutes / usual)
    return options


def _existing(text: str) -> Path:
    path = Path(text)
    if not path.exists():
        raise ConfigError(f"{text!r} does not exist", remedy="name one that does")
    return path.absolute()


def _minutes(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not found > 0:
        raise ConfigError(f"{text!r} is not a number above 0", remedy="give minutes, such as 8")
    return found


def check(options: argparse.Namespace, console: Console) -> int:
    """Runs the sections, writes the results and returns the exit status: that of the table.

    Raises ConfigError without a usable GPU, or where DIR cannot be written.
    """
    machine = _machine(options.device)
    earlier = [
        each
        for each in _earlier(options.out)
        if each.name not in options.only and each.small == options.small
    ]
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if options.device == "cpu":  # Triton's kernels then run in its interpreter
        os.environ.setdefault("TRITON_INTERPRET", "1")
    start = time.perf_counter()
    outcomes = list[Outcome]()
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as scratch:
        for name in options.only:
            left = 60 * options.minutes - (time.perf_counter() - start)
            outcome = _outcome(name, options, left, Path(scratch))
            outcome.machine = machine
            outcome.small = options.small
            outcomes.append(outcome)
            report.write(options.out, [*earlier, *outcomes])  # after each: a call may be cut off
            _print(outcome, console)
    console.print(f"the table: {options.out / report.TABLE}", markup=False)
    return report.status([*earlier, *outcomes])


def _machine(device: str) -> str:
    """Returns the name of the GPU, or `cpu`."""
    if device == "cpu":
        return device

    import torch

    from learning.device import choose_device

    chosen = choose_device(
        "cuda", "--device", on_cpu="add --device cpu --small to see the check itself run"
    )
    return str(torch.cuda.get_device_name(chosen))


def _earlier(directory: Path) -> list[Outcome]:
    """Creates DIR and returns the results that it has from earlier calls."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        return report.read(directory)
    except OSError as error:
        remedy = "name a directory that can be written"
        raise ConfigError(str(error), field="--out", value=str(directory), remedy=remedy) from None


def _outcome(name: str, options: argparse.Namespace, left: float, scratch: Path) -> Outcome:
    section = SECTIONS[name]
    if left < _LEAST_S:
        why = f"the {options.minutes:g} minutes were over; --only {name} runs it alone"
        return Outcome(name, section.about, not_reached=why)
    given = Given(options.model, options.data, options.sglang)
    words = command(name, options.device, options.small, scratch, given)
    return harness.run(
        name, section.about, words, min(options.longer * section.limit_s, left), options.out
    )


def _print(outcome: Outcome, console: Console) -> None:
    claims = outcome.all_claims
    counts = report.counted(claims)
    console.print(f"{outcome.name}: {counts}, {outcome.seconds:.0f} s", markup=False)
    for claim in claims:
        if claim.verdict == "fails":
            said = f"  fails: {claim.text}: {claim.measured} (predicted {claim.predicted})"
            console.print(said, markup=False)


def main() -> None:
    """Exits with the status of `check`, or 2 where it cannot run."""
    options = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no section is left on the GPU
    try:
        sys.exit(check(options, Console(highlight=False, soft_wrap=True)))
    except ConfigError as error:
        fail(error)


if __name__ == "__main__":
    main()
