"""Leases of the replay buffer over random calls, times and restarts, by a model in memory: who has
which group, until when, and what a request is answered that comes again.
"""

import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from common.errors import ServiceError
from common.settings.sections import ReplaySection
from common.wire.schemas import TakeRequest
from services.replay.buffer import ReplayBuffer, unpack_groups
from tests.support.batches.replay_groups import make_group

LEASE_S = 100.0


@dataclass
class Kept:
    """A group in the model."""

    version: int
    position: int
    state: str = "fresh"
    request: str = ""
    until: float = 0.0


@dataclass
class Model:
    """What the buffer owes its clients."""

    groups: dict[str, Kept] = field(default_factory=dict)
    gone: set[str] = field(default_factory=set)
    answered: set[str] = field(default_factory=set)
    evicted: dict[str, int] = field(default_factory=dict)
    runs: list[str] = field(default_factory=list)

    def expire(self, now: float, run: str) -> None:
        for each in self.groups.values():
            if each.state == "leased" and (each.until <= now or not each.request.startswith(run)):
                each.state = "fresh"

    def of(self, request: str) -> list[str]:
        return self.in_order(
            name
            for name, each in self.groups.items()
            if each.state == "leased" and each.request == request
        )

    def in_order(self, names: Iterable[str]) -> list[str]:
        groups = self.groups
        return sorted(
            names,
            key=lambda name: (groups[name].version, groups[name].position, name),
        )

    def take(self, request: TakeRequest, now: float, *, ends: bool) -> object:
        """Returns the ids and the number of the evicted, None to wait, or a refusal."""
        name = request.request_id
        # Leases that ended are looked at when somebody asks for groups.
        before = [(each, each.state) for each in self.groups.values()]
        self.expire(now, request.run_id)
        taken = self.of(name)
        if taken:
            oldest = min(self.groups[each].version for each in taken)
            if len(taken) != request.count or oldest < request.min_version:
                for each, state in before:  # a refusal changes nothing
                    each.state = state
                return "refused"
        elif name in self.answered:
            return [], self.evicted.get(name, 0)
        else:
            fresh = [each for each, kept in self.groups.items() if kept.state == "fresh"]
            old = [each for each in fresh if self.groups[each].version < request.min_version]
            for group in old:
                del self.groups[group]
                self.gone.add(group)
            if old:
                self.evicted[name] = self.evicted.get(name, 0) + len(old)
            waiting = self.in_order(each for each in fresh if each not in old)
            if len(waiting) >= request.count:
                taken = waiting[: request.count]
            elif not ends:
                return None
        for group in taken:
            kept = self.groups[group]
            kept.state = "leased"
            kept.request = name
            kept.until = float("inf") if request.run_id else now + LEASE_S
        self.answered.add(name)
        return taken, self.evicted.get(name, 0)

    def restart(self, now: float) -> float:
        """Returns how much longer every lease by time lasts: the first has its full length again."""
        ends = [each.until for each in self.groups.values() if each.state == "leased"]
        finite = [end for end in ends if end < float("inf")]
        return now + LEASE_S - min(finite) if finite else 0.0


@pytest.mark.parametrize("seed", range(16))
def test_leases_are_those_of_the_model(seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)
    config = ReplaySection(capacity=10_000, lease_s=LEASE_S)
    now = 50.0
    model = Model()

    def opened() -> ReplayBuffer:
        return ReplayBuffer(config, tmp_path / "replay.db", clock=lambda: now)

    buffer = opened()
    number = 0
    run = ""
    with_runs = seed % 2 == 1
    for turn in range(70):
        now += draw.choice([0.0, 1.0, 30.0, LEASE_S])
        deed = draw.choice(
            ["add", "add", "take", "take", "take", "ack", "reset", "restart", "again"]
        )
        if deed == "add":
            names = [draw.choice([f"g{number + i}", f"g{draw.randint(0, 20)}"]) for i in range(3)]
            number += 3
            groups = [make_group(each, draw.randint(0, 3), draw.randint(0, 9)) for each in names]
            new = {
                group.id: Kept(group.weight_version, group.position)
                for group in reversed(groups)
                if group.id not in model.groups and group.id not in model.gone
            }
            counts = buffer.add(groups)
            assert counts == {"added": len(new), "duplicates": 3 - len(new)}
            model.groups |= new
        elif deed in ("take", "again"):
            name = f"{run}-take-{draw.randint(0, 12)}"
            taker = run
            if draw.random() < 0.2:
                # Of a client without a run, although its id has the name of one.
                name = f"take-of-{name}"
                taker = ""
            request = TakeRequest(
                count=draw.randint(1, 3),
                min_version=draw.choice([0, 0, 0, 1, 2]),
                request_id=name,
                run_id=taker,
                ids_only=draw.random() < 0.3,
            )
            ends = draw.random() < 0.3
            expected = model.take(request, now, ends=ends)
            if expected == "refused":
                with pytest.raises(ServiceError, match="another request with this request_id"):
                    buffer.take(request, ends=ends)
            else:
                lease = buffer.take(request, ends=ends)
                found = None if lease is None else (lease.ids, lease.evicted)
                assert found == expected, (turn, request)
                if lease is not None:
                    given = [] if request.ids_only else lease.ids
                    groups = unpack_groups(lease.blobs) if lease.blobs else []
                    assert [group.id for group in groups] == given
        elif deed == "ack" and model.groups:
            some = draw.sample(sorted(model.groups), min(2, len(model.groups)))
            newly = sum(model.groups[each].state != "consumed" for each in some)
            assert buffer.store.ack(some) == newly
            for each in some:
                model.groups[each].state = "consumed"
            with pytest.raises(ServiceError):
                buffer.store.ack([*some, "never seen"])
        elif deed == "reset" and draw.random() < 0.4:
            begins = f"run{turn}" if with_runs else ""
            dropped = [each for each, kept in model.groups.items() if kept.state != "consumed"]
            assert buffer.reset_fresh(run_id=begins) == len(dropped)
            for each in dropped:
                del model.groups[each]
            if begins:
                run = begins
                model.runs.append(run)
        elif deed == "restart":
            buffer.close()
            before = now
            now = draw.choice([0.0, 7.0, 1e6])
            more = model.restart(before)
            for kept in model.groups.values():
                kept.until += more - before + now
            buffer = opened()
        leases = [each.until for each in model.groups.values() if each.state == "leased"]
        until = buffer.next_expiry_s()
        assert (until is None) is (not leases)
        if leases and min(leases) < float("inf"):
            assert until == pytest.approx(max(0.0, min(leases) - now))
        elif leases:
            assert until is not None
            assert until > 1e9, "as long as the run lasts"
        assert buffer.store.runs() == model.runs
        states = {
            state: sum(each.state == state for each in model.groups.values())
            for state in ("fresh", "leased", "consumed")
        }
        totals = buffer.store.totals()
        assert {state: totals[state][0] for state in states} == states, turn
    buffer.close()
