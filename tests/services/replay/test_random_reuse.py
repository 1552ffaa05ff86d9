"""What the replay buffer stores, removes, lists and draws again, over random calls and restarts, by a
model in memory.
"""

import json
import os
import random
import sqlite3
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.errors import ConfigError, InvalidInput
from common.settings.sections import ReplaySection
from common.wire import codec
from common.wire.schemas import Group, PriorityUpdate, SampleRequest
from services.replay import sampling
from services.replay.buffer import Experience, ReplayBuffer, unpack_groups
from services.replay.database import Full
from tests.support.batches.replay_groups import make_group
from tests.support.errors import raises

CAPACITY = 24


@dataclass
class Kept:
    """A group in the model."""

    group: Group
    is_consumed: bool = False
    priority: float | None = None
    draws: int = 0

    @property
    def turn(self) -> tuple[int, int, str]:
        return self.group.weight_version, self.group.position, self.group.id


@dataclass
class Model:
    """What is stored, in the order in which it came."""

    groups: dict[str, Kept] = field(default_factory=dict)
    removed: set[str] = field(default_factory=set)
    lone: list[Experience] = field(default_factory=list)
    counts: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(
            ("added", "duplicates", "evicted", "removed", "dropped"), 0
        )
    )
    largest: float = 1.0
    drawn: dict[str, tuple[int | None, list[str], list[float]]] = field(default_factory=dict)
    updates: dict[str, int] = field(default_factory=dict)

    @property
    def size(self) -> int:
        return len(self.lone) + sum(len(each.group.completions) for each in self.groups.values())

    @property
    def waiting(self) -> int:
        kept = self.groups.values()
        return sum(len(each.group.completions) for each in kept if not each.is_consumed)

    def make_room(self, needed: int) -> bool:
        """Removes the oldest of what has been trained on, then lone answers; returns whether there
        is room.
        """
        if self.waiting + needed > CAPACITY:
            return False
        consumed = [name for name, each in self.groups.items() if each.is_consumed]
        for name in sorted(consumed, key=lambda each: self.groups[each].turn):
            if self.size + needed <= CAPACITY:
                break
            del self.groups[name]
            self.removed.add(name)
            self.counts["removed"] += 1
        while self.size + needed > CAPACITY:
            del self.lone[0]
        return True

    def reusable(self, request: SampleRequest) -> list[str]:
        most = request.max_times_sampled
        return [
            name
            for name, each in sorted(self.groups.items(), key=lambda item: item[1].turn)
            if each.is_consumed
            and each.group.weight_version >= request.min_version
            and (most is None or each.draws < most)
        ]


class Play:
    """A buffer and its model, which both get the same calls."""

    def __init__(self, seed: int, path: Path) -> None:
        self.draw = random.Random(seed)
        self.path = path
        self.model = Model()
        self.number = 0
        self.buffer = self.opened()

    def opened(self) -> ReplayBuffer:
        config = ReplaySection(capacity=CAPACITY, lease_s=100.0)
        return ReplayBuffer(config, self.path, clock=lambda: 5.0)

    def restart(self) -> None:
        self.buffer.close()
        self.buffer = self.opened()

    def add(self) -> None:
        draw = self.draw
        groups: list[Group] = []
        for _ in range(draw.randint(1, 3)):
            self.number += 1
            name = draw.choice([f"g{self.number}", f"g{draw.randint(1, self.number)}"])
            group = make_group(
                name,
                version=draw.randint(0, 4),
                position=draw.randint(0, 30),
                rewards=tuple(draw.choice([-1.0, 0.0, 0.5]) for _ in range(draw.randint(1, 3))),
                prompt_id=f"p{draw.randint(0, 3)}",
            )
            if draw.random() < 0.3:
                group.completions[-1].verified = False
            groups.append(group)
        model = self.model
        new: dict[str, Group] = {}
        for group in groups:
            if group.id not in model.groups and group.id not in model.removed:
                new.setdefault(group.id, group)
        needed = sum(len(group.completions) for group in new.values())
        waiting = model.waiting
        if not model.make_room(needed):
            with raises(Full, field="replay.capacity", value=str(CAPACITY), status=503) as error:
                self.buffer.add(groups)
            assert f"{needed} completions: {waiting} of {CAPACITY} wait" in error.value.message
            return
        counts = {"added": len(new), "duplicates": len(groups) - len(new)}
        assert self.buffer.add(groups) == counts
        model.groups |= {name: Kept(group) for name, group in new.items()}
        for name, count in counts.items():
            model.counts[name] += count

    def add_lone(self) -> None:
        draw = self.draw
        lone: list[Experience] = []
        for _ in range(draw.randint(1, 3)):
            self.number += 1
            text = f"e{self.number}"
            truth = draw.choice([None, "4"])
            reward = draw.choice([-1.0, 0.25])
            lone.append(Experience(prompt=text, response="r", reward=reward, ground_truth=truth))
        if self.model.make_room(len(lone)):
            self.model.lone += lone
            assert self.buffer.add_experiences(lone) == self.model.size
        else:
            with pytest.raises(Full):
                self.buffer.add_experiences(lone)

    def ack(self) -> None:
        model = self.model
        names = self.draw.sample(sorted(model.groups), min(3, len(model.groups)))
        newly = [name for name in names if not model.groups[name].is_consumed]
        assert self.buffer.store.ack([*names, *sorted(model.removed)[:1]]) == len(newly)
        for name in newly:
            kept = model.groups[name]
            kept.is_consumed = True
            if kept.priority is None:
                kept.priority = model.largest

    def set_priorities(self) -> None:
        draw = self.draw
        model = self.model
        names = draw.sample(sorted(model.groups), min(2, len(model.groups)))
        priorities = [draw.choice([0.0, 0.5, 1.0, 3.0]) for _ in names]
        request_id = draw.choice([None, f"u{draw.randint(0, 5)}"])
        update = PriorityUpdate(
            ids=[*names, "unknown"], priorities=[*priorities, 0.25], request_id=request_id
        )
        if request_id in model.updates:
            assert self.buffer.set_priorities(update) == model.updates[request_id]
            return
        changed = sum(model.groups[name].is_consumed for name in names)
        assert self.buffer.set_priorities(update) == changed
        for name, priority in zip(names, priorities, strict=True):
            model.groups[name].priority = priority
        model.largest = max([model.largest, 0.25, *priorities])
        if request_id is not None:
            model.updates[request_id] = changed

    def sample(self) -> None:
        draw = self.draw
        model = self.model
        request_id = draw.choice([None, f"s{draw.randint(0, 5)}"])
        request = SampleRequest(
            count=draw.randint(1, 4),
            min_version=draw.choice([0, 0, 2]),
            max_times_sampled=draw.choice([None, 1, 3]),
            priority_exponent=draw.choice([0.0, 0.6]),
            importance_exponent=0.4,
            seed=draw.randint(0, 99),
            request_id=request_id,
            step=None if request_id is None else draw.choice([None, 1, 4]),
        )
        if request_id is not None and request_id in model.drawn:
            _, names, weights = model.drawn[request_id]
        else:
            names, weights = self.expected(request)
            for name in names:
                model.groups[name].draws += 1
            if request_id is not None and names:
                model.drawn[request_id] = request.step, names, weights
        left = [at for at, name in enumerate(names) if name in model.groups]
        found = self.buffer.sample(request)
        groups = unpack_groups(found.blobs)
        assert [group.id for group in groups] == [names[at] for at in left]
        stored = [model.groups[names[at]].group for at in left]
        assert [codec.encode(group) for group in groups] == [codec.encode(each) for each in stored]
        assert found.weights == pytest.approx([weights[at] for at in left])
        assert found.weights.dtype == np.float32

    def expected(self, request: SampleRequest) -> tuple[list[str], list[float]]:
        names = self.model.reusable(request)
        kept = [self.model.groups[name] for name in names]
        priorities = np.array([each.priority for each in kept], np.float64)
        chances = sampling.probabilities(priorities, request.priority_exponent)
        included = sampling.inclusion(chances, request.count)
        drawn = sampling.draw(included, np.random.default_rng(request.seed))
        if not len(drawn):
            return [], []
        weights = sampling.importance_weights(included, drawn, request.importance_exponent)
        return [names[at] for at in drawn], weights.tolist()

    def reset(self) -> None:
        model = self.model
        position = self.draw.choice([None, 20])
        step = self.draw.choice([None, 2])
        dropped = [
            name
            for name, each in model.groups.items()
            if not each.is_consumed or (position is not None and each.group.position >= position)
        ]
        assert self.buffer.reset_fresh(position, step) == len(dropped)
        for name in dropped:
            del model.groups[name]
        model.counts["dropped"] += len(dropped)
        for request_id, (drawn_at, names, _) in list(model.drawn.items()):
            if step is not None and drawn_at is not None and drawn_at >= step:
                for name in names:
                    if name in model.groups:
                        model.groups[name].draws -= 1
                del model.drawn[request_id]

    def clear(self) -> None:
        self.buffer.store.clear()
        self.model.groups.clear()
        self.model.lone.clear()
        self.model.removed.clear()
        self.model.largest = 1.0

    def check(self) -> None:
        model = self.model
        groups = list(model.groups.values())
        answers = [each for kept in groups for each in kept.group.completions]
        rewards = [*(each.reward for each in answers), *(each.reward for each in model.lone)]
        consumed = sum(each.is_consumed for each in groups)
        assert self.buffer.stats() == {
            "capacity": CAPACITY,
            "size": model.size,
            "avg_reward": pytest.approx(sum(rewards) / model.size if rewards else 0.0),
            "positive_ratio": pytest.approx(
                sum(reward > 0 for reward in rewards) / model.size if rewards else 0.0
            ),
            "groups": len(groups),
            "fresh": len(groups) - consumed,
            "leased": 0,
            "consumed": consumed,
            "experiences": len(model.lone),
            "max_priority": model.largest,
            **model.counts,
        }
        state = self.draw.choice([None, "fresh", "consumed"])
        shown = [listed(each) for each in groups]
        shown = [each for each in shown if state in (None, each["state"])]
        offset = self.draw.randint(0, 3)
        assert self.buffer.store.listing(4, offset, state) == shown[offset : offset + 4]
        found = self.buffer.sample_experiences(CAPACITY, self.draw.random() < 0.5, seed=3)
        texts = [(each.prompt, each.response, each.reward, each.ground_truth) for each in found]
        wanted: list[Any] = [("1 + 1?", each.text, each.reward, "2") for each in answers]
        wanted += [(each.prompt, "r", each.reward, each.ground_truth) for each in model.lone]
        assert sorted(texts, key=repr) == sorted(wanted, key=repr)


def listed(kept: Kept) -> dict[str, Any]:
    group = kept.group
    answers = group.completions
    is_known = all(each.verified for each in answers)
    return {
        "id": group.id,
        "prompt_id": group.prompt_id,
        "state": "consumed" if kept.is_consumed else "fresh",
        "version": group.weight_version,
        "position": group.position,
        "completions": len(answers),
        "priority": kept.priority,
        "times_sampled": kept.draws,
        "created": 5.0,
        "correct": sum(each.correct for each in answers) if is_known else None,
        "mean_reward": pytest.approx(sum(each.reward for each in answers) / len(answers)),
    }


@pytest.mark.parametrize("seed", range(6))
def test_the_buffer_is_that_of_the_model(seed: int, tmp_path: Path) -> None:
    play = Play(seed, tmp_path / "replay.db")
    deeds = [play.add, play.add, play.ack, play.ack, play.sample, play.sample]
    deeds += [play.set_priorities, play.set_priorities, play.add_lone, play.restart]
    for turn in range(60):
        play.draw.choice(deeds)()
        if turn % 12 == 11:
            play.draw.choice([play.reset, play.reset, play.clear])()
        play.check()
    play.buffer.close()


def test_a_store_whose_count_cannot_be_written_still_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "replay.db"
    count = tmp_path / "replay.db.count"
    Play(0, path).buffer.close()
    count.unlink()
    opens = os.open

    def full(name: Any, *given: Any) -> int:
        if Path(name) == count:
            raise OSError(28, "No space left on device")
        return opens(name, *given)

    monkeypatch.setattr(os, "open", full)
    play = Play(0, path)
    play.add()
    play.check()
    play.restart()
    play.check()
    play.buffer.close()
    assert not count.exists()


def test_an_older_copy_is_named_with_what_it_lacks(tmp_path: Path) -> None:
    path = tmp_path / "replay.db"
    config = ReplaySection(capacity=CAPACITY, lease_s=100.0)
    buffer = ReplayBuffer(config, path)
    buffer.add([make_group(f"g{number}") for number in range(3)])
    buffer.close()
    older = path.read_bytes()
    buffer = ReplayBuffer(config, path)
    buffer.add([make_group(f"g{number}") for number in range(3, 5)])
    buffer.store.ack(["g4"])
    buffer.close()
    path.write_bytes(older)
    with pytest.raises(ConfigError) as error:
        ReplayBuffer(config, path)
    kept = json.loads(path.with_name("replay.db.count").read_text())
    assert kept["added"] == 5
    changes = f"the last 2 of {kept['changes']} acknowledged changes are gone"
    assert f"{changes}, with 2 of 5 groups" in error.value.message


def test_metadata_that_no_json_can_hold_are_named_with_their_group(tmp_path: Path) -> None:
    play = Play(0, tmp_path / "replay.db")
    groups = [make_group("a"), make_group("b")]
    groups[1].metadata = {"score": float("nan")}
    with raises(InvalidInput, field="groups[1].metadata", value="{'score': nan}"):
        play.buffer.add(groups)
    play.check()
    play.buffer.close()


@pytest.mark.parametrize("key", [1, 2, 3])
def test_a_record_that_was_changed_is_found_at_the_start(key: int, tmp_path: Path) -> None:
    play = Play(0, tmp_path / "replay.db")
    play.buffer.add([make_group(name) for name in "abc"])
    play.buffer.close()
    with closing(sqlite3.connect(play.path)) as db, db:
        db.execute("UPDATE groups SET position = 7 WHERE key = ?", (key,))
    with raises(ConfigError, field="state_dir") as error:
        play.opened()
    assert f"group {'abc'[key - 1]}" in error.value.message


def test_every_id_needs_its_priority(tmp_path: Path) -> None:
    play = Play(0, tmp_path / "replay.db")
    with raises(InvalidInput, field="priorities", value="1") as error:
        play.buffer.set_priorities(PriorityUpdate(ids=["a", "b"], priorities=[1.0]))
    assert error.value.message.startswith("2 ids ")
    play.buffer.close()
