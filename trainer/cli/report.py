"""Writes one HTML file about a run, to send to somebody: charts, evaluations, answers, settings. It loads nothing."""

import html
import re
import time
from pathlib import Path
from typing import Any

import orjson

from common.cli import Parser, run
from common.storing import storing
from trainer.dashboard.app import STATIC
from trainer.dashboard.columns import notes
from trainer.dashboard.lines import Lines
from trainer.dashboard.runs import Run

_EPILOG = """\
examples:
  python -m trainer.report runs/my-run                    # writes runs/my-run/report.html
  python -m trainer.report runs/my-run --output mine.html
"""
_MODULES = ("dom", "data", "charts", "overview", "settings", "report")
"""Of the page, each after those that it imports."""
_POINTS = 2000
_SHOWN_ANSWERS = 6
_SHOWN_NOTES = 200
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
<main><div id="overview"></div><div id="tables"></div><div id="settings"></div></main>
<noscript>The charts need JavaScript.</noscript>
<script type="application/json" id="data">{data}</script>
<script>{library}</script>
<script type="module">{script}</script>
</body>
</html>
"""


def parser() -> Parser:
    """The command line."""
    made = Parser("trainer.report", __doc__ or "", "RUN_DIR [--output FILE]", _EPILOG)
    made.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="directory of a run, finished or not")
    made.add_argument("--output", type=Path, metavar="FILE", help="where to write (default RUN_DIR/report.html)")
    return made


def main(argv: list[str] | None = None) -> None:
    """Writes the file. Raises ConfigError for a directory that is not there, StorageFailed when it cannot be written."""
    arguments = parser().parse_args(argv)
    path: Path = arguments.output or arguments.run_dir / "report.html"
    text = report(Run(arguments.run_dir))
    with storing(path.name, path, "--output", "name another file"):
        path.write_text(text, encoding="utf-8")
    print(f"report: {path}")


def report(shown: Run) -> str:
    """The report of a run as one HTML page."""
    series = shown.series(points=_POINTS)
    newest = series["newest"]
    steps = "no step" if newest is None else f"{newest:,} steps"
    content = {
        "run": {"run": 0, **shown.summary()},
        "facts": shown.facts(),
        "series": series,
        "notes": _notes(shown),
        "answers": _answers(shown.directory / "evaluations.jsonl"),
        "problems": shown.problems,
    }
    data = orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY).decode()
    return _PAGE.format(
        title=html.escape(shown.name),
        subtitle=f"{steps} · written {time.strftime('%Y-%m-%d %H:%M %Z')}",
        style=_static("uPlot.min.css") + _static("style.css"),
        data=data.replace("<", "\\u003c"),  # so that no text of a model ends the element
        library=_static("uPlot.iife.min.js"),
        script="\n".join(_module(name) for name in _MODULES),
    )


def _static(name: str) -> str:
    return (STATIC / name).read_text(encoding="utf-8")


def _module(name: str) -> str:
    """A module of the page without its imports and exports: here all of them are one."""
    source = re.sub(r"^import .*;\n", "", _static(f"{name}.js"), flags=re.MULTILINE)
    return re.sub(r"^export ", "", source, flags=re.MULTILINE)


def _notes(shown: Run) -> list[dict[str, Any]]:
    """What the trainer said at which step, the last ones."""
    found = [{"step": line["step"], **note} for line in shown.steps() for note in notes(line)]
    return found[-_SHOWN_NOTES:]


def _answers(path: Path) -> list[dict[str, Any]]:
    """Answers of the first and the last evaluation to the same problems, those whose verdict changed first."""
    lines = Lines(path)
    found = [offset for offset, _ in lines.read()]
    if len(found) < 2:
        return []
    first, last = (_list((lines.at(offset) or {}).get("answers")) for offset in (found[0], found[-1]))
    after = {answer["prompt_id"]: answer for answer in last if _is_answer(answer)}
    pairs = [(answer, after[answer["prompt_id"]]) for answer in first if _is_answer(answer) and answer["prompt_id"] in after]
    pairs.sort(key=lambda pair: pair[0]["correct"] == pair[1]["correct"])  # stable
    return [
        {
            "prompt": old["prompt"],
            "ground_truth": old["ground_truth"],
            "before": old["response"],
            "was_right": old["correct"],
            "after": new["response"],
            "is_right": new["correct"],
        }
        for old, new in pairs[:_SHOWN_ANSWERS]
    ]


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _is_answer(answer: Any) -> bool:
    return isinstance(answer, dict) and {"prompt_id", "prompt", "ground_truth", "response", "correct"} <= answer.keys()


if __name__ == "__main__":
    run(main, "")
