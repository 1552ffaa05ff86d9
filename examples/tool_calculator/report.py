"""`python -m examples.tool_calculator.report DIRECTORY`: prints what a run of `make demo-agent`
learnt, in one table.

Reads the run in DIRECTORY/run and the answers without the tool in DIRECTORY/alone.json, which
`trainer.evaluate_model` writes.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from rich.table import Column, Table

from trainer.evaluation.uncertainty import accuracy_text
from trainer.observe.run_dir import console, read_lines


def main(directory: Path) -> None:
    """Prints the table."""
    evaluations = read_lines(directory / "run" / "evaluations.jsonl")
    steps = read_lines(directory / "run" / "metrics.jsonl")
    before = evaluations[0]
    after = evaluations[-1]
    alone = json.loads((directory / "alone.json").read_text(encoding="utf-8"))

    title = f"{after['num_samples']} held-out problems such as {after['answers'][0]['prompt']}"
    table = Table(
        "accuracy", Column("before", justify="right"), Column("after", justify="right"), title=title
    )
    table.add_row("with the tool", _with_error(before), _with_error(after))
    table.add_row(
        "without it, greedy", f"{alone['compare']['accuracy']:.3f}", f"{alone['accuracy']:.3f}"
    )
    screen = console()
    screen.print(table)

    gain = after["accuracy"] - before["accuracy"]
    error = (before["standard_error"] ** 2 + after["standard_error"] ** 2) ** 0.5
    tokens = [step["update"]["trained_tokens"] for step in steps]
    differences = [step["update"]["delta_logprob_current"] for step in steps]
    weighted = [difference * count for difference, count in zip(differences, tokens, strict=True)]
    mean = sum(weighted) / max(1, sum(tokens))
    gained = (
        f"gain: {gain:+.3f}, {gain / error:.0f} standard errors, in {len(steps)} steps on "
        f"{sum(tokens):,} sampled tokens"
    )
    differed = (
        "mean |Δ log-probability| of the sampled tokens, engine against trainer: "
        f"{mean:.1e}; worst step {max(differences):.1e}"
    )
    screen.print(gained, highlight=False, soft_wrap=True)
    screen.print(differed, highlight=False, soft_wrap=True)


def _with_error(evaluation: dict[str, Any]) -> str:
    return accuracy_text(
        evaluation["accuracy"], evaluation["standard_error"], evaluation["num_samples"]
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="examples.tool_calculator.report", description=__doc__)
    parser.add_argument("directory", type=Path)
    main(parser.parse_args().directory)
