"""Writes the table of claims and its details as Markdown."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from benchmarks.gpu_check.harness import Claim, Outcome
from benchmarks.gpu_check.sections import BASE, VARIANTS

_SAME = 0.02
"""Relative difference in gradient norms that another order of rounding may cause."""


def compared(outcomes: Sequence[Outcome]) -> list[Claim]:
    """Returns the claims that compare sections: every variant must make the same update."""
    figures = {outcome.name: outcome.findings.figures for outcome in outcomes if not outcome.error}
    base = figures.get(BASE)
    found = []
    for name in VARIANTS:
        other = figures.get(f"update-{name}")
        if base and other and name != "lora":
            norms = float(base["grad_norm"]), float(other["grad_norm"])
            text, measured = f"{VARIANTS[name]}: the same gradient norm as without", f"{norms[1]:.5g}"
            found.append(Claim(text, f"{norms[0]:.5g} ± 2 %", measured, abs(norms[1] - norms[0]) <= _SAME * norms[0]))
    return found


def holds(outcomes: Sequence[Outcome]) -> bool:
    """Returns whether all claims hold."""
    claims = [claim for outcome in outcomes for claim in outcome.all_claims] + compared(outcomes)
    return all(claim.holds is not False for claim in claims)


def markdown(outcomes: Sequence[Outcome], device: str, small: bool, seconds: float) -> str:
    """Returns the report."""
    claims = [(outcome.name, claim) for outcome in outcomes for claim in outcome.all_claims]
    claims += [("variants", claim) for claim in compared(outcomes)]
    failed = sum(claim.holds is False for _, claim in claims)
    held = sum(claim.holds is True for _, claim in claims)
    machine = next(
        (row[1] for outcome in outcomes for row in outcome.findings.tables.get("Versions", []) if row[0] == "GPU"), ""
    )
    name = machine.partition(",")[0] or f"no GPU ({device})"
    options = " --device cpu" * (device == "cpu") + " --small" * small
    parts = [
        f"# GPU check: {name} ({datetime.now(UTC):%-d %B %Y})",
        f"`python -m benchmarks.gpu_check --out DIR{options}`: {len(outcomes)} sections in {seconds:.0f} s. "
        f"{held} claims hold, {failed} fail.",
    ]
    if small:
        parts.append("**Tiny shapes**: they show that the code runs, and say nothing about speed.")
    rows = [["section", "claim", "predicted", "measured", "verdict"]]
    rows += [[name, claim.text, claim.predicted, claim.measured, claim.verdict] for name, claim in claims]
    parts += ["## Claims", _table(rows)]
    if updates := [outcome for outcome in outcomes if "tokens_per_second" in outcome.findings.figures]:
        parts += ["## Updates", _updates(updates)]
    for outcome in outcomes:
        for title, table in outcome.findings.tables.items():
            parts += [f"## {title}", _table(table)]
    if broken := [outcome for outcome in outcomes if outcome.error]:
        parts += ["## Sections that failed", *(f"{outcome.name}:\n\n```\n{outcome.error}\n```" for outcome in broken)]
    times = [["section", "seconds"], *([outcome.name, f"{outcome.seconds:.1f}"] for outcome in outcomes)]
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
        found, about = outcome.findings.figures, outcome.about.removeprefix("update of ")
        variant = base is not None and outcome.name.partition("update-")[2] in VARIANTS
        beside = float(found["seconds"]) / float(base["seconds"]) if base is not None and variant else None
        sizes = (found.get(name) for name in ("allocated", "reserved", "estimate", "rehearsed"))
        rows.append(
            [
                *(about, _number(found["seconds"], ".3f"), _number(beside, ".2f"), _number(found["first_seconds"], ".1f")),
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
