"""What a caller of the dashboard sees: parameters, refusals, headers, and every field of an answer.

The expectations are tables of what the page relies on.
"""

import io
import itertools
import json
import logging
import random
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal
from zipfile import ZipFile

import httpx
import numpy as np
import orjson
import pytest

from common.errors import ServiceError
from common.process.storage import StorageFailed
from common.wire import codec
from services.http.app import create_app
from tests.support.errors import raises
from tests.support.runs.recorded_groups import entry, group, record, trained
from tests.support.runs.run_files import evaluation, line, make_run, write
from trainer.cli.tiny_base import make_tokenizer
from trainer.dashboard import __main__ as command
from trainer.dashboard import group_index
from trainer.dashboard.app import PAGES, add_dashboard, create_dashboard_app
from trainer.dashboard.columns import Columns
from trainer.dashboard.group_detail import group_detail
from trainer.dashboard.group_index import GroupIndex, Query
from trainer.dashboard.run_facts import unsolvable, write_note
from trainer.dashboard.run_list import RunList
from trainer.dashboard.runs import RunReader
from trainer.dashboard.tokens import TokenTexts
from trainer.dashboard.verdict import verdict
from trainer.diagnosis.health import ServiceHealth
from trainer.observe.group_files import LINES
from trainer.observe.regrades import NewGrade, RegradedGroup, write_regrades

API = "/dashboard/api/"
RUN = {"run": 0}
"""The parameters with a default that every call about a run has."""
SEARCH = {
    **RUN,
    **{"offset": 0, "limit": 50, "text": "", "sort": "-step"},
    **dict.fromkeys(["around", "around_step", "step_from", "step_to", "reward_min", "reward_max"]),
    **dict.fromkeys(["length_min", "length_max", "error"]),
}
CALLS: dict[str, dict[str, Any] | None] = {
    "runs": None,
    "facts": RUN,
    "why": RUN,
    "series": {**RUN, "known": -1, "points": 600, "first": 0, "last": 2**53 - 1},
    "steps/{step}": RUN,
    "csv": RUN,
    "note": RUN,
    "diagnosis": RUN,
    "health": RUN,
    "groups": SEARCH,
    "groups/{group_id}": {**RUN, "step": None},
    "prompts/{prompt_id}": {**RUN, "limit": 200},
}
"""The defaults of the parameters of every call; None: it has none, and cannot miss anything."""


def app_of(*runs: RunReader) -> Any:
    return create_dashboard_app(lambda: [*runs])


def client(app: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x")


def test_every_call_has_the_defaults_and_the_errors_of_its_description(tmp_path: Path) -> None:
    described = app_of(RunReader(make_run(tmp_path, 1))).openapi()
    assert described["info"]["title"] == "dashboard"
    paths = {path for path in described["paths"] if path.startswith("/dashboard")}
    assert paths == {API + call for call in CALLS}, "the page itself is no call"
    assert "/" not in described["paths"]
    for call, defaults in CALLS.items():
        [of_call] = described["paths"][API + call].values()
        assert ("404" in of_call["responses"]) == (defaults is not None), call
        assert {"405", "500"}.isdisjoint(of_call["responses"])
        found = {
            each["name"]: each["schema"].get("default")
            for each in of_call.get("parameters", ())
            if each["in"] == "query"
        }
        assert found == (defaults or {}), call
        content = of_call["responses"]["200"]["content"]
        assert list(content) == ["text/csv" if call == "csv" else "application/json"]
        if call == "why":
            assert content["application/json"]["schema"]["type"] == ["object", "null"]
        if call == "csv":
            assert content["text/csv"]["schema"] == {"type": "string"}


MISSING = [
    *((f"{call}?run=2", "run", "2") for call in ("facts", "why", "series", "csv", "diagnosis")),
    *((f"{call}?run=2", "run", "2") for call in ("health", "groups", "steps/1", "groups/group-1")),
    ("prompts/p?run=2", "run", "2"),
    ("steps/7", "step", "7"),
    ("groups/nobody", "id", "nobody"),
    ("groups/group-1?step=2", "id", "group-1"),
    ("prompts/nobody", "prompt_id", "nobody"),
    ("../static/page.jsx", "name", "page.jsx"),
]
"""Calls about what is not there, with the field and the value of their refusals."""


async def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    first = make_run(tmp_path / "a", 2)
    write(first / LINES, [{"step": 1, "groups": [entry(1, prompt_id="p")]}])
    app = app_of(RunReader(first), RunReader(make_run(tmp_path / "b", 1)))
    async with client(app) as http:
        for path, field, value in MISSING:
            answer = await http.get(f"{API}{path}")
            error = answer.json()["error"]
            assert (answer.status_code, error["code"]) == (404, "not_found"), path
            assert (error["field"], error["value"]) == (field, value)
            assert error["remedy"]
            if field == "run":
                assert error["remedy"] == "use 0 to 1"
        answer = await http.put(f"{API}note?run=2", json={"text": ""})
        assert (answer.status_code, answer.json()["error"]["field"]) == (404, "run")
        assert (await http.get(f"{API}facts?run=1")).status_code == 200


async def test_data_is_never_kept_by_a_browser_and_the_page_is_asked_for_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_run(tmp_path, 2)
    write(tmp_path / LINES, [{"step": 1, "groups": [entry(1, prompt_id="p")]}])
    async with client(app_of(RunReader(tmp_path))) as http:
        with caplog.at_level(logging.DEBUG):
            for call in ("facts", "why", "series", "steps/1", "groups", "prompts/p"):
                answer = await http.get(API + call)
                kind = answer.headers["content-type"]
                assert (answer.status_code, kind) == (200, "application/json"), call
                assert answer.headers["cache-control"] == "no-store", call
            answer = await http.get(f"{API}csv")
            assert answer.headers["cache-control"] == "no-store"
            assert answer.headers["content-type"] == "text/csv; charset=utf-8"
        told = [each.levelname for each in caplog.records if each.name == "services.http.tracing"]
        assert set(told) == {"DEBUG"}, "an open page asks all the time"

        for path in ("/", "/dashboard"):
            moved = await http.get(path)
            assert (moved.status_code, moved.headers["location"]) == (307, "dashboard/")
        for path in PAGES - {"/", "/dashboard"}:
            answer = await http.get(path)
            headers = answer.headers
            assert headers["cache-control"] == "no-cache", path
            assert headers["x-content-type-options"] == "nosniff"
            assert headers["referrer-policy"] == "no-referrer"
            rules = headers["content-security-policy"].split("; ")
            assert rules[0] == "default-src 'self'"
            assert set(rules[1:]) == {
                "base-uri 'none'",
                "form-action 'none'",
                "frame-ancestors 'none'",
            }
            if path.endswith(".js"):
                assert headers["content-type"].startswith("text/javascript"), path


async def test_a_note_beyond_a_mebibyte_is_not_read(tmp_path: Path) -> None:
    headers = {"content-type": "application/json"}
    async with client(app_of(RunReader(make_run(tmp_path, 1)))) as http:
        for size, status in (((1 << 20) - 100, 422), ((1 << 20) + 1, 413)):
            body = json.dumps({"text": "x" * size})
            answer = await http.put(f"{API}note", content=body, headers=headers)
            assert answer.status_code == status


async def test_a_regraded_group_is_listed_and_shown_with_its_grades(tmp_path: Path) -> None:
    item = group(1, [1.0, 0.0, 0.5])
    record(tmp_path, [[trained(item)], [trained(item)]])
    grade = NewGrade(reward=0.25, correct=None, answer="6", reason="now")
    write_regrades(tmp_path, [RegradedGroup(1, item.id, 1, {2: grade})])
    expected = {"reward": 0.25, "correct": None, "answer": "6", "reason": "now"}
    async with client(app_of(RunReader(tmp_path))) as http:
        rows = (await http.get(f"{API}groups", params={"sort": "step"})).json()["groups"]
        assert [row["regraded"] for row in rows] == [
            {"step": 1, "id": item.id, "changed": 1, "grades": {"2": expected}},
            None,
        ]
        shown = (await http.get(f"{API}groups/{item.id}", params={"step": 1})).json()
        assert [each.get("regraded") for each in shown["completions"]] == [None, None, expected]
        shown = (await http.get(f"{API}groups/{item.id}")).json()
        assert shown["step"] == 2
        assert [each.get("regraded") for each in shown["completions"]] == [None] * 3


OPTIONAL = ("mask", "advantages", "trainer_logprobs", "verified", "components", "turns")
ABSENT = ("prompt_ids", "episode", "extracted_answer", "finish_reason", "weight_versions", "text")


@pytest.mark.parametrize("seed", range(30))
def test_a_group_of_any_version_is_shown_with_what_its_file_has(tmp_path: Path, seed: int) -> None:
    """Earlier versions lack fields; those of later ones are left out."""
    draw = random.Random(seed)
    record(tmp_path, [[trained(group(1, [1.0, 0.0]))]])
    path = tmp_path / "groups" / "step_000001.zip"
    with ZipFile(path) as file:
        content = codec.unpack(file.read("00000.msgpack"))
    length = 7
    for completion in content["completions"]:
        mask = [draw.randrange(2) for _ in range(length)]
        one = draw.uniform(-1, 1)
        spread = draw.choice([[one] * length, [draw.uniform(-1, 1) for _ in range(length)]])
        made = {
            "mask": draw.choice([None, np.array(mask, "<i4").tobytes()]),
            "advantages": draw.choice([None, np.array(spread, "<f4").tobytes()]),
            "trainer_logprobs": draw.choice([None, np.array(spread, "<f4").tobytes()]),
            "verified": draw.choice([True, False]),
            "correct": draw.choice([True, False]),
            "reward": draw.choice([None, 0.0, 0.5]),
            "status": draw.choice(["ok", "timeout"]),
            "components": {"math": 0.5},
            "turns": draw.choice([None, [], [{"start": 0, "end": 3, "kept": 1}]]),
            "prompt_ids": draw.choice([None, np.array([3, 4], "<i4").tobytes()]),
            "episode": draw.choice([None, 2]),
            "of a later version": 1,
        }
        completion |= made
        for name in (*OPTIONAL, *ABSENT):
            if name != "trainer_logprobs" and draw.random() < 0.3:
                completion.pop(name, None)
    content["created_at"] = draw.choice([0.0, 5.0])
    with ZipFile(path, "w") as file:
        file.writestr("00000.msgpack", codec.encode(content))
    reason = draw.choice(["", "stale"])
    row = {
        **{"id": "group-1", "step": 1, "place": 0, "reason": reason, "detail": "why"},
        **{"reused": False, "marks": ["lost"], "regraded": None},
    }
    shown = group_detail(tmp_path, row, ServiceError("no tokenizer here"))

    assert shown["created_at"] == (content["created_at"] or None)
    assert (shown["marks"], shown["reason"], shown["detail"]) == (["lost"], reason, "why")
    assert shown["prompt_tokens"] is None
    lacks_scores = any(each["trainer_logprobs"] is None for each in content["completions"])
    assert [each.partition(":")[0] for each in shown["missing"]] == [
        *["the trainer's log-probabilities of some completions"] * (lacks_scores and not reason),
        "the texts of tokens",
    ]
    for found, kept in zip(shown["completions"], content["completions"], strict=True):

        def numbers(name: str, kept: Any = kept) -> list[float | None] | None:
            if kept.get(name) is None:
                return None
            values = np.frombuffer(kept[name], "<f4").tolist()
            of_mask = kept.get("mask")
            counts = [1] * length if of_mask is None else np.frombuffer(of_mask, "<i4").tolist()
            return [value if counts[n] else None for n, value in enumerate(values)]

        advantages = numbers("advantages")
        trained_on = [each for each in advantages or [] if each is not None]
        mean = pytest.approx(sum(trained_on) / len(trained_on)) if trained_on else None
        assert found["advantage"] == mean
        assert found["advantages"] == (advantages if len(set(trained_on)) > 1 else None)
        assert found["logprobs"] == numbers("logprobs")
        assert found["trainer_logprobs"] == numbers("trainer_logprobs")
        is_graded = kept["reward"] is not None
        has_verdict = is_graded and kept.get("verified") is not False
        assert found["correct"] == (kept["correct"] if has_verdict else None)
        is_usual = not is_graded and kept["status"] == "ok"
        assert found["status"] == (None if is_usual else kept["status"])
        assert found["components"] == ({"math": 0.5} if "components" in kept else {})
        assert found["turns"] == ([[0, 3]] if kept.get("turns") else [])
        assert (found["tokens"], found["special"], found["prompt_tokens"]) == (None, [], None)
        for name in ABSENT[1:]:
            assert found[name] == kept.get(name), name
        assert "of a later version" not in found
    assert orjson.dumps(shown)


@pytest.mark.parametrize(
    ("step", "is_there"), [(None, True), (9, True), (5, True), (2, True), (4, False)]
)
async def test_a_page_is_found_by_a_group_and_perhaps_its_step(
    tmp_path: Path, step: int | None, is_there: bool
) -> None:
    """The newest steps come first. A group is shown as of its newest step, too."""
    numbers = {9: [6], 8: [4], 5: [6], 4: [3], 2: [6], 1: [2]}
    lines = [{"step": 100, "groups": [entry(number) for number in range(100, 105)]}]
    lines += [{"step": s, "groups": list(map(entry, each))} for s, each in numbers.items()]
    write(tmp_path / LINES, lines[::-1])
    (tmp_path / "metrics.jsonl").touch()
    asked: dict[str, Any] = {"around": "group-6", "limit": 1, "offset": 3}
    if step is not None:
        asked["around_step"] = step
    async with client(app_of(RunReader(tmp_path))) as http:
        found = (await http.get(f"{API}groups", params=asked)).json()
    order = [100] * 5 + list(numbers)
    assert found["offset"] == (order.index(step or 9) if is_there else 3)
    assert (found["groups"][0]["id"] == "group-6") == is_there


async def test_a_call_reads_for_a_moment_or_until_it_knows_the_page_of_a_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock on which a line takes a second, a call reads one."""
    seconds = itertools.count()
    monkeypatch.setattr(group_index, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
    make_run(tmp_path, 9)
    write(tmp_path / LINES, [{"step": step, "groups": [entry(step)]} for step in range(1, 9)])
    async with client(app_of(RunReader(tmp_path))) as http:
        found = (await http.get(f"{API}groups")).json()
        assert (found["total"], found["reading"] is None) == (1, False)
        found = (await http.get(f"{API}groups", params={"around": "group-3"})).json()
        assert (found["total"], found["reading"]) == (8, None)
        part = (await http.get(f"{API}series", params={"first": 3, "last": 5})).json()
        assert part["steps"] == [3, 4, 5]


@pytest.mark.parametrize("live", [True, False])
async def test_only_the_process_that_trains_asks_the_services(tmp_path: Path, live: bool) -> None:
    well = ServiceHealth(name="data-server", state="healthy", text="well", running=3)

    async def ask() -> list[ServiceHealth]:
        return [well]

    app = create_app("dashboard", open_paths=PAGES)
    health: Any = SimpleNamespace(ask=ask)
    add_dashboard(app, lambda: [RunReader(make_run(tmp_path, 1), live=live)], health)
    async with client(app) as http:
        found = (await http.get(f"{API}health")).json()
        [run] = (await http.get(f"{API}runs")).json()
    services = [well.model_dump()] if live else []
    assert found == {"asked": live, "services": services}
    assert run["live"] == live


def test_a_search_reads_as_much_as_it_has_time_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0

    def later() -> float:
        nonlocal now
        now += 1.0
        return now

    monkeypatch.setattr(group_index, "time", SimpleNamespace(monotonic=later))
    lines = [{"step": step, "groups": [entry(step)]} for step in range(1, 11)]
    write(tmp_path / LINES, lines)
    sizes = [len(json.dumps(each)) + 1 for each in lines]
    index = GroupIndex(tmp_path)
    assert index.left() is None
    known = 0
    # The clock is read once before the lines and once after each of them.
    for patience, more in ((3.5, 4), (0.5, 1), (2.0, 3)):
        total, _, _ = index.search(Query(), limit=1, offset=0, patience_s=patience)
        known += more
        assert total == known
        assert index.left() == {"done": sum(sizes[:known]), "of": sum(sizes)}
    total, _, _ = index.search(Query(), limit=1, offset=0, patience_s=1.5)
    assert (total, index.left()) == (10, None), "the last line leaves nothing"
    write(tmp_path / LINES, lines[:9])
    assert index.search(Query(), limit=1, offset=0, patience_s=0.0)[0] == 1, "read again"
    assert index.find("group-9") is not None, "who asks for one group waits for all lines"
    assert index.left() is None


def test_a_generation_is_another_after_every_change_and_only_then(tmp_path: Path) -> None:
    draw = random.Random(5)
    run = RunReader(make_run(tmp_path, 3))
    metrics = tmp_path / "metrics.jsonl"
    evaluations = tmp_path / "evaluations.jsonl"
    seen = [run.series()["generation"]]
    newest = 3
    for _ in range(40):
        change = draw.choice(["nothing", "step", "evaluation", "again", "odd", "undone", "fewer"])
        match change:
            case "step":
                newest += 1
                write(metrics, [line(newest)], "a")
            case "evaluation":
                write(evaluations, [evaluation(newest, 0.5)], "a")
            case "again":  # as a resumed run does
                newest = draw.randint(1, newest)
                changed = [line(step, reward=draw.random()) for step in range(1, newest + 1)]
                write(metrics, changed)
            case "odd":  # not a step of ours
                write(metrics, [{"step": "one"}, {"step": 2**53 + 1}, {"step": -(2**53) - 1}], "a")
            case "undone":
                newest = draw.randint(1, newest)
                write(metrics, [line(newest, reward=-draw.random())], "a")
            case "fewer":
                write(evaluations, [evaluation(0, draw.random())])
        found = run.series(seen[-1])
        is_known = change in ("nothing", "odd")
        assert (found == {"generation": seen[-1]}) == is_known, change
        if not is_known:
            assert found["generation"] not in seen
            assert (found["newest"], found["steps"].tolist()[-1]) == (newest, newest)
            seen.append(found["generation"])
    write(metrics, [{"step": 2**53}], "a")
    assert run.series()["newest"] == 2**53


def test_a_chart_shows_six_hundred_points_of_all_steps(tmp_path: Path) -> None:
    make_run(tmp_path, 0)
    write(tmp_path / "metrics.jsonl", [line(step) for step in range(650)])
    found = RunReader(tmp_path).series()
    assert (len(found["steps"]), found["steps"][0], found["steps"][-1]) == (600, 0, 649)
    part = RunReader(tmp_path).series(first=10, last=12)
    assert part["steps"].tolist() == [10, 11, 12]
    assert part["verdict"]["level"] == "good", "of all steps"
    sft = make_run(tmp_path / "sft", 3, reward=None)
    assert RunReader(sft).series()["verdict"] == {"level": "none", "text": ""}
    empty = make_run(tmp_path / "empty", 0)
    assert RunReader(empty).series()["verdict"]["text"].startswith("Too early")
    assert RunReader(empty).series()["newest"] is None


@pytest.mark.parametrize("seed", range(8))
def test_trained_tokens_add_up_over_all_steps_before_a_point(seed: int) -> None:
    draw = random.Random(seed)
    columns = Columns()
    totals = []
    total = 0
    for step in range(draw.randint(2, 30)):
        tokens = draw.choice([None, draw.randrange(1000)])
        total += tokens or 0
        totals.append(total)
        columns.append(step, {"step": step, "time": 9.0, "update": {"trained_tokens": tokens}})
    first = draw.randrange(len(totals))
    found = columns.thinned(columns.rows(first, len(totals)), draw.randint(1, 9))
    steps = found["steps"].tolist()
    assert found["columns"]["tokens_total"].tolist() == [totals[step] for step in steps]
    series = [*found["columns"].values(), *found.get("low", {}).values()]
    series += found.get("high", {}).values()
    assert {each.dtype for each in series} == {np.dtype(np.float32)}, "half the bytes to send"


def test_no_name_starts_a_formula_in_a_spreadsheet() -> None:
    columns = Columns()
    names = ["=1", "+1", "-1", "@x", "\tx", "\rx", "a=1", "'", "1"]
    columns.append(1, dict.fromkeys(names, 0.5))
    head = columns.csv().split("\r\n")[0]
    shown = head.replace('"', "").split(",")
    assert shown == [
        "step",
        *(f"'{name}" if name[0] in "=+-@\t\r" else name for name in sorted(names)),
    ]


@pytest.mark.parametrize("steps", [12, 19, 20, 25, 60])
@pytest.mark.parametrize("ratio", [3.98, 4.02])
@pytest.mark.parametrize("kind", ["rise", "fall"])
def test_four_standard_errors_are_sure(
    steps: int, ratio: float, kind: Literal["rise", "fall"]
) -> None:
    """Rewards are noise around two or three levels that are this many standard errors apart."""
    draw = np.random.default_rng(steps)
    window = max(4, steps // 5)
    noise = draw.normal(0, 1, steps)
    first = noise[:window]
    last = noise[-window:]
    between = np.zeros(steps - 2 * window)
    high, low = (last, first) if kind == "rise" else (first, last)
    error = np.sqrt((np.var(high, ddof=1) + np.var(low, ddof=1)) / window)
    high += low.mean() - high.mean() + ratio * error
    between += low.mean() + 0.25 * ratio * error
    found = verdict(np.concatenate([first, between, last]), np.full(steps, 0.5))
    sure = "good" if kind == "rise" else "bad"
    assert found["level"] == (sure if ratio > 4 else "warn")


@pytest.mark.parametrize("share", [0.4, 0.6])
def test_a_reward_has_fallen_that_lost_more_than_half_of_its_gain(share: float) -> None:
    wave = np.tile([0.0, 1e-6], 6)
    levels = np.repeat([0.0, 1.0, 1.0 - share], 4)
    found = verdict(levels + wave, np.full(12, np.nan))
    assert found["level"] == ("bad" if share > 0.5 else "good")
    still = verdict(np.zeros(12), np.append(np.full(8, 0.5), np.full(4, 0.95)))
    assert still["level"] == "good", "solved in the newest steps"
    assert verdict(np.zeros(12), np.full(3, 1.0))["level"] == "warn", "too few to say"
    assert verdict(np.zeros(12), np.full(4, 0.949))["level"] == "warn"


def test_a_tokenizer_is_that_of_the_model_or_else_of_a_checkpoint(tmp_path: Path) -> None:
    with raises(
        ServiceError,
        field="trainer.run_dir",
        value=str(tmp_path / "model" / "tokenizer.json"),
    ):
        TokenTexts.of_run(tmp_path)
    tokenizers = {
        name: make_tokenizer(iter([word]))
        for name, word in {
            "checkpoints/step_3": "three three",
            "checkpoints/step_2": "two two",
            "model": "own own",
        }.items()
    }
    for name, tokenizer in tokenizers.items():
        tokenizer.save_pretrained(tmp_path / name)
        text = "own three two now"
        used = "checkpoints/step_2" if name != "model" else name
        if name != "checkpoints/step_3":
            ids = tokenizers[used].encode(text, add_special_tokens=False)
            assert "".join(TokenTexts.of_run(tmp_path).texts(ids)) == text


def test_special_tokens_are_shown_and_end_an_incomplete_character(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(iter(["a"]))
    tokenizer.add_tokens(["<plain>"])
    tokenizer.save_pretrained(tmp_path / "model")
    texts = TokenTexts.of_run(tmp_path)
    end = tokenizer.eos_token_id
    plain = tokenizer.convert_tokens_to_ids("<plain>")
    assert texts.texts([end, plain]) == [tokenizer.eos_token, "<plain>"]
    assert texts.special([plain, end]) == [1]
    part: list[int] = tokenizer.encode("🍎", add_special_tokens=False)[:-1]
    assert part, "a character of several tokens"
    assert texts.texts(part)[-1] == "\N{REPLACEMENT CHARACTER}"
    assert texts.texts([*part, end])[-1].endswith(tokenizer.eos_token)


def test_a_damaged_file_of_ground_truths_is_named_and_a_missing_one_is_nothing(
    tmp_path: Path,
) -> None:
    assert unsolvable(tmp_path) == []
    path = tmp_path / "ground_truths.json"
    damaged: list[Any] = [{}, {"checked": 1}, {"checked": 1, "unsolvable": 3}, []]
    damaged.append({"checked": "x", "unsolvable": {"a": "b"}})
    for content in damaged:
        path.write_text(json.dumps(content))
        [said] = unsolvable(tmp_path)
        assert said.startswith("ground_truths.json cannot be read: "), content
    path.unlink()
    path.mkdir()
    [said] = unsolvable(tmp_path)
    assert "Is a directory" in said
    with raises(
        StorageFailed, field="RUN_DIR", value=str(tmp_path / "gone" / "notes.md")
    ) as failed:
        write_note(tmp_path / "gone", "text")
    assert failed.value.message.startswith("notes.md cannot be written")


def test_the_command_says_where_the_page_is_before_it_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = io.BytesIO()
    seen: list[Any] = []

    def serve(app: Any, host: str, port: int) -> None:
        seen.append((written.getvalue().decode(), app.title, host, port))

    monkeypatch.delenv("API_TOKEN", raising=False)
    monkeypatch.setattr(command, "serve", serve)
    monkeypatch.setattr(command, "setup_logging", seen.append)
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written))
    first = str(make_run(tmp_path / "first", 1))
    second = str(make_run(tmp_path / "second", 1))
    for port in (1, 65535):
        command.main([first, second, "--port", str(port)])
    told = "dashboard http://127.0.0.1:{}/dashboard/\n"
    assert seen == [
        "dashboard",
        (told.format(1), "dashboard", "127.0.0.1", 1),
        "dashboard",
        (told.format(1) + told.format(65535), "dashboard", "127.0.0.1", 65535),
    ]


def test_the_help_shows_every_option_with_its_default() -> None:
    text = re.sub(r"\s+", " ", command.parser().format_help())
    assert "rlhf dashboard RUN_DIR [RUN_DIR ...] [--port PORT] [--host ADDRESS]" in text
    assert " RUN_DIR directory of a run, or one above several" in text
    assert "--port PORT port (default 8004)" in text
    assert "--host ADDRESS address (default 127.0.0.1, this machine)" in text
    with pytest.raises(SystemExit):
        command.parser().parse_args([])


def test_a_page_lists_the_runs_that_start_while_it_is_open(tmp_path: Path) -> None:
    """A directory that has no run is no reason to look again and again."""
    make_run(tmp_path / "a", 1)
    listed = RunList([tmp_path])
    assert listed() is listed()
    assert [run.directory for run in listed()] == [tmp_path / "a"]
    assert [run.name for run in RunList([tmp_path / "a"])()] == ["a"]
