"""Writes a self-contained HTML report of a run: charts, evaluations, answers, settings."""

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
from trainer.dashboard.jsonl import JsonlReader
from trainer.dashboard.runs import RunReader, named_run

_EPILOG = """\
examples:
  python -m trainer.report runs/my-run                    # writes runs/my-run/report.html
  python -m trainer.report runs/my-run --output mine.html
"""
_MODULES = ("dom", "data", "charts", "overview", "settings", "report")
"""Modules of the page, each after its imports."""
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
    """Returns the command line."""
    made = Parser("trainer.report", __doc__ or "", "RUN_DIR [--output FILE]", _EPILOG)
    made.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="directory of a run, finished or not")
    made.add_argument("--output", type=Path, metavar="FILE", help="where to write (default RUN_DIR/report.html)")
    return made


def main(argv: list[str] | None = None) -> None:
    """Writes the report. Raises ConfigError for a missing directory, StorageFailed when the file cannot be written."""
    arguments = parser().parse_args(argv)
    path: Path = arguments.output or arguments.run_dir / "report.html"
    text = report(named_run(arguments.run_dir))
    with storing(path.name, path, "--output", "name another file"):
        path.write_text(text, encoding="utf-8")
    print(f"report: {path}")


def report(shown: RunReader) -> str:
    """Returns the report of a run as one HTML page."""
    series, summary = shown.series(points=_POINTS), shown.summary()
    newest = series["newest"]
    steps = "no step" if newest is None else f"{newest:,} steps"
    content = {
        "run": summary.model_dump(),
        "facts": shown.facts(),
        "series": series,
        "notes": [{"step": line["step"], **note} for line in shown.steps() for note in notes(line)][-_SHOWN_NOTES:],
        "answers": _answers(shown.directory / "evaluations.jsonl"),
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


def _static(name: str) -> str:
    return (STATIC / name).read_text(encoding="utf-8")


def _module(name: str) -> str:
    """Returns a module of the page without imports and exports: the report puts all into one script."""
    source = re.sub(r"^import .*;\n", "", _static(f"{name}.js"), flags=re.MULTILINE)
    return re.sub(r"^export ", "", source, flags=re.MULTILINE)


def _answers(path: Path) -> list[dict[str, Any]]:
    """Returns answers of the first and the last evaluation to the same problems, those with a changed verdict first."""
    lines = JsonlReader(path)
    found = [offset for offset, _ in lines.read()]
    if len(found) < 2:
        return []
    before, after = (_by_prompt((lines.at(offset) or {}).get("answers")) for offset in (found[0], found[-1]))
    pairs = [(answer, after[prompt_id]) for prompt_id, answer in before.items() if prompt_id in after]
    pairs.sort(key=lambda pair: pair[0]["correct"] == pair[1]["correct"])  # stable
    return [
        {name: old[name] for name in ("prompt", "ground_truth")}
        | {"before": old["response"], "was_right": old["correct"], "after": new["response"], "is_right": new["correct"]}
        for old, new in pairs[:_SHOWN_ANSWERS]
    ]


def _by_prompt(answers: Any) -> dict[str, dict[str, Any]]:
    """Returns the complete answers of an evaluation by the id of the prompt."""
    fields = {"prompt_id", "prompt", "ground_truth", "response", "correct"}
    known = answers if isinstance(answers, list) else []
    return {answer["prompt_id"]: answer for answer in known if isinstance(answer, dict) and fields <= answer.keys()}


if __name__ == "__main__":
    run(main, "")
