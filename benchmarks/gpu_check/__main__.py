"""Checks on one GPU what needs a GPU to test, in at most nine minutes.

Every section is a process with its own time limit. A section that crashes, hangs or runs out of memory is a failed line
of the table, and the others continue. Nothing is downloaded: weights are random, in the shapes of Qwen2.5, and the
tokenizer is the built-in one. DIR receives `gpu-check.md` (claim, predicted, measured, verdict), `gpu-check.jsonl` with
a line per section, and the sections' output. The exit status is 1 if a claim fails.

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

from benchmarks.gpu_check import harness, report
from benchmarks.gpu_check.harness import Outcome
from benchmarks.gpu_check.sections import SECTIONS, Given, command
from common.cli import CommandParser
from common.config import fail
from common.errors import ConfigError

_MINUTES, _LEAST_S = 9.0, 10
"""The total time, and the seconds that must be left for a section to start."""


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Returns the options."""
    head, *details = (__doc__ or "").split("\n\n")
    parser = CommandParser("benchmarks.gpu_check", head, epilog="\n\n".join(details))
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="directory for the results")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny shapes")
    names = ", ".join(SECTIONS)
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=[*SECTIONS], metavar="NAME", help=f"of {names}")
    parser.add_argument(
        "--minutes",
        type=_minutes,
        default=_MINUTES,
        help="for everything (default 9); a larger value raises all limits",
    )
    parser.add_argument("--model", type=_existing, metavar="DIR", help="a real model, for the section grpo")
    parser.add_argument("--data", type=_existing, metavar="DIR", help="with train.jsonl in GSM8K's form, for the section grpo")
    parser.add_argument(
        "--sglang", type=_existing, metavar="PYTHON", help="a Python with SGLang (default: this one, if it has it)"
    )
    return parser.parse_args(argv)


def _existing(text: str) -> Path:
    path = Path(text)
    if not path.exists():
        raise argparse.ArgumentTypeError(f"{text!r} does not exist")
    return path.absolute()


def _minutes(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not found > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0: give minutes, such as 9")
    return found


def check(options: argparse.Namespace, console: Console) -> bool:
    """Runs the sections, writes the results and returns whether all claims hold.

    Raises ConfigError without a usable GPU.
    """
    if options.device == "cuda":
        from learning.device import choose_device

        choose_device("cuda", "--device", on_cpu="add --device cpu --small to see the check itself run")
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        lines = (options.out / "gpu-check.jsonl").open("w", encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            str(error), field="--out", value=str(options.out), remedy="name a directory that can be written"
        ) from None
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if options.device == "cpu":  # Triton's kernels then run in its interpreter
        os.environ.setdefault("TRITON_INTERPRET", "1")
    start, outcomes = time.perf_counter(), list[Outcome]()
    with lines, tempfile.TemporaryDirectory(prefix="gpu-check-") as scratch:
        for name in options.only:
            left = 60 * options.minutes - (time.perf_counter() - start)
            outcome = _outcome(name, options, left, Path(scratch))
            outcomes.append(outcome)
            print(outcome.line(), file=lines, flush=True)
            failed = [claim for claim in outcome.all_claims if claim.holds is False]
            console.print(f"{name}: {len(outcome.all_claims) - len(failed)} claims, {outcome.seconds:.0f} s", markup=False)
            for claim in failed:
                console.print(f"  fails: {claim.text}: {claim.measured} (predicted {claim.predicted})", markup=False)
    text = report.markdown(outcomes, options.device, options.small, time.perf_counter() - start)
    (options.out / "gpu-check.md").write_text(text, encoding="utf-8")
    console.print(f"the table: {options.out / 'gpu-check.md'}", markup=False)
    return report.holds(outcomes)


def _outcome(name: str, options: argparse.Namespace, left: float, scratch: Path) -> Outcome:
    section = SECTIONS[name]
    if left < _LEAST_S:
        error = f"not run: the {options.minutes:g} minutes were over; --only {name} runs it alone"
        return Outcome(name, section.about, error=error)
    given = Given(options.model, options.data, options.sglang)
    words = command(name, options.device, options.small, scratch, given)
    limit = section.limit_s * max(1.0, options.minutes / _MINUTES)
    return harness.run(name, section.about, words, min(limit, left), options.out)


def main() -> None:
    """Exits with status 1 if a claim fails."""
    options = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no section is left on the GPU
    try:
        sys.exit(0 if check(options, Console(highlight=False, soft_wrap=True)) else 1)
    except ConfigError as error:
        fail(error)


if __name__ == "__main__":
    main()
