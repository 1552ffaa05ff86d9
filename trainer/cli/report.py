"""Writes a self-contained HTML report of a run: charts, evaluations, answers, settings."""

import html
import math
import re
import time
from collections import deque
from operator import itemgetter
from pathlib import Path

import orjson

from common import Json
from common.errors import ServiceError
from common.process.cli import CommandParser, output_file, run
from common.process.storage import storing
from trainer.cli.commands import run_parser
from trainer.cli.compare import recorded_evaluations
from trainer.dashboard.app import STATIC
from trainer.dashboard.runs import RunReader
from trainer.observe.group_files import read_group, recorded_steps
from trainer.observe.run_dir import check_run

_EPILOG = """\
examples:
  rlhf report runs/my-run                    # writes runs/my-run/report.html
  rlhf report runs/my-run --output mine.html
"""
# JavaScript modules of the page, each after those it imports.
_MODULES = ("dom", "address", "data", "charts", "runs", "overview", "settings", "report")
# Points of a chart, which keep a report below 1 MB whatever the length of the run.
_POINTS = 300
_SHOWN_ANSWERS = 6
_SHOWN_SAMPLES = 4
# Number of groups of the newest step from which samples are chosen.
_LOOKED_AT = 16
_SHOWN_NOTES = 200
# Characters shown of a model's text; the run directory has the rest.
_SHOWN_CHARS = 4000
_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; \
script-src 'unsafe-inline'; style-src 'unsafe-inline'">
<title>{title}</title>
<style>{style}</style>
</head>
<body class="report">
<header><h1>{title}</h1><span id="progress">{subtitle}</span></header>
<main><div id="summary"></div><div id="overview"></div><div id="tables"></div>\
<div id="settings"></div></main>
<noscript>The charts need JavaScript.</noscript>
<script type="application/json" id="data">{data}</script>
<script>{library}</script>
<script type="module">{script}</script>
</body>
</html>
"""


def parser() -> CommandParser:
    """Returns the command line."""
    made = run_parser("rlhf report", __doc__, "RUN_DIR [--output FILE]", _EPILOG)
    made.add_argument(
        "--output",
        type=output_file,
        metavar="FILE",
        help="where to write (default RUN_DIR/report.html)",
    )
    return made


def main(argv: list[str] | None = None) -> None:
    """Writes the report. Raises ConfigError for a directory without a step, StorageFailed when the
    file cannot be written.
    """
    arguments = parser().parse_args(argv)
    check_run(arguments.run_dir)
    path: Path = arguments.output or arguments.run_dir / "report.html"
    text = report(RunReader(arguments.run_dir))
    with storing(path.name, path, "--output", "name another file"):
        path.write_text(text, encoding="utf-8")
    print(f"report: {path}")


def report(shown: RunReader) -> str:
    """Returns the report of a run as one HTML page."""
    series = shown.series(points=_POINTS)
    summary = shown.summary()
    for part in ("columns", "low", "high"):
        series[part] = {
            name: [
                # Four significant digits are enough for a chart.
                float(f"{value:.4g}") if math.isfinite(value) else None
                for value in column.tolist()
            ]
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
        "notes": shown.notes()[-_SHOWN_NOTES:],
        "answers": _answers(shown.directory),
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


def _cut(text: str) -> str:
    more = len(text) - _SHOWN_CHARS
    return text if more <= 0 else f"{text[:_SHOWN_CHARS]}… ({more:,} more characters)"


def _samples(run_dir: Path) -> list[Json]:
    """Returns the best and the worst completion of groups of the newest recorded step, those of
    mixed rewards first.
    """
    steps = recorded_steps(run_dir)
    if not steps:
        return []
    step = max(steps)
    mixed: list[Json] = []
    equal: list[Json] = []
    for place in range(_LOOKED_AT):
        try:
            group = read_group(run_dir, step, place)
        except ServiceError:
            break
        if group is None:
            continue
        graded = [each for each in group["completions"] if each["reward"] is not None]
        if not graded:
            continue
        best = max(graded, key=itemgetter("reward"))
        worst = min(graded, key=itemgetter("reward"))
        if best["reward"] == worst["reward"]:
            equal.append(_sample(step, group, best))
        else:
            mixed += [_sample(step, group, best), _sample(step, group, worst)]
    return [*mixed, *equal][:_SHOWN_SAMPLES]


def _sample(step: int, group: Json, completion: Json) -> Json:
    return {
        "step": step,
        "prompt": _cut(group["prompt"]),
        "ground_truth": _cut(group["ground_truth"]),
        "text": _cut(completion["text"]),
        "reward": completion["reward"],
        "correct": completion["correct"] if completion.get("verified", True) else None,
    }


def _static(name: str) -> str:
    return (STATIC / name).read_text(encoding="utf-8")


def _module(name: str) -> str:
    """Returns a module of the page without imports and exports: the report is one script."""
    source = re.sub(r"^import .*;\n", "", _static(f"{name}.js"), flags=re.MULTILINE)
    return re.sub(r"^export ", "", source, flags=re.MULTILINE)


def _answers(run_dir: Path) -> list[Json]:
    """Returns answers of the first and the last evaluation to the same problems, those with a
    changed verdict first.
    """
    lines = recorded_evaluations(run_dir)
    first = next(lines, None)
    newest = deque(lines, maxlen=1)
    if first is None or not newest:
        return []
    after = {answer.prompt_id: answer for answer in newest[0].answers}
    answers: list[Json] = []
    for old in first.answers:
        new = after.get(old.prompt_id)
        if new is not None:
            shown = {
                "prompt": _cut(old.prompt),
                "ground_truth": _cut(old.ground_truth),
                "before": _cut(old.response),
                "was_right": old.correct,
                "after": _cut(new.response),
                "is_right": new.correct,
            }
            answers.append(shown)
    answers.sort(key=lambda shown: shown["was_right"] == shown["is_right"])
    return answers[:_SHOWN_ANSWERS]


if __name__ == "__main__":
    run(main, "")
