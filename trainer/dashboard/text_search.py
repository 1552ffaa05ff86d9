"""Full-text search in the completions of a run."""

import re
import threading
import time
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from common import Json
from trainer.observe.group_files import EXCERPT_CHARS, GroupTexts, read_texts, recorded_steps

Place = tuple[int, int]
"""Step, and index in its line of `groups.jsonl`."""
_BEFORE_CHARS = 60
"""Characters of an excerpt before the match."""
_AT_ONCE_S = 0.3
"""Seconds that one call spends on reading; the next call continues."""
_KEPT_SEARCHES = 8


@dataclass
class _Search:
    """A searched text, and the matches so far."""

    done: dict[int, int] = field(default_factory=dict)
    """Modification times of the searched files, by step."""
    hits: dict[Place, Json] = field(default_factory=dict)


class TextSearch:
    """Searches the completions of one run directory. Thread-safe."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._lock = threading.Lock()
        self._search_of = lru_cache(_KEPT_SEARCHES)(lambda wanted: _Search())

    def find(self, text: str) -> tuple[dict[Place, Json], dict[str, int] | None]:
        """Returns an excerpt of each group with a completion that contains `text` in any case, and
        the progress.

        A call reads briefly, the newest steps first, and the next one continues; at the end the
        progress is None.
        """
        wanted = text.casefold()
        with self._lock:
            search = self._search_of(wanted)
            files = {step: _changed(path) for step, path in recorded_steps(self._run_dir).items()}
            left = [step for step, changed in files.items() if search.done.get(step) != changed]
            end = time.monotonic() + _AT_ONCE_S
            for count, step in enumerate(sorted(left, reverse=True)):
                if count and time.monotonic() > end:
                    done = len(files) - len(left) + count
                    return dict(search.hits), {"done": done, "of": len(files)}
                for index, group in enumerate(read_texts(self._run_dir, step)):
                    search.hits.pop((step, index), None)  # of a file that was replaced
                    hit = _hit(group, wanted)
                    if hit is not None:
                        search.hits[step, index] = hit
                search.done[step] = files[step]
            return dict(search.hits), None


def _changed(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:  # it was removed to make room
        return 0


def _hit(group: GroupTexts, wanted: str) -> Json | None:
    """Returns the part of the first completion with the searched text around it; None: no one has
    it.
    """
    for number, completion in enumerate(group.completions, 1):
        if wanted not in completion.text.casefold():
            continue
        text = re.sub(r"\s+", " ", completion.text).strip()
        at = text.casefold().find(re.sub(r"\s+", " ", wanted))
        start = max(0, at - _BEFORE_CHARS)
        shown = text[start : start + EXCERPT_CHARS]
        has_verdict = completion.verified and completion.reward is not None
        return {
            "id": group.id,
            "number": number,
            "text": f"… {shown}" if start else shown,
            "reward": completion.reward,
            "correct": completion.correct if has_verdict else None,
        }
    return None
