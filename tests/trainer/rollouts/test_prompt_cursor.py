"""The prompt cursor: every position is drawn once, again only after a failure, and kept across
restarts."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from common.wire.schemas import Prompt
from trainer.rollouts.prompt_cursor import MAX_TRIES, DrawnPrompt, PromptCursor, PromptProgress

EPOCH = 7
"""Prompts per epoch."""


def stream(position: int, count: int) -> list[Prompt]:
    """Returns what the data-server answers at `position`."""
    return [
        Prompt(id=f"p{i % EPOCH}", prompt="?", ground_truth="1")
        for i in range(position, position + count)
    ]


def draw(cursor: PromptCursor, count: int) -> list[DrawnPrompt]:
    """Draws `count` prompts as the collector does."""
    drawn = cursor.take_retries(count)
    while left := count - len(drawn):
        drawn += cursor.draw(stream(cursor.next, left), EPOCH)
    return drawn


def positions(drawn: list[DrawnPrompt]) -> list[int]:
    return [each.position for each in drawn]


def test_new_prompts_come_in_the_order_of_the_stream_with_their_epoch() -> None:
    cursor = PromptCursor(PromptProgress())
    drawn = draw(cursor, 5) + draw(cursor, 4)
    assert [(each.position, each.prompt.id, each.epoch) for each in drawn] == [
        (i, f"p{i % 7}", i // 7) for i in range(9)
    ]
    assert cursor.next == 9
    assert cursor.progress == PromptProgress(0, [])


def test_groups_that_overtake_one_another_leave_gaps_until_the_first_one_is_finished() -> None:
    cursor = PromptCursor(PromptProgress())
    draw(cursor, 6)
    cursor.finish([4, 1, 2])
    assert cursor.progress == PromptProgress(0, [1, 2, 4])
    cursor.finish([0])
    assert cursor.progress == PromptProgress(3, [4])
    cursor.finish([3, 5])
    assert cursor.progress == PromptProgress(6, [])


def test_a_run_that_resumes_draws_what_was_not_finished_and_goes_on_behind_it() -> None:
    cursor = PromptCursor(PromptProgress(3, [4, 7]))
    assert cursor.next == 3
    assert positions(draw(cursor, 5)) == [3, 5, 6, 8, 9]
    assert cursor.progress == PromptProgress(3, [4, 7])


def test_prompts_that_failed_come_before_new_ones_in_the_order_of_their_failures() -> None:
    cursor = PromptCursor(PromptProgress())
    drawn = draw(cursor, 4)
    assert cursor.retry(drawn[2])
    assert cursor.retry(drawn[0])
    assert cursor.take_retries(1) == [drawn[2]]
    assert draw(cursor, 3) == [drawn[0], *map(DrawnPrompt, (4, 5), stream(4, 2), (0, 0))]


def test_a_prompt_that_failed_too_often_is_finished() -> None:
    cursor = PromptCursor(PromptProgress())
    [drawn] = draw(cursor, 1)
    for _ in range(MAX_TRIES - 1):
        assert cursor.retry(drawn)
        assert cursor.take_retries(9) == [drawn]
    assert not cursor.retry(drawn)
    assert cursor.take_retries(9) == []
    assert cursor.progress == PromptProgress(1, [])


class Cursors(RuleBasedStateMachine):
    """A cursor, and a record of the fate of every position it drew."""

    def __init__(self) -> None:
        super().__init__()
        self.finished: set[int] = set()
        self.open: dict[int, DrawnPrompt] = {}
        """Drawn, but neither finished nor failed since."""
        self.failed: dict[int, DrawnPrompt] = {}
        """To be retried, the oldest failure first."""
        self.failures: dict[int, int] = {}

    @initialize(position=st.integers(0, 20), later=st.sets(st.integers(1, 12)))
    def start(self, position: int, later: set[int]) -> None:
        self.finished = {*range(position), *(position + i for i in later)}
        self.cursor = PromptCursor(
            PromptProgress(position, sorted(self.finished - set(range(position))))
        )

    @rule(count=st.integers(1, 6))
    def draw(self, count: int) -> None:
        drawn, again = draw(self.cursor, count), list(self.failed.values())[:count]
        assert drawn[: len(again)] == again
        for each in again:
            del self.failed[each.position]
        seen, expected = {*self.finished, *self.open, *self.failed, *positions(again)}, list[int]()
        while len(expected) < count - len(again):
            expected.append(next(i for i in range(len(seen) + 1) if i not in seen))
            seen.add(expected[-1])
        assert positions(drawn[len(again) :]) == expected
        assert all(
            each[1:] == (stream(each.position, 1)[0], each.position // EPOCH) for each in drawn
        )
        self.open |= {each.position: each for each in drawn}

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        chosen = data.draw(st.lists(st.sampled_from(sorted(self.open)), min_size=1, unique=True))
        self.cursor.finish(chosen)
        for position in chosen:
            del self.open[position]
            self.finished.add(position)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        drawn = self.open.pop(data.draw(st.sampled_from(sorted(self.open))))
        failures = self.failures[drawn.position] = self.failures.get(drawn.position, 0) + 1
        assert self.cursor.retry(drawn) == (failures < MAX_TRIES)
        if failures < MAX_TRIES:
            self.failed[drawn.position] = drawn
        else:
            self.finished.add(drawn.position)

    @rule()
    def restart(self) -> None:
        self.cursor = PromptCursor(self.cursor.progress)
        for lost in (self.open, self.failed, self.failures):
            lost.clear()

    @invariant()
    def progress_is_what_is_finished(self) -> None:
        first = next(i for i in range(len(self.finished) + 1) if i not in self.finished)
        assert self.cursor.progress == PromptProgress(
            first, sorted(i for i in self.finished if i > first)
        )


TestCursors = Cursors.TestCase
TestCursors.settings = settings(max_examples=60, stateful_step_count=30)
