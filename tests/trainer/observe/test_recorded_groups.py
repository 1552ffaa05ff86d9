"""What a run records of its groups, against definitions written anew: the line of a step, the
document of each group, and which files remain."""

import json
import logging
import random
import statistics
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from common.errors import ServiceError
from common.wire.schemas import Completion, Group
from trainer.observe.group_files import (
    DIRECTORY,
    LINES,
    GroupRecorder,
    GroupTexts,
    RecordedGroup,
    StepGroups,
    read_group,
    read_texts,
    recorded_steps,
)
from trainer.observe.regrades import (
    REGRADES,
    NewGrade,
    RegradedGroup,
    read_regrades,
    write_regrades,
)
from trainer.observe.run_dir import DETAILS


def random_completion(draw: random.Random, *, is_graded: bool) -> Completion:
    length = draw.randint(1, 6)
    mask = [draw.randint(0, 1) for _ in range(length)]
    mask[draw.randrange(length)] = 1  # the model sampled something of it
    text = draw.choice(["x = 5", "a\n  b\t c " * 90, "\ud800 broken", "", "word " * 200])
    return Completion(
        token_ids=np.array([draw.randrange(1 << 20) for _ in range(length)], np.int32),
        logprobs=np.array([-draw.random() for _ in range(length)], np.float32),
        text=text,
        finish_reason=draw.choice(["stop", "length", "abort"]),
        weight_versions=[(draw.randint(0, 9), 0, 1), (draw.randint(0, 9), 1, length)],
        reward=draw.uniform(-1, 1) if is_graded or draw.random() < 0.8 else float("nan"),
        correct=draw.random() < 0.5,
        verified=draw.random() < 0.9,
        status=draw.choice(["ok", "unparsable", "timeout"]),
        kept_counts=np.ones(length, np.int32),
        mask=draw.choice([None, np.array(mask, np.int32)]),
        prompt_ids=draw.choice([None, np.array([7, 8], np.int32)]),
    )


def random_item(draw: random.Random, number: int) -> RecordedGroup:
    """Returns a group that was trained on, or was dropped and may lack everything."""
    is_dropped = draw.random() < 0.4
    least = 0 if is_dropped else 1
    completions = [
        random_completion(draw, is_graded=not is_dropped) for _ in range(draw.randint(least, 4))
    ]
    trained = [
        len(each.token_ids) if each.mask is None else int(each.mask.sum()) for each in completions
    ]
    group = Group(
        id=f"group-{number}",
        prompt_id=f"prompt-{number}",
        prompt="How many? " * draw.choice([1, 150]),
        prompt_token_ids=np.array([3, 1 << 20, 5], np.int32),
        completions=completions,
        position=number,
        lost_episodes=draw.choice([[], ["it died"]]),
    )
    if is_dropped:
        return RecordedGroup(group, reason="stale", detail="too old")
    return RecordedGroup(
        group,
        advantages=[
            np.array([draw.uniform(-1, 1) for _ in range(count)], np.float32) for count in trained
        ],
        logprobs=[
            draw.choice([None, np.array([-draw.random() for _ in range(count)], np.float32)])
            for count in trained
        ],
        weight=draw.random(),
        reused=draw.random() < 0.5,
    )


def valid(text: str) -> str:
    return "".join("?" if 0xD800 <= ord(letter) < 0xE000 else letter for letter in text)


def graded(completion: Completion) -> float | None:
    return None if completion.reward != completion.reward else completion.reward


def trained_tokens(completion: Completion) -> list[int]:
    """Returns the places of the tokens that are trained on."""
    mask = [1] * len(completion.token_ids) if completion.mask is None else completion.mask
    return [place for place, kept in enumerate(mask) if kept]


def mean(numbers: list[float]) -> Any:
    return pytest.approx(statistics.fmean(numbers), abs=2e-6) if numbers else None


def expected_summary(item: RecordedGroup) -> dict[str, Any]:
    completions = item.group.completions
    rewards = [graded(each) for each in completions]
    known = [reward for reward in rewards if reward is not None]
    versions = [span[0] for each in completions for span in each.weight_versions]
    marks = {str(each.status) for each in completions} - {"ok"}
    marks |= {"truncated" for each in completions if each.finish_reason == "length"}
    marks |= {"aborted" for each in completions if each.finish_reason == "abort"}
    marks |= {"lost" for _ in item.group.lost_episodes}
    distances = [
        abs(float(logprobs[place]) - float(each.logprobs[token]))
        for each, logprobs in zip(completions, item.logprobs, strict=False)
        if logprobs is not None
        for place, token in enumerate(trained_tokens(each))
    ]
    first = None
    if completions:
        shown = " ".join(valid(completions[0].text[:480]).split())[:240]
        has_verdict = completions[0].verified and rewards[0] is not None
        first = {"text": shown, "correct": completions[0].correct if has_verdict else None}
    is_whole = known and len(known) == len(rewards)
    return {
        "id": item.group.id,
        "prompt_id": item.group.prompt_id,
        "position": item.group.position,
        "prompt": item.group.prompt[:1000],
        "versions": (min(versions), max(versions)) if versions else None,
        "reward": pytest.approx(statistics.fmean(known), abs=1e-4) if is_whole else None,
        "rewards": [None if each is None else round(each, 4) for each in rewards],
        "correct": (
            sum(each.correct for each in completions)
            if all(each.verified for each in completions)
            else None
        ),
        "tokens": [len(each.token_ids) for each in completions],
        "marks": sorted(marks),
        "advantage": mean([abs(float(each)) for row in item.advantages for each in row]),
        "delta": mean(distances),
        "reused": item.reused,
        "reason": item.reason,
        "detail": item.detail,
        "first": first,
    }


def spread(completion: Completion, values: Any) -> Any:
    """Returns a number for each token, 0 for those that are not trained on."""
    if values is None:
        return None
    row = [0.0] * len(completion.token_ids)
    for place, token in enumerate(trained_tokens(completion)):
        row[token] = float(values[place])
    return row


def numbers(array: Any) -> Any:
    return None if array is None else array.tolist()


@pytest.mark.parametrize("seed", range(12))
def test_a_step_is_recorded_as_it_was(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    items = [random_item(draw, number) for number in range(6)]
    trained = [item for item in items if not item.reason]
    dropped = [item for item in items if item.reason]
    recorder = GroupRecorder(tmp_path, 1 << 20, 0, whole=seed % 2 == 0)
    recorder.step(3, trained, dropped)
    recorder.flush()

    [line] = (tmp_path / LINES).read_bytes().splitlines()
    read = msgspec.json.decode(line, type=StepGroups)
    assert read.step == 3
    for summaries, of in ((read.groups, trained), (read.dropped, dropped)):
        assert [msgspec.structs.asdict(each) for each in summaries] == [
            {**expected, "first": summary.first}
            for summary, expected in zip(summaries, map(expected_summary, of), strict=True)
        ]
        firsts = [summary.first and msgspec.structs.asdict(summary.first) for summary in summaries]
        assert firsts == [expected_summary(item)["first"] for item in of]

    texts = read_texts(tmp_path, 3)
    for place, item in enumerate([*trained, *dropped]):
        shown = read_group(tmp_path, 3, place)
        assert shown is not None
        assert not DETAILS & shown.keys()
        assert shown["id"] == item.group.id
        assert shown["prompt_token_ids"] == item.group.prompt_token_ids.tolist()
        for name in ("reused", "weight", "reason", "detail"):
            assert shown[name] == getattr(item, name), name
        assert texts[place].id == item.group.id
        assert texts[place].prompt_tokens == item.group.prompt_token_ids.tolist()
        assert texts[place].reason == item.reason
        pairs = zip(
            shown["completions"], texts[place].completions, item.group.completions, strict=True
        )
        for index, (found, text, completion) in enumerate(pairs):
            assert not DETAILS & found.keys()
            assert found["text"] == text.text == valid(completion.text)
            assert found["reward"] == text.reward == graded(completion)
            assert text.finish_reason == completion.finish_reason
            for name in ("token_ids", "logprobs", "mask", "prompt_ids"):
                assert found[name] == numbers(getattr(completion, name)), name
            advantages = item.advantages[index] if item.advantages else None
            logprobs = item.logprobs[index] if item.logprobs else None
            assert found["advantages"] == spread(completion, advantages)
            assert found["trainer_logprobs"] == spread(completion, logprobs)
    assert read_group(tmp_path, 4, 0) is None


def test_a_damaged_file_is_named_and_its_texts_are_empty(tmp_path: Path) -> None:
    item = random_item(random.Random(1), 0)
    recorder = GroupRecorder(tmp_path, 1 << 20, 0)
    recorder.step(1, [item], [item])
    recorder.flush()
    with pytest.raises(ServiceError) as refused:
        read_group(tmp_path, 1, 2)  # the step has two
    assert (refused.value.code, refused.value.field) == ("damaged", "trainer.run_dir")
    [path] = recorded_steps(tmp_path).values()
    assert refused.value.value == str(path)

    content = path.read_bytes()
    place = content.index(b".msgpack") + 40
    path.write_bytes(content[:place] + bytes(8) + content[place + 8 :])
    first, second = read_texts(tmp_path, 1)
    assert first == GroupTexts()
    assert second.id == item.group.id
    assert read_texts(tmp_path, 2) == []


@pytest.mark.parametrize("seed", range(8))
def test_the_newest_files_that_fit_remain(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    steps = [[random_item(draw, number) for number in range(draw.randint(1, 4))] for _ in range(8)]
    every = GroupRecorder(tmp_path / "all", 1 << 30, 0)
    (tmp_path / "all").mkdir()
    for step, items in enumerate(steps, 1):
        every.step(step, items, [])
    every.flush()
    sizes = {step: path.stat().st_size for step, path in recorded_steps(tmp_path / "all").items()}
    assert len(sizes) == len(steps)

    limit = draw.randint(0, sum(sizes.values()))
    run_dir = tmp_path / "run"
    folder = run_dir / DIRECTORY
    folder.mkdir(parents=True)
    recorder = GroupRecorder(run_dir, limit, 0)
    there: list[int] = []
    step = 1
    while step <= len(steps):
        if draw.random() < 0.3:  # it starts again after an earlier step
            step = draw.randint(max(1, step - 2), step)
            (folder / f"step_{step:06d}.partial").write_bytes(b"half")
            recorder = GroupRecorder(run_dir, limit, step - 1)
            there = [each for each in there if each < step]
            assert sorted(recorded_steps(run_dir)) == there
        recorder.step(step, steps[step - 1], [])
        recorder.flush()
        if limit:
            there.append(step)
        while sum(sizes[each] for each in there) > limit:
            there.pop(0)
        assert sorted(recorded_steps(run_dir)) == there
        assert {path.name for path in folder.iterdir()} == {f"step_{n:06d}.zip" for n in there}
        step += 1


def test_without_room_for_files_nothing_is_packed(tmp_path: Path) -> None:
    recorder = GroupRecorder(tmp_path, 0, 0)
    recorder.step(1, [random_item(random.Random(1), 0)], [])
    recorder.flush()
    assert [path.name for path in tmp_path.iterdir()] == [LINES]


@pytest.mark.parametrize("has_drops", [True, False])
def test_a_run_that_fails_records_what_it_dropped_last(
    tmp_path: Path, has_drops: bool, caplog: pytest.LogCaptureFixture
) -> None:
    item = random_item(random.Random(1), 0)
    recorder = GroupRecorder(tmp_path, 1 << 20, 0)
    (tmp_path / DIRECTORY).touch()  # no file can be written there
    recorder.step(1, [item], [])
    with caplog.at_level(logging.ERROR):
        recorder.abort(2, [item] if has_drops else [])
    assert "groups" in caplog.text
    assert "step_000001.zip" in caplog.text
    lines = [json.loads(line) for line in (tmp_path / LINES).read_bytes().splitlines()]
    assert [line["step"] for line in lines] == ([1, 2] if has_drops else [1])

    recorder.flush()  # what failed was said
    (tmp_path / DIRECTORY).unlink()
    recorder.step(3, [item], [])
    recorder.flush()
    assert list(recorded_steps(tmp_path)) == [3]


def test_new_grades_replace_those_of_before(tmp_path: Path) -> None:
    assert read_regrades(tmp_path) == {}
    grade = NewGrade(reward=0.5, correct=None, answer="5", reason="é")
    first = RegradedGroup(step=1, id="a", changed=1, grades={0: grade})
    second = RegradedGroup(step=2, id="a", changed=2, grades={3: grade, 1: grade})
    for groups in ([first, second], [second]):
        path = write_regrades(tmp_path, groups)
        assert path == tmp_path / REGRADES
        assert read_regrades(tmp_path) == {(group.step, group.id): group for group in groups}
        assert list(tmp_path.iterdir()) == [path]
    path.write_bytes(b"{}\n" + path.read_bytes())
    assert read_regrades(tmp_path) == {(2, "a"): second}
