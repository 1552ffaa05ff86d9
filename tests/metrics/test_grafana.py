"""docs/reference/grafana-dashboard.json queries only metrics that exist and has the fields Grafana
needs."""

import asyncio
import json
import re
from itertools import combinations
from pathlib import Path
from typing import Any

import httpx
import pytest

from common.clients.rollout import RolloutClient
from tests.support.engines.engines import SGLANG, router_process, sglang_is_installed
from tests.support.engines.recording_engines import recorders
from tests.support.package.metrics_pages import Family, parse
from tests.support.paths import ROOT
from tests.support.processes.ports import free_port
from trainer.observe.metrics import METRICS

_METRIC = re.compile(r"\b(?:rlhf|process|smg)_[a-z0-9_]+|\bsglang:[a-z0-9_]+|\bup\b")
_OWN = ("rlhf_", "process_")
FORMS = {"row", "stat", "timeseries"}


@pytest.fixture(scope="module")
def dashboard() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(
        (ROOT / "docs" / "reference" / "grafana-dashboard.json").read_text(encoding="utf-8")
    )
    return content


def queries(dashboard: dict[str, Any]) -> dict[str, list[str]]:
    """The queries of every panel, by its title."""
    return {
        panel["title"]: [target["expr"] for target in panel.get("targets", [])]
        for panel in dashboard["panels"]
    }


def asked(dashboard: dict[str, Any], prefix: str | tuple[str, ...]) -> set[str]:
    """The metrics with this prefix in all queries."""
    texts = [text for several in queries(dashboard).values() for text in several]
    return {name for text in texts for name in _METRIC.findall(text) if name.startswith(prefix)}


@pytest.mark.integration
def test_every_metric_of_the_project_is_on_a_real_page_with_its_labels(
    dashboard: dict[str, Any], found: dict[str, dict[str, Family]]
) -> None:
    families = [family for page in found.values() for family in page.values()]
    there = {name: family for family in families for name in family.samples}
    assert asked(dashboard, _OWN) <= set(there)
    for title, texts in queries(dashboard).items():
        for text in texts:
            for name, selector in re.findall(r"(rlhf_[a-z0-9_]+)\{([^}]*)\}", text):
                used = re.findall(r"(\w+)[=!]", selector)
                assert set(used) <= {*there[name].labels, "job", "node"}, f"{title}: {text}"


def test_every_number_of_a_step_that_is_a_gauge_is_shown(dashboard: dict[str, Any]) -> None:
    gauges = {f"rlhf_trainer_{metric.gauge}" for metric in METRICS if metric.gauge}
    assert gauges <= asked(dashboard, _OWN)


@pytest.mark.integration
async def test_every_metric_of_the_router_is_on_its_real_page(
    dashboard: dict[str, Any], tmp_path: Path
) -> None:
    port = free_port()
    with (
        recorders(1) as (_, urls),
        router_process(urls, tmp_path / "log", router_metrics_port=port) as router,
    ):
        async with RolloutClient("router", router, deadline_s=60) as client:
            await client.generate(
                [5, 6, 7], n=2, max_new_tokens=4, temperature=0.7, stop_token_ids=[1]
            )
        there: set[str] = set()
        async with httpx.AsyncClient(trust_env=False) as http, asyncio.timeout(60):
            while (
                asked(dashboard, "smg_") - there
            ):  # some appear with an engine's next health check
                await asyncio.sleep(0.2)
                page = (await http.get(f"http://127.0.0.1:{port}/metrics")).text
                there = {name for family in parse(page).values() for name in family.samples}


def test_every_metric_of_sglang_exists(dashboard: dict[str, Any]) -> None:
    if not sglang_is_installed():
        pytest.skip("SGLang is not installed: make sglang-cpu")
    sources = SGLANG.glob("lib/python3*/site-packages/sglang/srt/observability/*.py")
    text = "\n".join(path.read_text(encoding="utf-8") for path in sources)
    there = set(re.findall(r"sglang:[a-z0-9_]+", text))
    assert asked(dashboard, "sglang:") <= there


def test_the_dashboard_has_the_fields_that_grafana_needs(dashboard: dict[str, Any]) -> None:
    assert {"title", "uid", "schemaVersion", "panels", "templating", "time", "refresh"} <= set(
        dashboard
    )
    assert dashboard["schemaVersion"] >= 36
    variables = [variable["name"] for variable in dashboard["templating"]["list"]]
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert {panel["type"] for panel in panels} == FORMS
    for panel in panels:
        place = panel["gridPos"]
        assert set(place) == {"h", "w", "x", "y"}
        assert place["x"] + place["w"] <= 24
        if panel["type"] == "row":
            continue
        assert panel["targets"], panel["title"]
        letters = [target["refId"] for target in panel["targets"]]
        assert len(set(letters)) == len(letters)
        for target in [panel, *panel["targets"]]:
            assert target["datasource"]["type"] == "prometheus"
            assert target["datasource"]["uid"].strip("${}") in variables
        assert {"defaults", "overrides"} <= set(panel["fieldConfig"])


def test_no_panel_covers_another(dashboard: dict[str, Any]) -> None:
    places = [(panel["title"], panel["gridPos"]) for panel in dashboard["panels"]]
    for (one, a), (other, b) in combinations(places, 2):
        apart = (
            a["x"] + a["w"] <= b["x"]
            or b["x"] + b["w"] <= a["x"]
            or a["y"] + a["h"] <= b["y"]
            or b["y"] + b["h"] <= a["y"]
        )
        assert apart, f"{one} and {other}"


def test_every_query_has_a_recognised_metric(dashboard: dict[str, Any]) -> None:
    """None of the tests above would check a query without a recognised metric."""
    for title, texts in queries(dashboard).items():
        for text in texts:
            assert _METRIC.search(text), f"{title}: {text}"
