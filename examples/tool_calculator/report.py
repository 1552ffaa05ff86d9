"""`python -m examples.tool_calculator.report DIRECTORY`: prints what a run of `make demo-agent`
learnt, in one table.

Reads the run in DIRECTORY/run and the answers without the tool in DIRECTORY/alone.json, which
`trainer.evaluate_model` writes.
"""

import argparse
import json
from pathlib import Path

from rich.table import Column, Table

from trainer.observe.run_dir import console, read_lines


def main(directory: Path) -> None:
    """Prints the table."""
    evaluations, steps = (
        read_lines(directory / "run" / f"{name}.jsonl") for name in ("evaluations", "metrics")
    )
    before, after = evaluations[0], evaluations[-1]
    alone = json.loads((directory / "alone.json").read_text(encoding="utf-8"))
    title = f"{after['num_samples']} held-out problems such as {after['answers'][0]['prompt']}"
    table = Table(
        "accuracy", Column("before", justify="right"), Column("after", justify="right"), title=title
    )
    shown = [
        f"{found['accuracy']:.3f} ± {found['standard_error']:.3f}" for found in (before, after)
    ]
    table.add_row("with the tool", *shown)
    table.add_row(
        "without it, greedy", *(f"{found['accuracy']:.3f}" for found in (alone["compare"], alone))
    )
    screen = console()
    screen.print(table)
    gain = after["accuracy"] - before["accuracy"]
    error = (before["standard_error"] ** 2 + after["standard_error"] ** 2) ** 0.5
    updates = [step["update"] for step in steps]
    tokens = sum(update["trained_tokens"] for update in updates)
    mean = sum(
        update["delta_logprob_current"] * update["trained_tokens"] for update in updates
    ) / max(1, tokens)
    worst = max(update["delta_logprob_current"] for update in updates)
    for line in (
        f"gain: {gain:+.3f}, {gain / error:.0f} standard errors, in {len(steps)} steps on {tokens:,} sampled tokens",
        f"mean |Δ log-probability| of the sampled tokens, engine against trainer: {mean:.1e}; worst step {worst:.1e}",
    ):
        screen.print(line, highlight=False, soft_wrap=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="examples.tool_calculator.report", description=__doc__)
    parser.add_argument("directory", type=Path)
    main(parser.parse_args().directory)
