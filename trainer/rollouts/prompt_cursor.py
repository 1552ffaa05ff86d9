"""The positions of the prompt stream that are drawn, finished and to be retried. Pure: no I/O, no
clock.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from common.wire.schemas import Prompt

MAX_TRIES = 3
"""After this many groups of a prompt have failed or become too stale, the epoch skips the
prompt."""


class DrawnPrompt(NamedTuple):
    """A prompt at its position in the stream."""

    position: int
    prompt: Prompt
    epoch: int


@dataclass(frozen=True)
class PromptProgress:
    """The positions that a run has trained on or dropped, and never draws again."""

    position: int = 0
    """Every position before this one is finished."""
    finished: list[int] = field(default_factory=list)
    """Later positions that are finished too, in ascending order: with max_staleness, groups
    overtake one another."""


class PromptCursor:
    """The prompt stream of one run, which continues from `progress`.

    A position is drawn once. Its group is trained on or replaced (`finish`), or it fails (`retry`).
    Then the prompt is drawn again before new ones, until it has failed `MAX_TRIES` times.
    """

    def __init__(self, progress: PromptProgress) -> None:
        self.next = progress.position
        """The next new position."""
        self._first_open = progress.position
        self._finished = set(progress.finished)
        self._failed: Counter[int] = Counter()
        self._to_retry: list[DrawnPrompt] = []

    @property
    def progress(self) -> PromptProgress:
        """The progress from which a run would resume now."""
        return PromptProgress(self._first_open, sorted(self._finished))

    def take_retries(self, count: int) -> list[DrawnPrompt]:
        """Returns up to `count` prompts whose groups failed."""
        taken = self._to_retry[:count]
        del self._to_retry[:count]
        return taken

    def draw(self, prompts: Sequence[Prompt], prompts_per_epoch: int) -> list[DrawnPrompt]:
        """Advances over the next prompts of the stream; returns those that are not finished yet."""
        start = self.next
        self.next += len(prompts)
        return [
            DrawnPrompt(position, prompt, position // prompts_per_epoch)
            for position, prompt in enumerate(prompts, start)
            if position >= self._first_open and position not in self._finished
        ]

    def retry(self, drawn: DrawnPrompt) -> bool:
        """Schedules a prompt whose group failed for another try; after the last one finishes it and
        returns False.
        """
        self._failed[drawn.position] += 1
        if self._failed[drawn.position] < MAX_TRIES:
            self._to_retry.append(drawn)
            return True
        self.finish([drawn.position])
        return False

    def finish(self, positions: Sequence[int]) -> None:
        """Finishes positions: they are never drawn again."""
        for position in positions:
            self._failed.pop(position, None)
            self._finished.add(position)
        # Only what lies beyond a gap needs to be listed one by one.
        while self._first_open in self._finished:
            self._finished.remove(self._first_open)
            self._first_open += 1
