"""The calls of the rollout viewer: their answers, where the data comes from, and how they
refuse."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from services.http.app import create_app
from tests.support.runs.recorded_groups import group, record, trained, write_lines
from trainer.cli.tiny_base import make_tokenizer
from trainer.dashboard.groups import add_groups
from trainer.dashboard.runs import RunReader
from trainer.observe.group_files import LINES, RecordedGroup

HOSTILE = "<img src=x onerror=alert(1)>\u202e\x00\x1b[31m</script>\"'\U0001f600\u200b"


def client(*runs: RunReader) -> TestClient:
    app: FastAPI = create_app("dashboard")
    add_groups(app, lambda: [*runs])
    return TestClient(app, raise_server_exceptions=False)


def refused(answer: Any, status: int, field: str) -> str:
    """Returns the message of an error, which has the one shape of all errors."""
    error = answer.json()["error"]
    assert (answer.status_code, error["field"]) == (status, field), error
    assert error.get("remedy")
    return f"{error['code']}: {error['message']}"


@pytest.fixture
def run(tmp_path: Path) -> RunReader:
    """A run with two steps and a dropped group, with a tokenizer."""
    make_tokenizer(iter(["How many apples now? 1 2 3", "#### 12"])).save_pretrained(
        tmp_path / "model"
    )
    late = RecordedGroup(
        group(9, [0.5]), reason="stale", detail="its weights are older than version 3"
    )
    steps = [
        [
            trained(group(1, [1.0, 0.0])),
            trained(group(2, [0.0, 1.0], ["text", HOSTILE], prompt=HOSTILE)),
        ],
        [trained(group(4, [1.0, 1.0])), late],
    ]
    record(tmp_path, steps)
    (tmp_path / "attempts.jsonl").write_text('{"run_id": "group", "step": 0}\n')
    return RunReader(tmp_path)


def test_groups_are_listed(run: RunReader) -> None:
    answer = (
        client(run)
        .get("/dashboard/api/groups", params={"limit": 2, "offset": 1, "sort": "step"})
        .json()
    )
    assert (answer["total"], answer["problems"]) == (4, [])
    assert [(row["id"], row["step"], row["reason"]) for row in answer["groups"]] == [
        ("group-2", 1, ""),
        ("group-4", 2, ""),
    ]
    assert answer["groups"][0]["prompt"] == HOSTILE
    found = (
        client(run)
        .get("/dashboard/api/groups", params={"text": HOSTILE[4:20].upper(), "error": "none"})
        .json()
    )
    assert [row["id"] for row in found["groups"]] == ["group-2"]


def test_a_group_is_shown_in_full(run: RunReader) -> None:
    answer = client(run).get("/dashboard/api/groups/group-2", params={"step": 1})
    shown = answer.json()
    assert (shown["step"], shown["missing"], shown["prompt"]) == (1, [], HOSTILE)
    assert (shown["reused"], shown["weight"], shown["reason"], len(shown["prompt_tokens"])) == (
        False,
        1.0,
        "",
        2,
    )
    first, second = shown["completions"]
    assert second["text"] == HOSTILE
    assert (first["reward"], first["correct"], first["status"], first["advantage"]) == (
        0.0,
        False,
        "ok",
        -0.5,
    )
    assert (first["advantages"], first["extracted_answer"], second["extracted_answer"]) == (
        None,
        None,
        "5",
    )
    assert first["components"] == {"math": 0.0, "format": None}
    assert first["weight_versions"] == [[2, 0, 4], [3, 4, 7]]
    assert (
        len(first["tokens"])
        == len(first["logprobs"])
        == len(first["trainer_logprobs"])
        == len(first["token_ids"])
        == 7
    )
    assert first["trainer_logprobs"][0] - first["logprobs"][0] == pytest.approx(0.01, abs=1e-6)


def test_a_dropped_group_is_shown_with_its_reason(run: RunReader) -> None:
    shown = client(run).get("/dashboard/api/groups/group-9").json()
    assert (shown["reason"], shown["detail"], shown["step"]) == (
        "stale",
        "its weights are older than version 3",
        2,
    )
    (completion,) = shown["completions"]
    assert (completion["advantage"], completion["trainer_logprobs"], completion["reward"]) == (
        None,
        None,
        0.5,
    )


def test_the_groups_of_a_prompt_come_by_step(run: RunReader) -> None:
    answer = client(run).get("/dashboard/api/prompts/prompt%2F1").json()
    assert (answer["prompt_id"], [row["step"] for row in answer["groups"]]) == ("prompt/1", [1, 2])
    assert (
        client(run)
        .get("/dashboard/api/prompts/prompt%2F1", params={"limit": 1})
        .json()["groups"][0]["step"]
        == 2
    )
    assert "no group of such a prompt" in refused(
        client(run).get("/dashboard/api/prompts/nobody"), 404, "prompt_id"
    )


@pytest.mark.parametrize(
    ("path", "status", "field"),
    [
        ("groups?run=1", 404, "run"),
        ("groups?run=-1", 422, "run"),
        ("groups?run=one", 422, "run"),
        ("groups?limit=0", 422, "limit"),
        ("groups?limit=1001", 422, "limit"),
        ("groups?offset=9007199254740992", 422, "offset"),
        ("groups?reward_min=nan", 422, "reward_min"),
        ("groups?reward_max=1e999", 422, "reward_max"),
        ("groups?step_from=1.5", 422, "step_from"),
        ("groups?error=late", 422, "error"),
        ("groups?sort=id;drop", 422, "sort"),
        (f"groups?text={'x' * 1001}", 422, "text"),
        ("groups/nobody", 404, "id"),
        ("groups/group-1?step=2", 404, "id"),
        ("groups/group-1?step=-1", 422, "step"),
        ("groups/group-1?run=7", 404, "run"),
        ("prompts/prompt%2F1?run=7", 404, "run"),
    ],
)
def test_unanswerable_calls_are_refused_by_name(
    run: RunReader, path: str, status: int, field: str
) -> None:
    refused(client(run).get(f"/dashboard/api/{path}"), status, field)


def test_every_run_has_its_own_groups(run: RunReader, tmp_path: Path) -> None:
    write_lines(tmp_path / "other", 1, 2)
    both = client(run, RunReader(tmp_path / "other"))
    assert [
        both.get(f"/dashboard/api/groups?run={number}").json()["total"] for number in (0, 1)
    ] == [4, 64]


def test_a_removed_group_is_a_404_with_the_reason(run: RunReader) -> None:
    for directory in (run.directory / "groups", run.directory / "model"):
        assert directory.is_dir()
    (run.directory / "groups" / "step_000001.zip").unlink()
    said = refused(client(run).get("/dashboard/api/groups/group-1"), 404, "id")
    assert said.startswith(
        "evicted: the group is known, but its content is not: groups/ has no file of step 1: it "
        "was removed to make room (trainer.keep_groups_mb)"
    )
    (run.directory / "groups" / "step_000002.zip").write_bytes(b"half a file")
    said = refused(client(run).get("/dashboard/api/groups/group-4"), 404, "id")
    assert "the groups of step 2 cannot be read: File is not a zip file" in said


def test_a_file_of_another_attempt_is_not_taken_for_the_group(run: RunReader) -> None:
    (run.directory / "groups" / "step_000002.zip").write_bytes(
        (run.directory / "groups" / "step_000001.zip").read_bytes()
    )
    assert "step 2 belongs to another attempt" in refused(
        client(run).get("/dashboard/api/groups/group-4"), 404, "id"
    )


def test_without_a_tokenizer_texts_are_whole(run: RunReader) -> None:
    shutil.rmtree(run.directory / "model")
    shown = client(run).get("/dashboard/api/groups/group-1").json()
    assert shown["missing"] == [
        message for message in shown["missing"] if message.startswith("the texts of tokens: ")
    ]
    assert (shown["prompt_tokens"], shown["completions"][0]["tokens"], len(shown["missing"])) == (
        None,
        None,
        1,
    )
    assert shown["completions"][0]["text"] == "text 0"


def test_a_run_directory_with_nothing_in_it_says_what_is_missing(tmp_path: Path) -> None:
    answer = client(RunReader(tmp_path)).get("/dashboard/api/groups").json()
    assert (answer["total"], answer["groups"]) == (0, [])
    assert answer["problems"] == [
        f"{LINES} is missing: which groups a step trained on is not known"
    ]


def test_the_calls_are_described(run: RunReader) -> None:
    paths: dict[str, Any] = client(run).get("/openapi.json").json()["paths"]
    mine = {path: call["get"] for path, call in paths.items() if path.startswith("/dashboard/api/")}
    assert len(mine) == 3
    for call in mine.values():
        assert call["description"]
        assert {"401", "404", "422"} <= call["responses"].keys()
        schema = call["responses"]["200"]["content"]["application/json"]["schema"]
        assert schema["type"] == "object"


def test_answers_have_the_fields_that_the_page_reads(run: RunReader) -> None:
    answer = client(run).get("/dashboard/api/groups/group-1").json()
    fields = "id prompt_id prompt ground_truth epoch position metadata step reused reason detail marks lost_episodes missing created_at"
    assert answer.keys() == {*fields.split(), "weight", "prompt_tokens", "completions"}
    fields = "text token_ids logprobs reward finish_reason weight_versions tokens trainer_logprobs advantage advantages correct"
    more = "status components extracted_answer mask turns episode prompt_tokens special"
    assert answer["completions"][0].keys() == {*fields.split(), *more.split()}
    rows = client(run).get("/dashboard/api/groups").json()["groups"]
    fields = "step place id prompt_id prompt position versions reward rewards correct completions tokens advantage"
    assert rows[0].keys() == {
        *fields.split(),
        "delta",
        "marks",
        "reused",
        "reason",
        "detail",
        "completion",
        "regraded",
    }
    assert json.dumps(rows)
