"""Writes the table of claims and its details as Markdown; `python -m checks.gpu_check.report
DIR [DIR …]` prints it.

With several directories, the last one that has a section counts for it.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from checks.gpu_check.harness import Claim, Outcome
from checks.gpu_check.sections import BASE, SECTIONS, VARIANTS

TABLE = "gpu-check.md"
_LINES = "gpu-check.jsonl"
_SAME = 0.02
"""Relative difference in gradient norms that another order of rounding may cause."""


def read(directory: Path) -> list[Outcome]:
    """Returns the results in a directory; none where there are none. Raises OSError and
    ValueError.
    """
    path = directory / _LINES
    if not path.exists():
        return []
    return [Outcome.of_line(line) for line in path.read_text(encoding="utf-8").splitlines()]


def write(directory: Path, outcomes: Sequence[Outcome]) -> None:
    """Writes the lines and the table, in the order of the sections."""
    names = list(SECTIONS)
    ordered = sorted(outcomes, key=lambda outcome: names.index(outcome.name))
    lines = "".join(f"{outcome.line()}\n" for outcome in ordered)
    (directory / _LINES).write_text(lines, encoding="utf-8")
    (directory / TABLE).write_text(markdown(ordered), encoding="utf-8")


def compared(outcomes: Sequence[Outcome]) -> list[Claim]:
    """Returns the claims that compare sections: every variant must make the same update."""
    figures = {outcome.name: outcome.findings.figures for outcome in outcomes if not outcome.error}
    base = figures.get(BASE)
    found = []
    for name in VARIANTS:
        other = figures.get(f"update-{name}")
        if base and other and name != "lora":
            wanted = float(base["grad_norm"])
            measured = float(other["grad_norm"])
            same = abs(measured - wanted) <= _SAME * wanted
            text = f"{VARIANTS[name]}: the same gradient norm as without"
            found.append(
                Claim(text, f"{wanted:.5g} ± 2 %", f"{measured:.5g}", "holds" if same else "fails")
            )
    return found


def status(outcomes: Sequence[Outcome]) -> int:
    """Returns 1 if a claim fails, else 3 if a section never started, else 0."""
    claims = [claim for outcome in outcomes for claim in outcome.all_claims] + compared(outcomes)
    if any(claim.verdict == "fails" for claim in claims):
        return 1
    return 3 if any(outcome.not_reached for outcome in outcomes) else 0


def counted(claims: Sequence[Claim]) -> str:
    """Returns how many claims have each verdict, such as `3 hold, 0 fail, 1 measured, 0 not
    reached`.
    """
    found = Counter(claim.verdict for claim in claims)
    return (
        f"{found['holds']} hold, {found['fails']} fail, "
        f"{found['measured']} measured, {found['not reached']} not reached"
    )


def markdown(outcomes: Sequence[Outcome]) -> str:
    """Returns the report."""
    claims = [(outcome.name, claim) for outcome in outcomes for claim in outcome.all_claims]
    claims += [("variants", claim) for claim in compared(outcomes)]
    machines = sorted({outcome.machine for outcome in outcomes})
    small = any(outcome.small for outcome in outcomes)
    seconds = sum(outcome.seconds for outcome in outcomes)
    verdicts = counted([claim for _, claim in claims])
    parts = [
        f"# GPU check: {', '.join(machines)} ({datetime.now(UTC):%-d %B %Y})",
        f"{len(outcomes)} sections of `rlhf gpu-check` in {seconds:.0f} s. Claims: {verdicts}.",
    ]
    if small:
        parts.append("**Tiny shapes**: they show that the code runs, and say nothing about speed.")
    rows = [["section", "claim", "predicted", "measured", "verdict"]]
    for name, claim in claims:
        verdict = "**FAILS**" if claim.verdict == "fails" else claim.verdict
        rows.append([name, claim.text, claim.predicted, claim.measured, verdict])
    parts += ["## Claims", _table(rows)]
    updates = [each for each in outcomes if "tokens_per_second" in each.findings.figures]
    if updates:
        parts += ["## Updates", _updates(updates)]
    for outcome in outcomes:
        for title, table in outcome.findings.tables.items():
            parts += [f"## {title}", _table(table)]
    broken = [outcome for outcome in outcomes if outcome.error]
    if broken:
        parts += [
            "## Sections that failed",
            *(f"{outcome.name}:\n\n```\n{outcome.error}\n```" for outcome in broken),
        ]
    times = [["section", "machine", "seconds"]]
    times += [[outcome.name, outcome.machine, f"{outcome.seconds:.1f}"] for outcome in outcomes]
    return "\n\n".join([*parts, "## Time of the sections", _table(times)]) + "\n"


def _updates(outcomes: Sequence[Outcome]) -> str:
    base = next((outcome.findings.figures for outcome in outcomes if outcome.name == BASE), None)
    head = [
        "update",
        "s",
        "of the base",
        "first s",
        "tokens/s",
        "MFU",
        "allocated GB",
        "reserved",
        "estimated",
        "rehearsed",
        "sharded",
    ]
    rows = [head]
    for outcome in outcomes:
        found = outcome.findings.figures
        about = outcome.about.removeprefix("update of ")
        variant = base is not None and outcome.name.partition("update-")[2] in VARIANTS
        beside = (
            float(found["seconds"]) / float(base["seconds"])
            if base is not None and variant
            else None
        )
        sizes = (found.get(name) for name in ("allocated", "reserved", "estimate", "rehearsed"))
        rows.append(
            [
                *(
                    about,
                    _number(found["seconds"], ".3f"),
                    _number(beside, ".2f"),
                    _number(found["first_seconds"], ".1f"),
                ),
                *(_number(found["tokens_per_second"], ",.0f"), _number(found.get("mfu"), ".1%")),
                *(_number(size / 1e9 if size else None, ".2f") for size in sizes),
                "yes" if found["sharded"] else "no",
            ]
        )
    return _table(rows)


def _number(value: Any, form: str) -> str:
    """Formats a figure; a missing one, such as a failed section's, is empty."""
    return "" if value is None else f"{float(value):{form}}"


def _table(rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(_cell(cell) for cell in row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


def _cell(text: str) -> str:
    first, *more = text.splitlines() or [""]
    return first.replace("|", "\\|") + (" …" if more else "")


def main() -> None:
    """Prints one table from the results in several directories."""
    parser = argparse.ArgumentParser(
        prog="python -m checks.gpu_check.report", description=(__doc__ or "")
    )
    parser.add_argument(
        "directories", type=Path, nargs="+", metavar="DIR", help="an --out of checks.gpu_check"
    )
    found = dict[str, Outcome]()
    for directory in parser.parse_args().directories:
        try:
            results = read(directory)
        except (OSError, ValueError, KeyError, TypeError) as error:
            parser.error(f"{directory / _LINES} cannot be read: {error}")
        if not results:
            parser.error(f"{directory} has no {_LINES}: name an --out of checks.gpu_check")
        found |= {outcome.name: outcome for outcome in results}
    ordered = [found[name] for name in SECTIONS if name in found]
    sys.stdout.write(markdown(ordered))


if __name__ == "__main__":
    main()
