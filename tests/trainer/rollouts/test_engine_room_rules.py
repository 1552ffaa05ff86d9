"""When groups are let into the engines: never more than they have room for, first come first served,
and looked at as often as the page says, on a virtual clock.
"""

import asyncio
import itertools
import math
import random
from typing import Any

import pytest

from tests.simulation.virtual_time import simulated
from trainer.rollouts.engine_room import EngineRoom


class Engines:
    """Engines with `slots`, which count a completion some time after it was sent."""

    def __init__(self, slots: float, look_s: float = 0.0) -> None:
        self.slots = slots
        self.look_s = look_s
        self.counted = 0
        self.looks: list[float] = []
        self.opens_at = 0
        """The look that finds one slot more."""

    async def room(self) -> float:
        loop = asyncio.get_running_loop()
        self.looks.append(loop.time())
        self.slots += len(self.looks) == self.opens_at
        found = max(0.0, self.slots - self.counted)
        await asyncio.sleep(self.look_s)
        return found


def simulate(seed: int, main: Any) -> None:
    with simulated(seed) as loop:
        loop.run_until_complete(asyncio.wait_for(main(), 10_000.0))


@pytest.mark.parametrize("seed", range(25))
def test_no_more_is_sent_than_there_is_room_for_and_nobody_waits_beside_it(seed: int) -> None:
    draw = random.Random(seed)
    slots = draw.randint(2, 9)
    size = draw.randint(1, slots)
    look_s = draw.choice([0.0, 0.01])
    engines = Engines(slots, look_s)
    room = EngineRoom(engines)  # type: ignore[arg-type]
    asked: list[int] = []
    entered: list[int] = []
    inside = 0
    free_since = 0.0

    async def group(number: int) -> None:
        nonlocal inside, free_since
        loop = asyncio.get_running_loop()
        asked.append(number)
        came = loop.time()
        async with room.enter(size):
            # There is room for some of its completions; the others are in a queue.
            assert inside < slots
            assert loop.time() - max(came, free_since) < 1.0 + 8 * look_s
            entered.append(number)
            inside += size
            await asyncio.sleep(draw.uniform(0, 0.4))
            engines.counted += size
            await asyncio.sleep(draw.choice([0.0, 0.05, draw.uniform(0, 3)]))
            engines.counted -= size
            inside -= size
            free_since = loop.time()
            # The answer is on its way.
            await asyncio.sleep(draw.uniform(0, 0.1))

    async def main() -> None:
        async with asyncio.TaskGroup() as tasks:
            for number in range(30):
                tasks.create_task(group(number))
                await asyncio.sleep(draw.choice([0.0, draw.uniform(0, 1), 7.0 * (number == 20)]))
        assert entered == asked == list(range(30))

    simulate(seed, main)


@pytest.mark.parametrize(
    ("look_s", "pauses"),
    [
        (0.0, [0.01, 0.02, 0.04, 0.08, 0.1, 0.1, 0.1]),
        (0.01, [0.05, 0.05, 0.05, 0.08, 0.1, 0.1, 0.1]),
        (0.05, [0.25] * 7),
    ],
)
def test_looks_take_little_of_the_time(look_s: float, pauses: list[float]) -> None:
    async def main() -> None:
        engines = Engines(0, look_s)
        room = EngineRoom(engines)  # type: ignore[arg-type]

        async def group() -> None:
            async with room.enter(4):
                pass

        for turn in range(2):
            first = len(engines.looks)
            engines.opens_at = first + 8
            await group()
            engines.slots = 0
            looks = engines.looks[first:]
            between = [after - before for before, after in itertools.pairwise(looks)]
            assert between == pytest.approx([look_s + pause for pause in pauses]), turn
            await asyncio.sleep(60.0)

    simulate(0, main)


def test_what_has_ended_makes_room_without_a_look() -> None:
    async def main() -> None:
        engines = Engines(4)
        room = EngineRoom(engines)  # type: ignore[arg-type]
        for _ in range(20):
            async with room.enter(4):
                await asyncio.sleep(0.1)
            # What leaves and enters again is no news.
            assert len(engines.looks) == 1

    simulate(0, main)


def test_room_that_a_look_has_seen_is_not_given_away_twice() -> None:
    async def main() -> None:
        engines = Engines(4)
        room = EngineRoom(engines)  # type: ignore[arg-type]
        entered: list[float] = []
        loop = asyncio.get_running_loop()

        async def group(seconds: float) -> None:
            async with room.enter(4):
                entered.append(loop.time())
                await asyncio.sleep(seconds)

        async with asyncio.TaskGroup() as tasks:
            # The engines have done with the first before its answer is here; a look finds them
            # empty, lets the second in, and only then the answer of the first comes.
            tasks.create_task(group(1.0))
            await asyncio.sleep(0.001)
            tasks.create_task(group(2.0))
            await asyncio.sleep(0.001)
            tasks.create_task(group(2.0))
            await asyncio.sleep(0.9)
            engines.counted = 4
            await asyncio.sleep(0.6)
            engines.counted = 0
            await asyncio.sleep(2.0)
        assert entered[0] == 0.0
        assert 0.5 <= entered[1] < 0.7, "the first is in no engine's count, and may have ended"
        assert entered[2] > 1.4, "the answer of the first, at 1.0, gives no room once more"

    simulate(0, main)


@pytest.mark.parametrize(("pause_s", "looks"), [(4.9, 1), (5.1, 2)])
def test_engines_that_say_nothing_are_looked_at_again_after_a_while(
    pause_s: float, looks: int
) -> None:
    async def main() -> None:
        engines = Engines(math.inf)
        room = EngineRoom(engines)  # type: ignore[arg-type]
        async with room.enter(1000):
            await asyncio.sleep(pause_s)
            async with room.enter(1000):
                assert len(engines.looks) == looks

    simulate(0, main)


def test_a_group_that_fails_or_is_cancelled_leaves_its_room() -> None:
    async def main() -> None:
        engines = Engines(4)
        room = EngineRoom(engines)  # type: ignore[arg-type]

        async def group() -> None:
            async with room.enter(4):
                engines.counted += 4
                try:
                    await asyncio.sleep(100.0)
                finally:
                    engines.counted -= 4

        loop = asyncio.get_running_loop()
        for _ in range(5):
            running = asyncio.create_task(group())
            waiting = asyncio.create_task(group())
            await asyncio.sleep(1.0)
            waiting.cancel()
            running.cancel()
            await asyncio.gather(running, waiting, return_exceptions=True)
            assert engines.counted == 0
        before = loop.time()
        async with room.enter(4):
            assert loop.time() - before < 1.0

    simulate(0, main)
