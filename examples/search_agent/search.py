"""An environment with the tool `search`: `environment.name
python:examples.search_agent.search:SearchAgent`, graded by `right`.

Uses the standard library alone, so that `mcp_server` can serve the same tool from elsewhere.
"""

import functools
import re
import sqlite3
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path

CORPUS = Path(__file__).with_name("corpus.txt")
SHOWN = 2
"""Documents that a search shows, the best first."""


class Library:
    """A full-text index of documents in memory, of SQLite's FTS5."""

    def __init__(self, documents: Iterable[str]) -> None:
        self._lock = threading.Lock()
        self._database = sqlite3.connect(":memory:", check_same_thread=False)
        self._database.execute("CREATE VIRTUAL TABLE documents USING fts5(text)")
        rows = [(document,) for document in documents]
        self._database.executemany("INSERT INTO documents VALUES (?)", rows)

    def search(self, query: str) -> str:
        """Returns the documents that match best (BM25), a line each. They have at least one word
        of the query.
        """
        # Quoted words are no operators of FTS5's query language.
        words = [f'"{word}"' for word in re.findall(r"\w+", query)]
        match = " OR ".join(words) or '""'
        with self._lock:
            rows = self._database.execute(
                "SELECT text FROM documents WHERE documents MATCH ? ORDER BY rank, rowid LIMIT ?",
                (match, SHOWN),
            ).fetchall()
        return "\n".join(text for (text,) in rows) or "nothing found"


@functools.cache
def library() -> Library:
    """Returns the index of corpus.txt."""
    return Library(CORPUS.read_text(encoding="utf-8").splitlines())


class SearchAgent:
    """Asks about a library that the model has never seen, and gives it a tool to search there."""

    def reset(self) -> None:
        """Begins an episode."""

    def search(self, query: str) -> str:
        """Searches the library.

        Args:
            query: Words to look for.
        """
        return library().search(query)


def right(completions: Sequence[str], ground_truth: Sequence[str]) -> list[float]:
    """Returns 1 for an answer that is `#### ` and the word, and nothing else, and otherwise 0."""
    return [
        float(completion == f"#### {word}")
        for completion, word in zip(completions, ground_truth, strict=True)
    ]


right.gives_verdicts = True  # type: ignore[attr-defined]
