"""The store of a replay-buffer that is not running, for whoever looks at a run afterwards."""

import sqlite3
from pathlib import Path
from types import TracebackType
from typing import Self

from services.replay.reading import Reading


class Archive(Reading):
    """The file, opened to be read alone, and only while inside: a replay-buffer that starts meanwhile waits for it.

    Raises ConfigError when it is in use, damaged or of another layout.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        # Without a log nobody writes. Opened as usual, SQLite would leave an empty log behind.
        log = path.with_name(f"{path.name}-wal")
        mode = "mode=ro" if log.exists() else "mode=ro&immutable=1"
        try:
            self.db = sqlite3.connect(f"{path.resolve().as_uri()}?{mode}", uri=True, timeout=0)
            try:
                self._check_layout()
            except BaseException:
                self.db.close()
                raise
        except sqlite3.Error as error:
            raise self._unusable(str(error)) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
        if isinstance(value, sqlite3.Error):
            raise self._unusable(str(value)) from None
