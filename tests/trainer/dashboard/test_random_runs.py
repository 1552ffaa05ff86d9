"""What the dashboard makes of random runs, with a model of a few lines for each of its parts."""

import csv
import io
import json
import math
import random
from array import array
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest

from common.errors import ConfigError
from common.process.run_lock import RunLock
from common.settings.config import Config
from tests.support.runs.recorded_groups import entry, group, record, trained
from tests.support.runs.run_files import make_run, write
from trainer.cli.tiny_base import make_tokenizer
from trainer.dashboard import __main__ as command
from trainer.dashboard import columns as columns_module
from trainer.dashboard import run_list, runs
from trainer.dashboard.app import create_dashboard_app
from trainer.dashboard.columns import Columns, step_numbers
from trainer.dashboard.group_detail import group_detail
from trainer.dashboard.group_index import GroupIndex, Query
from trainer.dashboard.run_facts import changed_settings, read_note, write_note
from trainer.dashboard.run_list import RunList
from trainer.dashboard.runs import RunReader
from trainer.dashboard.tokens import TokenTexts
from trainer.dashboard.verdict import verdict
from trainer.diagnosis.facts import Facts
from trainer.observe.group_files import LINES, RecordedGroup
from trainer.observe.regrades import NewGrade, RegradedGroup, write_regrades


def random_line(draw: random.Random, step: int) -> dict[str, Any]:
    names = ["a", "b", "c", "d", "e"]
    numbers = {name: draw.uniform(-9, 9) for name in names if draw.random() < 0.6}
    return {
        "step": step,
        "time": 1.8e9 + step,
        **numbers,
        "alarms": {name: f"alarm {name}" for name in "xy" if draw.random() < 0.2},
        "hints": {name: f"hint {name}" for name in "xy" if draw.random() < 0.2},
    }


@pytest.mark.parametrize("seed", range(12))
def test_rows_and_columns_are_those_of_the_newest_attempt(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    draw = random.Random(seed)
    most = draw.choice([4, 500])
    monkeypatch.setattr(columns_module, "MAX_COLUMNS", most)
    columns = Columns()
    lines: dict[int, dict[str, Any]] = {}
    known: list[str] = []
    step = 0
    for _ in range(draw.randint(0, 40)):
        step += draw.choice([1, 1, 1, 1, 3, -4])  # a resumed run begins again where it was
        step = max(step, 0)
        line = random_line(draw, step)
        lines = {before: each for before, each in lines.items() if before < step}
        lines[step] = line
        known += [name for name in step_numbers(line) if name not in known]
        known = known[:most]
        columns.append(step, line)

    rows = {
        number: {name: value for name, value in step_numbers(line).items() if name in known}
        for number, line in lines.items()
    }
    assert columns.steps.tolist() == list(rows)
    assert len(columns) == len(rows)
    for name in [*known, "unknown"]:
        expected = [row.get(name, math.nan) for row in rows.values()]
        assert np.array_equal(columns.column(name), expected, equal_nan=True), name
        for count in (1, 5):
            newest = [each for each in expected[-count:] if not math.isnan(each)]
            mean = pytest.approx(sum(newest) / len(newest)) if newest else None
            assert columns.last(name, count) == mean
    for number in range(step + 3):
        assert columns.row(number) == rows.get(number, {})
    notes = {
        number: [
            {"kind": kind, "text": text}
            for kind in ("alarm", "hint")
            for text in line[f"{kind}s"].values()
        ]
        for number, line in lines.items()
    }
    assert columns.notes == {number: each for number, each in notes.items() if each}

    head, *body = csv.reader(io.StringIO(columns.csv()))
    assert head == ["step", *sorted(known)]
    read = [{k: float(v) for k, v in zip(head, row, strict=True) if v} for row in body]
    assert read == [{"step": number, **row} for number, row in rows.items()]

    first = draw.randint(0, max(rows, default=0))
    last = draw.randint(first, max(rows, default=0))
    shown = columns.rows(first, last)
    assert columns.steps[shown].tolist() == [each for each in rows if first <= each <= last]
    check_thinned(columns, [number for number in rows if first <= number <= last], rows, draw)


def check_thinned(
    columns: Columns, steps: list[int], rows: dict[int, dict[str, float]], draw: random.Random
) -> None:
    if not steps:
        return
    points = draw.randint(1, len(steps) + 2)
    found = columns.thinned(columns.rows(steps[0], steps[-1]), points)
    ends = found["steps"].tolist()
    assert len(ends) == min(points, len(steps))
    assert ends[-1] == steps[-1]
    places = [-1, *(steps.index(end) for end in ends)]
    parts = [steps[begin + 1 : end + 1] for begin, end in pairwise(places)]
    sizes = [len(part) for part in parts]
    assert sum(sizes) == len(steps)
    assert max(sizes) - min(sizes) <= 1
    assert found["times"].tolist() == [rows[end]["time"] for end in ends]
    is_merged = len(parts) < len(steps)
    assert ("low" in found) == ("high" in found) == is_merged
    names = {name for row in rows.values() for name in row} - {"time"}
    assert found["columns"].keys() >= names
    for name in names:
        values = [[rows[step][name] for step in part if name in rows[step]] for part in parts]
        means = [sum(each) / len(each) if each else math.nan for each in values]
        assert np.allclose(found["columns"][name], means, equal_nan=True, atol=1e-4)
        if is_merged:
            lows = [min(each, default=math.nan) for each in values]
            highs = [max(each, default=math.nan) for each in values]
            assert np.allclose(found["low"][name], lows, equal_nan=True)
            assert np.allclose(found["high"][name], highs, equal_nan=True)


@pytest.mark.parametrize("seed", range(60))
def test_a_run_learns_when_its_ends_are_four_standard_errors_apart(seed: int) -> None:
    draw = np.random.default_rng(seed)
    steps = int(draw.integers(5, 80))
    shape = np.interp(np.arange(steps), [0, steps / 2, steps], draw.uniform(0, 0.3, 3))
    reward = shape + draw.normal(0, draw.choice([0.0, 0.01, 0.05]), steps)
    accuracy = np.full(steps, draw.choice([0.5, 0.96, np.nan]))
    with_gaps = np.insert(reward, [0, 2], np.nan)
    found = verdict(with_gaps, accuracy)
    if steps < 12:
        assert found.keys() == {"level", "text"}
        assert found["level"] == "none"
        return

    window = max(4, min(steps // 5, 100))
    parts = [reward[k * window : (k + 1) * window] for k in range(steps // window)]
    start = parts[0]
    end = reward[-window:]
    best = parts[int(np.argmax([part.mean() for part in parts]))]

    def apart(high: Any, low: Any) -> float:
        square = (np.var(high) + np.var(low)) / (window - 1)
        difference = high.mean() - low.mean()
        with np.errstate(divide="ignore", invalid="ignore"):
            return 0.0 if difference == 0 else float(difference / np.sqrt(square))

    fell = best.mean() - end.mean()
    gained = best.mean() - start.mean()
    level = "warn"
    if fell > gained / 2 and apart(best, end) > 4:
        level = "bad"
    elif apart(end, start) > 4 or accuracy[0] == 0.96:
        level = "good"
    assert found["level"] == level
    means = (found["start"], found["end"], found["window"])
    assert means == (pytest.approx(start.mean()), pytest.approx(end.mean()), window)


def test_the_summary_of_a_run_is_that_of_its_newest_steps(tmp_path: Path) -> None:
    draw = random.Random(1)
    for number in range(16):
        directory = tmp_path / str(number)
        count = draw.choice([0, 3, 14])
        make_run(directory, 0)
        total = draw.choice([None, 3, 14, 99])
        choices: list[list[float | None]] = [[2.0], [2.0, None], [None]]
        gpus = draw.choice(choices)
        lines: list[dict[str, Any]] = [
            {
                "step": step,
                "time": 1.8e9 + step,
                "total_steps": total,
                "seconds": {"update": draw.random(), "waiting": draw.random()},
                "reward": draw.random(),
                "gpus": draw.choice(gpus),
            }
            for step in range(1, count + 1)
        ]
        write(directory / "metrics.jsonl", lines)
        trained_on = draw.choice([0, 2])
        scored = {"step": 0, "num_samples": 8, "trained_on": trained_on, "accuracy": 0.5}
        write(directory / "evaluations.jsonl", [scored])
        is_sft = draw.random() < 0.3
        if is_sft and lines:
            lines[-1]["examples"] = 4
            write(directory / "metrics.jsonl", lines)
        holds = draw.random() < 0.5
        lock = RunLock(directory, "group")
        if holds:
            lock.__enter__()
        reader = RunReader(directory)
        found = reader.summary(5)
        if holds:
            lock.__exit__(None, None, None)

        assert (found.run, found.name, found.live) == (5, str(number), False)
        assert found.directory == str(directory)
        assert found.step == (count or None)
        assert found.time == (1.8e9 + count if count else None)
        assert found.total_steps == (total if count else None)
        state = "running" if holds else "stopped"
        if total is not None and count >= total:
            state = "finished"
        assert found.state == (state if count else "empty")
        recent = [line["reward"] for line in lines[-10:]]
        assert found.reward == (pytest.approx(sum(recent) / len(recent)) if recent else None)
        seconds = [sum(line["seconds"].values()) for line in lines]
        assert found.hours == pytest.approx(sum(seconds) / 3600)
        costs = [
            None if line["gpus"] is None else line["gpus"] * each
            for line, each in zip(lines, seconds, strict=True)
        ]
        is_known = bool(costs) and None not in costs
        expected = pytest.approx(sum(filter(None, costs)) / 3600) if is_known else None
        assert found.gpu_hours == expected
        assert (found.recipe == "sft") == (is_sft and bool(count))
        leaks = [each for each in found.problems if "2 of 8 held-out" in each]
        assert len(leaks) == (trained_on > 0)
        assert any("no step yet" in each for each in found.problems) == (not count)
        assert found.held_out == {
            "step": 0,
            "num_samples": 8,
            **{"trained_on": trained_on, "accuracy": 0.5},
        }


def test_facts_say_what_differs_from_the_defaults_and_where_alarms_begin(tmp_path: Path) -> None:
    config = Config()
    config.trainer.max_staleness = 2
    config.trainer.run_dir = tmp_path / "elsewhere"
    (tmp_path / "config.json").write_text(config.model_dump_json())
    (tmp_path / "metrics.jsonl").touch()
    reader = RunReader(tmp_path)
    facts = reader.facts()
    assert facts["changed"] == {"trainer.max_staleness": 2}
    assert changed_settings({"trainer.max_staleness": 0, "unknown": 1}) == {}
    assert facts["config"]["trainer.max_staleness"] == 2
    old = facts["limits"]["update.kl_rollout"]
    assert (old["alarm"], old["above"]) == ("kl_rollout", True)
    assert not facts["limits"]["update.effective_sample_size"]["above"]
    config.trainer.max_staleness = 0
    (tmp_path / "config.json").write_text(config.model_dump_json())
    assert reader.facts()["limits"]["update.kl_rollout"]["value"] < old["value"]
    assert facts["stages"] == [
        *("waiting", "stragglers", "generation", "reward", "replay"),
        *("update", "publish", "evaluation"),
    ]


@pytest.mark.parametrize("live", [True, False])
def test_a_diagnosis_is_asked_for_again_after_five_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, live: bool
) -> None:
    now = 100.0
    asked: list[str] = []

    def answer(kind: str) -> Any:
        def read(directory: Path) -> Facts:
            asked.append(kind)
            return Facts(directory=str(directory), now=float(len(asked)), state="empty")

        return read

    monkeypatch.setattr(runs, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(runs, "collect", answer("processes"))
    monkeypatch.setattr(runs, "read_facts", answer("files"))
    reader = RunReader(tmp_path, live=live)
    for at, count in ((100.0, 1), (104.9, 1), (105.1, 2), (106.0, 2)):
        now = at
        found = reader.diagnosis()
        assert found.first_line.startswith("empty")
        assert asked == ["processes" if live else "files"] * count


MARKS = ["truncated", "timeout", "unparsable", "lost"]


def random_entry(draw: random.Random, number: int) -> dict[str, Any]:
    return entry(
        number,
        prompt_id=f"prompt-{draw.randrange(4)}",
        prompt=draw.choice(["Straße", "How many?", "1 + 1"]),
        reward=draw.choice([None, draw.random()]),
        tokens=[draw.randrange(50), draw.randrange(50)],
        marks=sorted(draw.sample(MARKS, draw.choice([0, 0, 1, 2]))),
        advantage=draw.choice([None, draw.random()]),
        delta=draw.random(),
        reused=draw.random() < 0.3,
    )


@pytest.mark.parametrize("seed", range(6))
def test_a_search_finds_what_a_look_at_every_group_finds(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    lines = []
    rows: list[dict[str, Any]] = []
    prompts: dict[str, str] = {}
    for step in range(1, 6):
        line: dict[str, Any] = {"step": step, "groups": [], "dropped": []}
        for place in range(6):
            made = random_entry(draw, draw.randrange(20))
            is_dropped = place >= 4
            if is_dropped:
                made["reason"] = draw.choice(["stale", "reward"])
            line["dropped" if is_dropped else "groups"].append(made)
            prompts.setdefault(made["prompt_id"], made["prompt"])
            marks = [*made["marks"], *["reused"] * made["reused"]]
            if is_dropped:
                marks += ["dropped", made["reason"]]
            rows.append({**made, "step": step, "place": place, "marks": marks})
        lines.append(line)
    write(tmp_path / LINES, lines)
    grade = NewGrade(reward=1.0, correct=True, answer="1")
    regraded = {(row["step"], row["id"]) for row in draw.sample(rows, 4)}
    write_regrades(
        tmp_path, [RegradedGroup(step, name, 1, {0: grade}) for step, name in sorted(regraded)]
    )
    index = GroupIndex(tmp_path)
    for _ in range(25):
        error = draw.choice([None, "any", "none", "regraded", "dropped", "stale", "reused", *MARKS])
        text = draw.choice(["", "", "STRASSE", "prompt-1", rows[3]["id"], "nowhere"])
        sort = draw.choice(["", "-"]) + draw.choice(
            ["step", "reward", "length", "advantage", "delta", "position"]
        )
        bounds = {
            name: draw.choice([None, value])
            for name, value in {
                "step_from": draw.randint(1, 5),
                "step_to": draw.randint(1, 5),
                "reward_min": draw.random() / 2,
                "reward_max": 0.5 + draw.random() / 2,
                "length_min": draw.randrange(30),
                "length_max": 20 + draw.randrange(30),
            }.items()
        }

        def matches(row: dict[str, Any], error: Any = error, text: Any = text, of: Any = bounds):  # type: ignore[no-untyped-def]
            measured = {"step": row["step"], "reward": row["reward"], "length": max(row["tokens"])}
            for name, least, most in (
                ("step", of["step_from"], of["step_to"]),
                ("reward", of["reward_min"], of["reward_max"]),
                ("length", of["length_min"], of["length_max"]),
            ):
                value = measured[name]
                if (least is not None or most is not None) and value is None:
                    return False
                if (least is not None and value < least) or (most is not None and value > most):
                    return False
            prompt = prompts[row["prompt_id"]].casefold()
            if text and text not in (row["prompt_id"], row["id"]) and text.casefold() not in prompt:
                return False
            is_odd = bool(set(MARKS) & set(row["marks"])) or "dropped" in row["marks"]
            special = {
                None: True,
                "any": is_odd,
                "none": not is_odd,
                "regraded": (row["step"], row["id"]) in regraded,
            }
            return special[error] if error in special else error in row["marks"]

        def order(row: dict[str, Any], sort: str = sort) -> Any:
            column = sort.removeprefix("-")
            value = max(row["tokens"]) if column == "length" else row[column]
            sign = -1 if sort.startswith("-") else 1
            return value is None, sign * (value or 0), -row["step"], row["place"]

        expected = sorted(filter(matches, rows), key=order)
        limit = draw.randint(1, 7)
        offset = draw.randint(0, 9)
        query = Query(error=error, text=text, sort=sort, **bounds)
        total, begin, found = index.search(query, limit=limit, offset=offset)
        assert (total, begin) == (len(expected), offset)
        page = expected[offset : offset + limit]
        assert [(r["step"], r["place"]) for r in found] == [(r["step"], r["place"]) for r in page]
        for row, of in zip(found, page, strict=True):
            assert row["marks"] == of["marks"]
            assert row["prompt"] == prompts[row["prompt_id"]]
            assert (row["regraded"] is not None) == ((row["step"], row["id"]) in regraded)
            assert row["completions"] == 2
        if expected:
            place = draw.randrange(len(expected))
            sought = (expected[place]["id"], expected[place]["step"])
            _, begin, found = index.search(query, limit=limit, offset=0, around=sought)
            first = next(i for i, r in enumerate(expected) if (r["id"], r["step"]) == sought)
            if sum((r["id"], r["step"]) == sought for r in expected) == 1:
                assert begin == first // limit * limit
            assert sought in [(row["id"], row["step"]) for row in found]
        _, begin, _ = index.search(query, limit=limit, offset=3, around=("none", 1))
        assert begin == 3

    for name in prompts:
        of_prompt = [row for row in rows if row["prompt_id"] == name]
        found = index.of_prompt(name, 4)
        newest = sorted(of_prompt, key=lambda row: (row["step"], row["place"]))[-4:]
        assert [(r["step"], r["place"]) for r in found] == [(r["step"], r["place"]) for r in newest]
    for row in rows:
        steps = [each["step"] for each in rows if each["id"] == row["id"]]
        newest_row = index.find(row["id"])
        assert newest_row is not None
        assert newest_row["step"] == max(steps)
        of_step = index.find(row["id"], row["step"])
        assert of_step is not None
        assert of_step["step"] == row["step"]
        assert index.find(row["id"], 9) is None


@pytest.mark.parametrize("mask", [None, [1, 1, 0, 0, 1, 1, 1]])
@pytest.mark.parametrize("is_regraded", [True, False])
def test_a_group_in_full_has_a_number_for_every_token_that_was_trained_on(
    tmp_path: Path, mask: list[int] | None, is_regraded: bool
) -> None:
    item = group(1, [1.0, 0.0, 0.5])
    item.created_at = 5.0
    spread = [0.25] * 7
    for completion in item.completions:
        completion.mask = None if mask is None else np.array(mask, np.int32)
    trained_count = 7 if mask is None else sum(mask)
    recorded = RecordedGroup(
        item,
        advantages=[
            np.full(trained_count, 0.5, np.float32),
            np.linspace(0, 1, trained_count).astype(np.float32),
            np.full(trained_count, -0.5, np.float32),
        ],
        logprobs=[np.full(trained_count, 0.25, np.float32), None, None],
        weight=0.75,
        reused=True,
    )
    item.completions[2].verified = False
    record(tmp_path, [[recorded], [RecordedGroup(item, reason="stale", detail="old")]])
    if is_regraded:
        grade = NewGrade(reward=0.5, correct=False, answer="6", reason="now")
        write_regrades(tmp_path, [RegradedGroup(1, item.id, 1, {2: grade})])
    index = GroupIndex(tmp_path)
    row = index.find(item.id, 1)
    assert row is not None
    make_tokenizer(iter(["a"])).save_pretrained(tmp_path / "model")
    texts = TokenTexts.of_run(tmp_path)
    shown = group_detail(tmp_path, row, texts)

    first, second, third = shown["completions"]

    def masked(values: list[float]) -> list[float | None]:
        of_mask = zip(values, mask or [1] * 7, strict=True)
        return [value if kept else None for value, kept in of_mask]

    assert first["logprobs"] == pytest.approx(
        masked(item.completions[0].logprobs.tolist()), abs=1e-6
    )
    assert first["trainer_logprobs"] == masked(spread)
    assert second["trainer_logprobs"] is None
    assert [each["advantage"] for each in shown["completions"]] == pytest.approx([0.5, 0.5, -0.5])
    assert (first["advantages"], third["advantages"]) == (None, None)
    assert [each for each in second["advantages"] if each is not None] == pytest.approx(
        np.linspace(0, 1, trained_count).tolist()
    )
    assert [each["correct"] for each in shown["completions"]] == [True, False, None]
    assert first["tokens"] == texts.texts(list(range(3, 10)))
    assert shown["prompt_tokens"] == texts.texts([3, 4])
    assert (shown["weight"], shown["reused"], shown["created_at"]) == (0.75, True, 5.0)
    assert len(shown["missing"]) == 1, "some were not scored"
    assert ("regraded" in third) == is_regraded
    assert "regraded" not in first
    if is_regraded:
        assert third["regraded"]["reason"] == "now"

    dropped = index.find(item.id, 2)
    assert dropped is not None
    shown = group_detail(tmp_path, dropped, texts)
    assert (shown["missing"], shown["reason"], shown["detail"]) == ([], "stale", "old")
    assert [each["advantage"] for each in shown["completions"]] == [None] * 3


def test_the_texts_of_tokens_are_together_the_whole_text(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(iter(["How many apples? é 🍎"]))
    tokenizer.save_pretrained(tmp_path / "checkpoints" / "step_2")
    texts = TokenTexts.of_run(tmp_path)
    ids: list[int] = tokenizer.encode("How é 🍎 now", add_special_tokens=False)
    assert "".join(texts.texts(ids)) == "How é 🍎 now"
    assert len(texts.texts(ids)) == len(ids)
    end = tokenizer.eos_token_id
    assert texts.special([*ids[:2], end, ids[0], end]) == [2, 4]
    assert texts.texts([*ids, 1 << 20])[-1] == f"⟨{1 << 20}⟩"
    apple = tokenizer.encode("🍎", add_special_tokens=False)
    if len(apple) > 1:
        assert texts.texts(apple[:-1])[-1] == "\N{REPLACEMENT CHARACTER}"
    assert texts.texts([]) == []


def test_a_note_is_kept_until_it_is_empty(tmp_path: Path) -> None:
    assert read_note(tmp_path) == ""
    write_note(tmp_path, "é\n")
    assert read_note(tmp_path) == "é\n"
    assert [path.name for path in tmp_path.iterdir()] == ["notes.md"]
    (tmp_path / "notes.md").write_bytes(b"\xff" + b"x" * 30_000)
    assert read_note(tmp_path) == "\N{REPLACEMENT CHARACTER}" + "x" * 19_999
    write_note(tmp_path, "  \n")
    assert list(tmp_path.iterdir()) == []
    write_note(tmp_path, "")


def test_runs_are_found_three_levels_below_and_later_ones_are_added(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(run_list, "time", SimpleNamespace(monotonic=lambda: now))
    root = tmp_path / "runs"
    for path in ("b", "a/x", "a/y/z", "a/y/z/inside", "c/d/e/f", ".hidden", "g"):
        make_run(root / path, 1)
    (root / "g" / "metrics.jsonl").unlink()
    (root / "g" / "attempts.jsonl").unlink()
    (root / "g" / "config.json").write_text("{}")  # of a model
    listed = RunList([root, root / "b"])
    assert [run.name for run in listed()] == ["a/x", "a/y/z", "b"]
    make_run(root / "a" / "later", 1)
    now = 102.9
    assert len(listed()) == 3
    now = 103.0
    assert [run.name for run in listed()] == ["a/x", "a/y/z", "b", "a/later"]

    other = make_run(tmp_path / "other" / "b", 1)
    both = RunList([root / "b", other])
    assert [run.name for run in both()] == ["b", str(other.resolve())]
    with pytest.raises(ConfigError):
        RunList([root, tmp_path / "none"])


async def test_calls_have_the_bounds_of_their_parameters(tmp_path: Path) -> None:
    first = make_run(tmp_path / "runs" / "first", 8)
    write(first / LINES, [{"step": 1, "groups": [entry(n, prompt_id="p") for n in range(5)]}])
    record(tmp_path / "runs" / "second", [[trained(group(1, [1.0, 0.0]))]])
    (tmp_path / "runs" / "second" / "attempts.jsonl").write_text("{}\n")
    app = create_dashboard_app(RunList([tmp_path / "runs"]))
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://x/dashboard/api/") as http:
        whole = (await http.get("series")).json()
        assert whole["steps"] == list(range(1, 9))
        part = (await http.get("series", params={"first": 2, "last": 6, "points": 2})).json()
        assert (part["steps"][-1], len(part["steps"])) == (6, 2)
        known = await http.get("series", params={"known": whole["generation"]})
        assert known.json() == {"generation": whole["generation"]}
        assert known.headers["cache-control"] == "no-store"
        for name, value in (("points", 1), ("points", 5001), ("first", -1), ("known", -2)):
            assert (await http.get("series", params={name: value})).status_code == 422, name

        step = (await http.get("steps/3")).json()
        assert (step["step"], step["time"], step["numbers"]["reward"]) == (
            3,
            1.8e9 + 3,
            pytest.approx(1 - math.exp(-3 / 40)),
        )
        missing = await http.get("steps/9")
        assert (missing.status_code, missing.json()["error"]["field"]) == (404, "step")
        rows = list(csv.reader(io.StringIO((await http.get("csv")).text)))
        assert [row[0] for row in rows] == ["step", *map(str, range(1, 9))]
        assert (await http.get("why")).json() is None
        (first / "why.json").write_text('{"step": 3}')
        assert (await http.get("why")).json() == {"step": 3}
        assert (await http.get("health")).json() == {"asked": False, "services": []}
        assert (await http.get("diagnosis")).json()["first_line"]
        note = await http.put("note", json={"text": "mine"})
        assert note.json() == {"text": "mine"}
        assert (await http.get("runs")).json()[0]["note"] == "mine"
        assert (await http.put("note", json={"text": "x" * 20_001})).status_code == 422

        groups = (await http.get("groups", params={"limit": 2, "offset": 4})).json()
        assert (groups["total"], groups["offset"], len(groups["groups"])) == (5, 4, 1)
        assert groups["reading"] is None
        around: dict[str, Any] = {"limit": 2, "around": "group-3", "around_step": 1}
        page = (await http.get("groups", params=around)).json()
        assert "group-3" in [row["id"] for row in page["groups"]]
        prompt = (await http.get("prompts/p", params={"limit": 2})).json()
        assert [row["id"] for row in prompt["groups"]] == ["group-3", "group-4"]
        assert (prompt["prompt_id"], prompt["prompt"]) == ("p", "What is 0 + 1?")
        assert len((await http.get("prompts/p")).json()["groups"]) == 5
        detail = (await http.get("groups/group-1", params={"run": 1, "step": 1})).json()
        assert (detail["id"], len(detail["completions"])) == ("group-1", 2)
        assert any("tokenizer" in each for each in detail["missing"])
        assert (await http.get("groups/group-9", params={"run": 1})).status_code == 404


@pytest.mark.parametrize("token", ["", "0123456789abcdef0123456789abcdef"])
def test_the_command_serves_the_page_at_its_address(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    token: str,
) -> None:
    served: list[Any] = []
    monkeypatch.setenv("API_TOKEN", token)
    monkeypatch.setattr(command, "serve", lambda app, host, port: served.append((host, port)))
    monkeypatch.setattr(command, "setup_logging", lambda _: None)
    run = make_run(tmp_path / "run", 1)
    command.main([str(run)])
    command.main([str(run), "--port", "9000", "--host", "localhost"])
    assert served == [("127.0.0.1", 8004), ("localhost", 9000)]
    first, second = capsys.readouterr().out.split()[1::2]
    suffix = "#token=$API_TOKEN" if token else ""
    assert first == f"http://127.0.0.1:8004/dashboard/{suffix}"
    assert second == f"http://localhost:9000/dashboard/{suffix}"
    for port in ("0", "65536"):
        with pytest.raises(ConfigError) as refused:
            command.main([str(run), "--port", port])
        assert (refused.value.field, refused.value.value) == ("--port", port)


@pytest.mark.parametrize("seed", range(4))
def test_totals_of_a_line_are_the_sums_of_their_parts(seed: int) -> None:
    draw = random.Random(seed)
    line: dict[str, Any] = json.loads(json.dumps(random_line(draw, 3)))
    tokens = draw.choice([0, 7])
    line["seconds"] = draw.choice([{}, {"update": 1.0, "waiting": 2.5}])
    line["dropped"] = {"stale": 1, "reward": 3}
    line["lost_episodes"] = {"died": 2}
    line["update"] = {"trained_tokens": tokens}
    found = step_numbers(line)
    assert (found["dropped"], found["lost_episodes"]) == (4, 2)
    assert found["seconds"] == sum(line["seconds"].values())
    rate = tokens / 3.5 if tokens and line["seconds"] else None
    assert found.get("tokens_per_s") == rate
    assert found["alarms"] == len(line["alarms"])
    assert {name for name in found if name.startswith("alarm.")} == {
        f"alarm.{name}" for name in line["alarms"]
    }
    assert "step" not in found
    columns = Columns()
    assert columns.steps == array("q")
    assert columns.csv() == "step\r\n"
