"""Writes a self-contained HTML report of a run: charts, evaluations, answers, settings."""

import html
import math
import re
import time
from pathlib import Path
from typing import Any

import orjson

from common.errors import ServiceError
from common.process.cli import CommandParser, run
from common.process.storage import storing
from trainer.dashboard.app import STATIC
from trainer.dashboard.columns import notes
from trainer.dashboard.jsonl import JsonlReader
from trainer.dashboard.run_list import RunList
from trainer.dashboard.runs import RunReader
from trainer.observe.group_files import read_group, recorded_steps

_EPILOG = """\
examples:
  python -m trainer.report runs/my-run                    # writes runs/my-run/report.html
  python -m trainer.report runs/my-run --output mine.html
"""
_MODULES = ("dom", "address", "data", "charts", "overview", "runs", "settings", "report")
"""JavaScript modules of the page, each after those it imports."""
_POINTS = 300
"""Points of a chart, which keep a report below 1 MB whatever the length of the run."""
_SHOWN_ANSWERS = 6
_SHOWN_SAMPLES = 4
_LOOKED_AT = 16
"""Number of groups of the newest step from which samples are chosen."""
_SHOWN_NOTES = 200
_SHOWN_CHARS = 4000
"""Characters shown of a model's text; the run directory has the rest."""
_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'">
<title>{title}</title>
<style>{style}</style>
</head>
<body class="report">
<header><h1>{title}</h1><span id="progress">{subtitle}</span></header>
<main><div id="summary"></div><div id="overview"></div><div id="tables"></div><div id="settings"></div></main>
<noscript>The charts need JavaScript.</noscript>
<script type="application/json" id="data">{data}</script>
<script>{library}</script>
<script type="module">{script}</script>
</body>
</html>
"""


def parser() -> CommandParser:
    """Returns the command line."""
    made = CommandParser("trainer.report", __doc__ or "", "RUN_DIR [--output FILE]", _EPILOG)
    made.add_argument(
        "run_dir", type=Path, metavar="RUN_DIR", help="directory of a run, finished or not"
    )
    made.add_argument(
        "--output", type=Path, metavar="FILE", help="where to write (default RUN_DIR/report.html)"
    )
    return made


def main(argv: list[str] | None = None) -> None:
    """Writes the report. Raises ConfigError for a missing directory, StorageFailed when the file
    cannot be written.
    """
    arguments = parser().parse_args(argv)
    path: Path = arguments.output or arguments.run_dir / "report.html"
    text = report(RunList([arguments.run_dir])[0])
    with storing(path.name, path, "--output", "name another file"):
        path.write_text(text, encoding="utf-8")
    print(f"report: {path}")


def report(shown: RunReader) -> str:
    """Returns the report of a run as one HTML page."""
    series, summary = shown.series(points=_POINTS), shown.summary()
    for part in ("columns", "low", "high"):
        series[part] = {
            name: [_rounded(value) for value in column.tolist()]
            for name, column in series.get(part, {}).items()
        }
    if not series["low"]:
        del series["low"], series["high"]
    newest = series["newest"]
    steps = "no step" if newest is None else f"{newest:,} steps"
    content = {
        "run": summary.model_dump(),
        "facts": shown.facts(),
        "series": series,
        "notes": [{"step": line["step"], **note} for line in shown.steps() for note in notes(line)][
            -_SHOWN_NOTES:
        ],
        "answers": _answers(shown.directory / "evaluations.jsonl"),
        "samples": _samples(shown.directory),
        "problems": shown.problems,
    }
    data = orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY).decode()
    return _PAGE.format(
        title=html.escape(summary.name),
        subtitle=f"{steps} · written {time.strftime('%Y-%m-%d %H:%M %Z')}",
        style=_static("uPlot.min.css") + _static("style.css"),
        data=data.replace("<", "\\u003c"),  # a model's text must not end the element
        library=_static("uPlot.iife.min.js"),
        script="\n".join(_module(name) for name in _MODULES),
    )


def _rounded(number: float) -> float | None:
    """Rounds to four significant digits, enough for a chart; returns None for a missing number."""
    return float(f"{number:.4g}") if math.isfinite(number) else None


def _cut(text: str) -> str:
    return (
        text
        if len(text) <= _SHOWN_CHARS
        else f"{text[:_SHOWN_CHARS]}… ({len(text) - _SHOWN_CHARS:,} more characters)"
    )


def _samples(run_dir: Path) -> list[dict[str, Any]]:
    """Returns the best and the worst completion of groups of the newest recorded step, those of
    mixed rewards first.
    """
    steps = recorded_steps(run_dir)
    if not steps:
        return []
    step = max(steps)
    groups = []
    for place in range(_LOOKED_AT):
        try:
            group = read_group(run_dir, step, place)
        except ServiceError:
            break
        if group is not None:
            groups.append(
                (group, [each for each in group["completions"] if each["reward"] is not None])
            )
    found = []
    for group, graded in sorted(
        groups, key=lambda each: len({completion["reward"] for completion in each[1]}) < 2
    ):
        ends = [max(graded, key=_reward), min(graded, key=_reward)] if graded else []
        for completion in ends[: 2 if len({each["reward"] for each in graded}) > 1 else 1]:
            texts = {name: _cut(group[name]) for name in ("prompt", "ground_truth")}
            verdict = completion["correct"] if completion.get("verified", True) else None
            found.append(
                {
                    "step": step,
                    **texts,
                    "text": _cut(completion["text"]),
                    "reward": completion["reward"],
                    "correct": verdict,
                }
            )
    return found[:_SHOWN_SAMPLES]


def _reward(completion: dict[str, Any]) -> float:
    return float(completion["reward"])


def _static(name: str) -> str:
    return (STATIC / name).read_text(encoding="utf-8")


def _module(name: str) -> str:
    """Returns a module of the page without imports and exports: the report is one script."""
    source = re.sub(r"^import .*;\n", "", _static(f"{name}.js"), flags=re.MULTILINE)
    return re.sub(r"^export ", "", source, flags=re.MULTILINE)


def _answers(path: Path) -> list[dict[str, Any]]:
    """Returns answers of the first and the last evaluation to the same problems, those with a
    changed verdict first.
    """
    lines = JsonlReader(path)
    found = [offset for offset, _ in lines.read()]
    if len(found) < 2:
        return []
    before, after = (
        _by_prompt((lines.at(offset) or {}).get("answers")) for offset in (found[0], found[-1])
    )
    pairs = [
        (answer, after[prompt_id]) for prompt_id, answer in before.items() if prompt_id in after
    ]
    pairs.sort(key=lambda pair: pair[0]["correct"] == pair[1]["correct"])  # stable
    return [
        {name: _cut(str(old[name])) for name in ("prompt", "ground_truth")}
        | {"before": _cut(str(old["response"])), "was_right": old["correct"]}
        | {"after": _cut(str(new["response"])), "is_right": new["correct"]}
        for old, new in pairs[:_SHOWN_ANSWERS]
    ]


def _by_prompt(answers: Any) -> dict[str, dict[str, Any]]:
    """Returns the complete answers of an evaluation by the id of the prompt."""
    fields = {"prompt_id", "prompt", "ground_truth", "response", "correct"}
    known = answers if isinstance(answers, list) else []
    return {
        answer["prompt_id"]: answer
        for answer in known
        if isinstance(answer, dict) and fields <= answer.keys()
    }


if __name__ == "__main__":
    run(main, "")
