"""When a supervised child is started again, after which pause, and when that is given up: random lives
of children on a virtual clock, by the rules written anew.
"""

import asyncio
import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from common.errors import ConfigError, ServiceError
from common.process.topology import WRONG_SETTING
from services.rollout import supervision
from services.rollout.supervision import ChildFailed, SupervisedProcess, Timing
from tests.simulation.virtual_time import simulated

TIMING = Timing()
SLACK_S = 2.5
"""A probe and the look after it."""


@dataclass
class Life:
    """What one child does, in seconds after its start."""

    healthy_at: float = 1.0
    sick_at: float = math.inf
    """When it hangs, once it was healthy."""
    moves_until: float = 0.0
    """How long it loads something."""
    ends_at: float = math.inf
    status: int = 1
    refuses: str = ""
    """Where an error is raised: at the `launch`, or by `on_up`."""
    began: float = 0.0
    ended: float = 0.0
    graces: list[float] = field(default_factory=list)
    reason: str = ""
    ups: int = 0

    @property
    def gets_up(self) -> bool:
        gone = min(self.ends_at, self.sick_at, self.moves_until + TIMING.stuck_s)
        return not self.refuses and self.healthy_at < gone

    @property
    def expected_end(self) -> float:
        """When it is over, by its own end or by that of the supervision's patience."""
        if self.refuses == "launch":
            return 0.0
        if self.refuses:
            return min(self.healthy_at, self.ends_at)
        if self.gets_up:
            return min(self.ends_at, self.sick_at + TIMING.hang_s)
        return min(self.ends_at, self.moves_until + TIMING.stuck_s)


class World:
    """The children of one supervision, one life after the other."""

    def __init__(self, lives: list[Life], path: Path, patch: pytest.MonkeyPatch) -> None:
        self.lives = deque(lives)
        self.past: list[Life] = []
        self.lines: list[bytes] = []
        self.now: Life
        self.said: Callable[[bytes], None]
        patch.setattr(supervision, "Child", SimpleNamespace(start=self.start))
        patch.setattr(supervision, "ChildOutput", self.output)
        patch.setattr(
            supervision, "WorkMeter", lambda pid: SimpleNamespace(read=lambda: self.work(pid))
        )
        self.child = SupervisedProcess(
            "child",
            self.launch,
            self.probe,
            env={"OWN": "value"},
            log_file=path / "log",
            timing=TIMING,
            on_up=self.on_up,
            on_down=self.on_down,
            shown=False,
            stuck_field="rollout.start",
        )

    @property
    def age(self) -> float:
        return asyncio.get_running_loop().time() - self.now.began

    def output(self, log_file: Path, show: Any, **options: Any) -> Any:
        assert options["redacted"]
        self.said = options["on_data"]
        return SimpleNamespace(last_lines=self.lines)

    async def launch(self) -> list[str]:
        if not self.lives:
            raise asyncio.CancelledError
        self.now = self.lives.popleft()
        self.past.append(self.now)
        self.now.began = asyncio.get_running_loop().time()
        assert not self.child.up
        assert self.child.pid is None
        if self.now.refuses == "launch":
            raise ServiceError("no such model")
        return ["serve", "it"]

    async def start(self, command: list[str], output: Any, *, env: Any) -> Any:
        assert command == ["serve", "it"]
        assert env["OWN"] == "value"
        assert "PATH" in env
        return SimpleNamespace(pid=len(self.past), wait=self.wait, end=self.end)

    async def wait(self) -> int:
        life = self.now
        if life.ends_at == math.inf:
            await asyncio.Event().wait()
        await asyncio.sleep(life.ends_at)
        return life.status

    async def end(self, grace_s: float) -> int:
        self.now.graces.append(grace_s)
        return 0

    def work(self, pid: int) -> int:
        assert pid == len(self.past)
        return math.ceil(min(self.age, self.now.moves_until))

    async def probe(self) -> str | None:
        assert self.child.pid == len(self.past)
        is_well = self.now.healthy_at <= self.age < self.now.sick_at
        return None if is_well else "it does not answer"

    async def on_up(self) -> None:
        self.now.ups += 1
        if self.now.refuses == "up":
            raise ServiceError("the router is gone")

    def on_down(self, reason: str) -> None:
        self.now.reason = reason
        self.now.ended = asyncio.get_running_loop().time()
        assert not self.child.up
        assert self.child.work() == 0

    def run(self) -> BaseException:
        with simulated(0) as loop:
            try:
                loop.run_until_complete(asyncio.wait_for(self.child.run(), 1e6))
            except (ServiceError, asyncio.CancelledError) as error:
                return error
        raise AssertionError("it ends only with an error")


KINDS = ["well", "short", "stuck", "hangs", "refuses", "slow"]


def life(draw: random.Random, kinds: list[str], statuses: list[int]) -> Life:
    match draw.choice(kinds):
        case "well":
            return Life(ends_at=draw.uniform(70, 200), status=draw.choice([1, 137, 0]))
        case "short":
            return Life(ends_at=draw.uniform(2, 50), status=draw.choice(statuses))
        case "stuck":
            return Life(healthy_at=math.inf, moves_until=draw.uniform(0, 100))
        case "hangs":
            return Life(sick_at=draw.uniform(5, 100))
        case "refuses":
            return Life(refuses=draw.choice(["launch", "up"]))
        case _:
            moves = draw.uniform(60, 300)
            return Life(healthy_at=moves, moves_until=moves, ends_at=moves + draw.uniform(2, 90))


@pytest.mark.parametrize("seed", range(20))
def test_lives_and_pauses_are_those_of_the_rules(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(seed)
    # Some runs have rows of one kind, of which the supervision has enough after a while.
    rows = [["short"], ["short", "short", "short", "hangs"], ["stuck", "refuses"], ["refuses"]]
    kinds = draw.choice([KINDS, KINDS, *rows])
    statuses = draw.choice([[1], [1, 2], [1, 1, 1, 0, 137]])
    lives = [life(draw, kinds, statuses) for _ in range(12)]
    world = World([*lives], tmp_path, monkeypatch)
    world.lines = [b"first", b"last \xff"]
    error = world.run()

    ends = 0
    failed_starts = 0
    crashes = 0
    for number, each in enumerate(world.past):
        took = each.ended - each.began
        # What it loads shows once in a second.
        assert each.expected_end - 1.0 <= took <= each.expected_end + SLACK_S
        ended_itself = "process" in each.reason
        assert ended_itself == (each.expected_end == each.ends_at)
        assert not ended_itself or took == pytest.approx(each.ends_at)
        assert each.ups == (each.gets_up or each.refuses == "up")
        assert each.graces == ([] if each.refuses == "launch" else [0.0])
        if each.refuses:
            words = {"launch": "no such model", "up": "the router is gone"}
            assert each.reason == words[each.refuses]
        elif not ended_itself and each.gets_up:
            assert each.reason.startswith("not healthy for 3")
        elif not ended_itself:
            assert each.reason.startswith("killed: no progress for 6")
            assert "the start of child" in each.reason
            assert "it does not answer" in each.reason
            assert "rollout.start" in each.reason

        is_stable = each.gets_up and took - each.healthy_at > TIMING.stable_s + 0.2
        ends = 1 if is_stable else ends + 1
        failed_starts = 0 if each.gets_up else failed_starts + 1
        own = ended_itself and 0 < each.status <= 128 and not is_stable
        crashes = crashes + 1 if own else 0
        is_last = number == len(world.past) - 1
        assert is_last or (failed_starts < 5 and crashes < 5)
        if not is_last:
            pause = world.past[number + 1].began - each.ended
            assert pause == pytest.approx(min(30.0, 0.5 * 2 ** (ends - 1)))

    if failed_starts == 5 or crashes == 5:
        assert isinstance(error, ChildFailed)
        assert error.code == "child_failed"
        what = "failed to start 5 times" if failed_starts == 5 else "crashed 5 times"
        reason = world.past[-1].reason
        assert error.message.startswith(f"child {what} in a row, most recently: {reason}")
        assert error.message.endswith("first\nlast �")
    else:
        assert len(world.past) == len(lives)
    assert world.child.starts == len(world.past) + (failed_starts < 5 and crashes < 5)


@pytest.mark.parametrize(
    ("lines", "said"),
    [([b"x", b"error: no such flag"], "no such flag"), ([], "it says no reason")],
)
def test_settings_that_the_child_rejects_end_it_at_once(
    lines: list[bytes], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World([Life(ends_at=3.0, status=WRONG_SETTING)], tmp_path, monkeypatch)
    world.lines = lines
    error = world.run()
    assert isinstance(error, ConfigError)
    assert error.message == f"child rejects its settings: {said}"
    assert error.remedy == f"see {tmp_path / 'log'}"


def test_a_child_is_killed_for_a_restart_and_has_time_to_end_when_all_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lives = [Life(), Life()]
    world = World([*lives], tmp_path, monkeypatch)

    async def play() -> None:
        running = asyncio.create_task(world.child.run())
        await asyncio.sleep(5.0)
        assert world.child.up
        before = world.child.work()
        world.said(b"loading 3/7 \xff\nserves\n")
        assert world.child.work() > before
        world.child.restart("new arguments")
        await asyncio.sleep(5.0)
        assert world.child.up
        assert world.child.starts == 2
        running.cancel()
        await asyncio.wait([running])
        assert running.cancelled()

    with simulated(0) as loop:
        loop.run_until_complete(play())
    assert lives[0].reason == "new arguments"
    assert lives[0].ended <= 6.0
    assert [each.graces for each in lives] == [[0.0], [10.0]]


def test_a_child_that_answers_now_and_then_does_not_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World([Life(ends_at=500.0)], tmp_path, monkeypatch)

    async def probe() -> str | None:
        return None if world.age % 29.0 < 1.0 or world.age < 5.0 else "busy"

    world.child._probe = probe
    world.run()
    assert world.past[0].ended == 500.0


def test_a_supervisor_that_was_stopped_does_not_blame_the_child(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World([Life(ends_at=500.0)], tmp_path, monkeypatch)
    slow = {100.0: 25.0, 200.0: 400.0}

    async def probe() -> str | None:
        for at in list(slow):
            if world.age >= at:
                # A probe that ends in time, but is seen late.
                await asyncio.sleep(slow.pop(at))
                return "timeout"
        return None

    world.child._probe = probe
    world.run()
    assert "process" in world.past[0].reason
