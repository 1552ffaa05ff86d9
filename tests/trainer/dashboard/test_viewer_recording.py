"""What a run records of its groups: those it trained on, as in the replay store and more, and why
it dropped others."""

import io
import json
import shutil
import sqlite3
import tracemalloc
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any
from zipfile import ZIP_DEFLATED, ZipFile

import httpx
import numpy as np
import pytest
from fastapi import FastAPI
from rich.console import Console

from common.errors import ServiceError
from common.process.storage import StorageFailed
from common.settings.config import Config
from common.wire.codec import decode_groups, plain
from common.wire.schemas import Prompt
from tests.support.errors import raises
from tests.support.runs.recorded_groups import group, record, trained
from tests.support.services.apps import tiny
from trainer import train_in_process
from trainer.dashboard.runs import RunReader
from trainer.observe.group_files import LINES, RecordedGroup, read_group, recorded_steps
from trainer.observe.problems import Problems
from trainer.observe.run_dir import read_lines
from trainer.rollouts.collector import CollectFailed

pytestmark = pytest.mark.integration


def run_dir(config: Config) -> Path:
    assert config.trainer.run_dir is not None
    return config.trainer.run_dir


def train(
    config: Config, transport: Callable[[FastAPI], httpx.AsyncBaseTransport] | None = None
) -> None:
    train_in_process(config, Console(file=io.StringIO()), transport)


def stored(config: Config) -> dict[str, dict[str, Any]]:
    """Every group in the replay store, by id."""
    with closing(sqlite3.connect(config.state_dir / "replay" / "replay.db")) as db:
        blobs = [row[0] for row in db.execute("SELECT data FROM blobs")]
    groups = [decode_groups(b"\x81\xa6groups\x91" + blob)[0] for blob in blobs]
    return {each.id: plain(each) for each in groups}


def test_a_run_records_what_it_trained_on(base_model: Path, tmp_path: Path) -> None:
    config = tiny(
        base_model,
        tmp_path,
        "--reward.functions",
        '["math", "length"]',
        "--optimizer.learning_rate",
        "1e-3",
    )
    train(config)
    lines, store = read_lines(run_dir(config) / LINES), stored(config)
    assert [line["step"] for line in lines] == [1, 2] == sorted(recorded_steps(run_dir(config)))
    computed = 0
    for line in lines:
        assert line["dropped"] == []
        assert len(line["groups"]) == 4
        for place, entry in enumerate(line["groups"]):
            content = read_group(run_dir(config), line["step"], place)
            assert content is not None
            beside = {name: content.pop(name) for name in ("reused", "weight", "reason", "detail")}
            assert beside == {"reused": False, "weight": 1.0, "reason": "", "detail": ""}
            advantages = [completion.pop("advantages") for completion in content["completions"]]
            logprobs = [completion.pop("trainer_logprobs") for completion in content["completions"]]
            wanted = json.loads(json.dumps(store[entry["id"]]))  # turns spans into lists
            assert wanted.pop("barred") == wanted.pop("prompt_routed_experts") == []
            for completion in wanted["completions"]:
                for name in ("kept_counts", "kept_tokens", "routed_experts"):
                    assert completion.pop(name) == []
            assert content == wanted
            assert all(
                completion["components"].keys() == {"math", "length"}
                for completion in content["completions"]
            )
            rewards = np.array([completion["reward"] for completion in content["completions"]])
            normalised = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
            for completion, own, theirs, expected in zip(
                content["completions"], advantages, logprobs, normalised, strict=True
            ):
                assert own == pytest.approx([expected] * len(completion["token_ids"]), abs=1e-4)
                assert (theirs is None) == (expected == 0)
                if theirs is not None:
                    computed += 1
                    assert theirs == pytest.approx(completion["logprobs"], abs=1e-3)
            assert entry["rewards"] == pytest.approx(rewards, abs=1e-4)
            assert entry["tokens"] == [
                len(completion["token_ids"]) for completion in content["completions"]
            ]
            assert entry["prompt"] == content["prompt"]
            assert entry["delta"] is None or entry["delta"] < 1e-3
    assert computed


def test_with_several_updates_of_a_batch_every_row_has_the_log_probabilities_before_them(
    base_model: Path, tmp_path: Path
) -> None:
    words = (
        "--algorithm.mini_batches",
        "2",
        "--algorithm.rollout_correction",
        "truncate",
        "--optimizer.learning_rate",
        "1e-2",
    )
    config = tiny(base_model, tmp_path, *words)
    train(config)
    for place in range(4):
        content = read_group(run_dir(config), 2, place)
        assert content is not None
        for completion in content["completions"]:
            assert completion["trainer_logprobs"] == pytest.approx(completion["logprobs"], abs=1e-3)


def test_a_run_on_rows_of_the_caller_says_so(base_model: Path, tmp_path: Path) -> None:
    config = tiny(base_model, tmp_path, "--trainer.max_steps", "1", "--evaluation.samples", "0")
    rows = [Prompt(id=str(i), prompt=f"{i} + 1?", ground_truth=str(i + 1)) for i in range(4)]
    train_in_process(config, Console(quiet=True), problems=Problems(rows, []))
    assert RunReader(run_dir(config)).summary().data == "rows of the caller"


def test_without_room_for_groups_there_are_only_lines(base_model: Path, tmp_path: Path) -> None:
    config = tiny(base_model, tmp_path, "--trainer.keep_groups_mb", "0", "--trainer.max_steps", "1")
    train(config)
    assert len(read_lines(run_dir(config) / LINES)) == 1
    assert not (run_dir(config) / "groups").exists()


class Failing(httpx.AsyncBaseTransport):
    """Refuses these calls to `/generate`, counted from 1, or all calls if none is given."""

    def __init__(self, app: FastAPI, *calls: int) -> None:
        self.inner, self.failing, self.calls = httpx.ASGITransport(app), calls, 0

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/generate":
            self.calls += 1
            if not self.failing or self.calls in self.failing:
                return httpx.Response(
                    400, json={"error": {"code": "bad", "message": "the engine has no wish to"}}
                )
        return await self.inner.handle_async_request(request)


def test_a_dropped_group_is_recorded_with_its_reason(base_model: Path, tmp_path: Path) -> None:
    config = tiny(base_model, tmp_path)
    train(config, lambda app: Failing(app, 2))
    lines = read_lines(run_dir(config) / LINES)
    dropped = [
        (line["step"], i, entry)
        for line in lines
        for i, entry in enumerate(line.get("dropped", ()))
    ]
    assert len(dropped) == 1
    step, place, entry = dropped[0]
    assert entry["reason"] == "generation"
    assert "the engine has no wish to" in entry["detail"]
    assert (entry["rewards"], entry["reward"], entry["versions"], entry["tokens"]) == (
        [],
        None,
        None,
        [],
    )
    content = read_group(run_dir(config), step, 4 + place)
    assert content is not None
    assert (content["id"], content["reason"], content["completions"]) == (
        entry["id"],
        "generation",
        [],
    )
    assert content["prompt"] == entry["prompt"]


def test_a_run_ended_by_dropped_groups_records_them(base_model: Path, tmp_path: Path) -> None:
    config = tiny(base_model, tmp_path, "--limits.max_failed_groups", "3")
    with pytest.raises(CollectFailed):
        train(config, Failing)
    (line,) = read_lines(run_dir(config) / LINES)
    assert (line["step"], line["groups"]) == (1, [])
    assert len(line["dropped"]) >= 3  # more may fail before the run ends
    assert {entry["reason"] for entry in line["dropped"]} == {"generation"}
    assert read_group(run_dir(config), 1, 2) is not None


@pytest.mark.integration
def test_a_resumed_run_has_no_groups_of_lost_steps(base_model: Path, tmp_path: Path) -> None:
    config = tiny(base_model, tmp_path)
    train(config)
    directory = run_dir(config)
    (directory / "groups" / "step_000009.zip").write_bytes(b"of a lost step")
    (directory / "groups" / "step_000009.partial").write_bytes(b"half of it")
    before = (directory / "groups" / "step_000001.zip").read_bytes()
    train(tiny(base_model, tmp_path, "--trainer.max_steps", "3"))
    assert sorted(recorded_steps(directory)) == [1, 2, 3]
    assert {path.name for path in (directory / "groups").iterdir()} == {
        f"step_00000{step}.zip" for step in (1, 2, 3)
    }
    assert (directory / "groups" / "step_000001.zip").read_bytes() == before
    assert [line["step"] for line in read_lines(directory / LINES)] == [1, 2, 3]


def test_ungraded_answers_have_no_reward(tmp_path: Path) -> None:
    item = group(1, [1.0, float("nan"), 0.0])
    item.completions[1].status = "timeout"
    item.completions[2].finish_reason = "length"
    record(
        tmp_path,
        [[RecordedGroup(item, reason="reward", detail="an answer could not be graded: timeout")]],
    )
    (line,) = read_lines(tmp_path / LINES)
    (entry,) = line["dropped"]
    assert (entry["reward"], entry["rewards"]) == (None, [1.0, None, 0.0])
    assert entry["marks"] == ["timeout", "truncated"]
    content = read_group(tmp_path, 1, 0)
    assert content is not None
    assert [completion["reward"] for completion in content["completions"]] == [1.0, None, 0.0]


def test_non_finite_numbers_are_recorded_as_none(tmp_path: Path) -> None:
    item = trained(group(1, [1.0, 0.0]), shift=float("nan"))
    record(tmp_path, [[item]])
    (line,) = read_lines(tmp_path / LINES)
    assert line["groups"][0]["delta"] is None
    assert read_group(tmp_path, 1, 0) is not None


def test_the_oldest_steps_are_removed_when_space_runs_out(tmp_path: Path) -> None:
    steps = [[trained(group(number, [0.0, 1.0]))] for number in range(6)]
    record(tmp_path / "all", steps)
    sizes = [path.stat().st_size for _, path in sorted(recorded_steps(tmp_path / "all").items())]
    record(tmp_path / "some", steps[:4], keep_bytes=sum(sizes[3:]))
    record(
        tmp_path / "some", steps[4:], keep_bytes=sum(sizes[3:]), done=4
    )  # a resumed run knows the existing ones
    assert sorted(recorded_steps(tmp_path / "some")) == [4, 5, 6]
    assert len(read_lines(tmp_path / "some" / LINES)) == 6
    record(tmp_path / "none", steps, keep_bytes=1)
    assert recorded_steps(tmp_path / "none") == {}


def test_a_member_of_countless_items_is_refused_without_filling_memory(tmp_path: Path) -> None:
    """A list of two billion nils."""
    content = b"\xdd\x7f\xff\xff\xff" + b"\xc0" * (32 << 20)
    (tmp_path / "groups").mkdir()
    with ZipFile(tmp_path / "groups" / "step_000001.zip", "w", ZIP_DEFLATED) as file:
        file.writestr("00000.msgpack", content)
    tracemalloc.start()
    try:
        with raises(ServiceError, code="damaged", field="trainer.run_dir"):
            read_group(tmp_path, 1, 0)
        assert tracemalloc.get_traced_memory()[1] < 128 << 20
    finally:
        tracemalloc.stop()


def test_a_file_that_is_damaged_or_cannot_be_written_is_named(tmp_path: Path) -> None:
    record(tmp_path, [[trained(group(1, [0.0, 1.0]))]])
    path = tmp_path / "groups" / "step_000001.zip"
    whole = path.read_bytes()
    for damaged in (b"", whole[: len(whole) // 2], whole[:60] + b"\xff" * 20 + whole[80:]):
        path.write_bytes(damaged)
        with raises(ServiceError, code="damaged"):
            read_group(tmp_path, 1, 0)
    path.write_bytes(whole)
    with raises(ServiceError, code="damaged", value=str(path)):
        read_group(tmp_path, 1, 7)
    shutil.rmtree(tmp_path / "groups")
    (tmp_path / "groups").write_text("a file in the way")
    unwritten = tmp_path / "groups" / "step_000002.zip"
    with raises(StorageFailed, field="trainer.run_dir", value=str(unwritten)):
        record(tmp_path, [[replace(trained(group(2, [0.0, 1.0])), weight=0.5)]], done=1)
