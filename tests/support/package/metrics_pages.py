"""The real `/metrics` pages of every app, and the tables in docs/reference/metrics.md: the one
generated from them, and that of the numbers of a step.

`python -m tests.support.package.metrics_pages` writes the tables into the document.
"""

import asyncio
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx

from tests.support.paths import ROOT
from tests.support.services.apps import SERVICES, make, tiny
from trainer.observe.metrics import METRICS

DOCUMENT = ROOT / "docs" / "reference" / "metrics.md"
TITLES = {
    "data": "data-server",
    "reward": "reward-server",
    "replay": "replay-buffer",
    "environment": "environment-server",
    "agent": "rollout-server (the agent of each node)",
    "engine": "rollout-engine (the embedded one)",
    "trainer": "ppo-trainer (rank 0)",
}
_STEP_TABLE = re.compile(r"(<!-- step -->\n)(.*)(<!-- end of step -->)", re.DOTALL)
_TABLE = re.compile(r"(<!-- table -->\n).*(<!-- end of table -->)", re.DOTALL)


@dataclass(frozen=True)
class Family:
    """One metric of a page."""

    name: str
    kind: str
    text: str
    labels: tuple[str, ...] = ()

    @property
    def samples(self) -> set[str]:
        """The names that a query may use."""
        return (
            {f"{self.name}{end}" for end in ("_bucket", "_sum", "_count")}
            if self.kind == "histogram"
            else {self.name}
        )


def parse(page: str) -> dict[str, Family]:
    """Parses a page's metrics by name from its HELP and TYPE lines, without counters' start times
    (`_created`)."""
    texts = dict(re.findall(r"^# HELP (\S+) ?(.*)$", page, re.MULTILINE))
    kinds = dict(re.findall(r"^# TYPE (\S+) (\S+)$", page, re.MULTILINE))
    return {
        name: Family(name, kinds[name], texts.get(name, ""))
        for name in kinds
        if not name.endswith("_created")
    }


async def page(service: str, model: Path, directory: Path) -> dict[str, Family]:
    """Returns the metrics of a service's page, with their labels."""
    app = make(service, tiny(model, directory / service))
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://test"
    ) as client:
        found = parse((await client.get("/metrics")).raise_for_status().text)
    labels: Mapping[str, list[str]] = app.state.metrics.labels
    return {
        name: Family(name, family.kind, family.text, tuple(labels.get(name, ())))
        for name, family in found.items()
    }


async def pages(model: Path, directory: Path) -> dict[str, dict[str, Family]]:
    """Returns the metrics of every service."""
    return {service: await page(service, model, directory) for service in SERVICES}


def table(found: Mapping[str, Mapping[str, Family]]) -> str:
    """Formats all metrics in Markdown: first those common to all services, then the others of
    each."""
    common = set.intersection(*(set(families) for families in found.values()))
    lines = ["### Every service\n", *_rows([found["data"][name] for name in common])]
    for service, title in TITLES.items():
        own = [family for name, family in found[service].items() if name not in common]
        lines += [f"\n### {title}\n", *_rows(own)]
    return "\n".join(lines) + "\n"


def _rows(families: list[Family]) -> list[str]:
    rows = [
        f"| `{each.name}` | {each.kind} | {', '.join(f'`{label}`' for label in each.labels)} | {_cell(each.text)} |"
        for each in sorted(families, key=lambda each: each.name)
    ]
    return ["| metric | type | labels | what it says |", "|---|---|---|---|", *rows]


def _cell(text: str) -> str:
    return text.rstrip(".").replace("|", "\\|")


def step_table() -> str:
    """Formats the numbers of a step in Markdown, by section of the dashboard."""
    lines = ["| number | unit | what it says | chart | gauge |", "|---|---|---|---|---|"]
    for metric in METRICS:
        gauge = f"`rlhf_trainer_{metric.gauge}`" if metric.gauge else ""
        cells = [f"`{metric.name}`", metric.unit, _cell(metric.text), _cell(metric.chart), gauge]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def step_table_documented() -> str:
    """Returns that table in the document."""
    match = _STEP_TABLE.search(DOCUMENT.read_text(encoding="utf-8"))
    assert match, f"{DOCUMENT} has no table of the numbers of a step"
    return match[2]


def documented() -> str:
    """Returns the table in the document."""
    match = _TABLE.search(DOCUMENT.read_text(encoding="utf-8"))
    assert match, f"{DOCUMENT} has no table"
    return match[0]


def framed(text: str) -> str:
    return f"<!-- table -->\n{text}<!-- end of table -->"


def main() -> None:
    """Writes the table into the document."""
    with TemporaryDirectory() as directory:
        made = table(asyncio.run(pages(ROOT / ".cache" / "tiny-base", Path(directory))))
    text = _TABLE.sub(lambda _: framed(made), DOCUMENT.read_text(encoding="utf-8"))
    text = _STEP_TABLE.sub(lambda match: match[1] + step_table() + match[3], text)
    DOCUMENT.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
