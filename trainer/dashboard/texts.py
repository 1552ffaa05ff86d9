"""Texts of completions: excerpts for the list of groups, and full-text search."""

import re
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainer.observe.group_files import GroupTexts, read_texts, recorded_steps

Place = tuple[int, int]
"""Step, and index in its line of `groups.jsonl`."""
_EXCERPT_CHARS = 240
_BEFORE_CHARS = 60
"""Characters of an excerpt before the match."""
_AT_ONCE_S = 0.3
"""Seconds that one call spends on reading; the next call continues."""
_KEPT_EXCERPTS = 20_000
_KEPT_SEARCHES = 8


class _Search:
    """A searched text, and the matches so far."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.done: dict[int, int] = {}
        """Modification times of the searched files, by step."""
        self.hits: dict[Place, dict[str, Any]] = {}


class Texts:
    """Reads the texts of one run directory. Thread-safe."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._lock = threading.Lock()
        self._searches: OrderedDict[str, _Search] = OrderedDict()
        self._excerpts: OrderedDict[tuple[str, int | None], dict[str, Any]] = OrderedDict()
        """Excerpt of a group's first completion, by the group's id and step."""

    def search(self, text: str) -> tuple[dict[Place, dict[str, Any]], dict[str, int] | None]:
        """Returns an excerpt of each group with a completion that contains `text` in any case, and
        the progress.

        A call reads briefly, the newest steps first, and the next one continues; at the end the
        progress is None.
        """
        wanted = text.casefold()
        with self._lock:
            search = self._searches.setdefault(wanted, _Search(wanted))
            self._searches.move_to_end(wanted)
            while len(self._searches) > _KEPT_SEARCHES:
                self._searches.popitem(last=False)
            files = {step: _changed(path) for step, path in recorded_steps(self._run_dir).items()}
            left = [step for step, changed in files.items() if search.done.get(step) != changed]
            end = time.monotonic() + _AT_ONCE_S
            for count, step in enumerate(sorted(left, reverse=True)):
                if count and time.monotonic() > end:
                    done = len(files) - len(left) + count
                    return dict(search.hits), {"done": done, "of": len(files)}
                self._search_step(search, step)
                search.done[step] = files[step]
            return dict(search.hits), None

    def _search_step(self, search: _Search, step: int) -> None:
        """Replaces the matches of a step."""
        if step in search.done:
            for place in [place for place in search.hits if place[0] == step]:
                del search.hits[place]
        for index, group in read_texts(self._run_dir, step).items():
            number = _first(group, search.text)
            if number is not None:
                excerpt = _excerpt(group, number, search.text)
                search.hits[step, index] = {"id": group.id, **excerpt}

    def add_excerpts(self, rows: Sequence[dict[str, Any]]) -> None:
        """Adds `completion` to rows of the index: number, excerpt, reward and verdict of the first;
        None if unknown.

        Limited in time: what is still missing is filled in by later calls.
        """
        steps: dict[int, list[dict[str, Any]]] = {}
        with self._lock:
            for row in rows:
                row["completion"] = self._excerpts.get((row["id"], row["step"]))
                if row["completion"] is None and row["step"] is not None:
                    steps.setdefault(row["step"], []).append(row)
            end = time.monotonic() + _AT_ONCE_S
            for step, missing in steps.items():
                for row in missing:
                    if time.monotonic() > end:
                        return
                    group = read_texts(self._run_dir, step, [row["place"]]).get(row["place"])
                    if group is not None and group.id == row["id"] and group.completions:
                        excerpt = _excerpt(group, 0, "")
                        self._excerpts[row["id"], step] = excerpt
                        row["completion"] = excerpt
            while len(self._excerpts) > _KEPT_EXCERPTS:
                self._excerpts.popitem(last=False)


def _changed(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:  # it was removed to make room
        return 0


def _first(group: GroupTexts, wanted: str) -> int | None:
    """Returns the index of the first completion that contains the text."""
    for i, completion in enumerate(group.completions):
        if wanted in completion.text.casefold():
            return i
    return None


def _excerpt(group: GroupTexts, number: int, wanted: str) -> dict[str, Any]:
    """Returns the part of a completion around the searched text, or its beginning."""
    completion = group.completions[number]
    whole = completion.text if wanted else completion.text[: 2 * _EXCERPT_CHARS]
    text = re.sub(r"\s+", " ", whole).strip()
    at = text.casefold().find(re.sub(r"\s+", " ", wanted)) if wanted else 0
    start = max(0, at - _BEFORE_CHARS)
    shown = text[start : start + _EXCERPT_CHARS]
    has_verdict = completion.verified and completion.reward is not None
    return {
        "number": number + 1,
        "text": f"… {shown}" if start else shown,
        "reward": completion.reward,
        "correct": completion.correct if has_verdict else None,
    }
