"""Every service's /openapi.json is complete: each call has a description, typed bodies and declared
errors."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI

from services.http.openapi import EVERYWHERE
from tests.support.processes.served_app import fuzzed
from tests.support.services.apps import APPS

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module", params=APPS)
def description(
    request: pytest.FixtureRequest, base_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    app: FastAPI = fuzzed(request.param, tmp_path_factory.mktemp(request.param), base_model)
    return app.openapi()


WITHOUT_BODY = ("POST /flush", "POST /reset", "POST /clear", "POST /groups/reset_fresh")


def operations(description: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    return [
        (f"{method.upper()} {path}", call)
        for path, calls in description["paths"].items()
        for method, call in calls.items()
        if method in ("get", "post", "put", "delete", "patch")
    ]


def test_every_call_is_described(description: dict[str, Any]) -> None:
    found = operations(description)
    assert len(found) >= 4
    untold = [name for name, call in found if not call.get("description")]
    assert untold == []
    assert len({call["operationId"] for _, call in found}) == len(found)


def test_every_answer_has_a_type(description: dict[str, Any]) -> None:
    for name, call in operations(description):
        if "204" in call["responses"]:
            continue
        content = call["responses"]["200"].get("content", {})
        assert content, name
        assert all(item["schema"] for item in content.values()), name


def test_every_body_has_a_type(description: dict[str, Any]) -> None:
    for name, call in operations(description):
        if name.startswith(("GET", "DELETE")):
            continue
        content = call.get("requestBody", {}).get("content", {})
        assert content or name in WITHOUT_BODY, name
        assert all(item["schema"] for item in content.values()), name


def test_every_call_declares_its_errors_in_the_common_shape(description: dict[str, Any]) -> None:
    shape = {"$ref": "#/components/schemas/ErrorBody"}
    for name, call in operations(description):
        assert {str(status) for status in EVERYWHERE} <= call["responses"].keys(), name
        for status, answer in call["responses"].items():
            schemas = [item["schema"] for item in answer.get("content", {}).values()]
            if status[0] in "45" and name not in ("GET /health",):
                assert schemas == [shape] or status == "400", (
                    name,
                    status,
                )  # 400 has SGLang's form


def test_body_that_a_handler_reads_itself_is_described_too(description: dict[str, Any]) -> None:
    calls = {
        f"/sessions/{{session}}/v1/{each}": "application/json"
        for each in ("chat/completions", "responses", "messages")
    }
    by_hand = calls | {
        "/groups": "application/msgpack",
        "/values": "application/msgpack",
        "/generate": "application/json",
    }
    for path, kind in by_hand.items():
        if path in description["paths"]:
            assert description["paths"][path]["post"]["requestBody"]["content"][kind]["schema"][
                "properties"
            ]


def test_every_reference_leads_somewhere(description: dict[str, Any]) -> None:
    for reference in set(re.findall(r'"\$ref": "([^"]+)"', json.dumps(description))):
        found: Any = description
        for name in reference.removeprefix("#/").split("/"):
            assert name in found, reference
            found = found[name]
