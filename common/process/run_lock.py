"""A lock on a directory, so that only one run at a time writes to it.

The kernel's lock on the file `.lock` (flock) ends with its process, however that ends, and is
sufficient on one machine. It may not reach other machines, and some file systems do not support it.
So the holder also writes a heartbeat into the file. A process that finds the file of a holder on
another machine watches it for `_STALE_S` seconds and takes over if it does not change.
"""

import errno
import fcntl
import json
import logging
import os
import platform
import secrets
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Self

from common import Json
from common.errors import ConfigError, ServiceError
from common.process.storage import storing

log = logging.getLogger(__name__)
LOCK = ".lock"
# Seconds between two heartbeats.
_BEAT_S = 5.0
# Seconds without a heartbeat after which its holder counts as dead.
_STALE_S = 30.0
# Seconds between tries, and their number: the dashboard and `rlhf diagnose` take the lock for a
# moment to find out whether a run lives.
_READER_S = 0.1
_TRIES = 5
# Errors of a file system that does not support locks.
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
# Fixed size of the file in bytes, so that overwriting it needs no space on a full disk.
_SIZE = 512


def refuse_foreign(directory: Path, field: str) -> None:
    """Raises ConfigError for a directory that no run has made its own, or that holds the working
    directory: whatever else is in it would be lost.
    """
    path = directory.resolve()
    # A runner that ends early leaves an empty folder for its logs.
    files = (each for each in path.rglob("*") if not each.is_dir() and each.name != LOCK)
    is_foreign = not (path / LOCK).exists() and any(files)
    if is_foreign or Path.cwd().is_relative_to(path):
        raise ConfigError(
            "this is not the directory of a run, and everything in it would be lost",
            field=field,
            value=str(directory),
            remedy="name the directory of a run, or remove yourself what is in this one",
        )


class RunLock:
    """A context manager that holds `directory` for `run`.

    Args:
        directory: the directory; created if needed.
        run: name of this run, shown to a second run that wants the directory.
        field: the setting of the directory, for errors.

    Raises ConfigError when another run holds the directory: at once, or after watching another
    machine for `_STALE_S` seconds; StorageFailed when its volume does not answer.
    """

    def __init__(self, directory: Path, run: str, field: str = "trainer.run_dir") -> None:
        self._path = directory / LOCK
        self._field = field
        self.run = run
        self._own: Json = {
            "run": run,
            "host": platform.node(),
            "pid": os.getpid(),
            "since": time.strftime("%Y-%m-%d %H:%M:%S"),
            "machine": _machine(),
            "token": secrets.token_hex(8),
            "beat": 0,
        }
        self._has_written = False
        self._ended = threading.Event()
        self._thief: Json | None = None

    @classmethod
    def of_new_run(cls, directory: Path, name: str) -> Self:
        """Returns the lock for a new run, whose id begins with `name`."""
        return cls(directory, f"{name}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}")

    def __enter__(self) -> Self:
        with storing(LOCK, self._path, self._field):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                self._acquire()
            except BaseException:
                os.close(self._file)
                raise
        self._beating = threading.Thread(target=self._beat, name="run lock", daemon=True)
        self._beating.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._beating.join()
        if not self._was_taken_over():
            # So that the next run need not watch for a heartbeat. An error here would hide the one
            # with which the run ends.
            with suppress(OSError):
                os.ftruncate(self._file, 0)
        os.close(self._file)

    def check(self) -> None:
        """Raises ServiceError when another run took over the directory because this one was stopped
        for too long.
        """
        # A process that wakes up may be here before its next heartbeat.
        if self._was_taken_over():
            raise ServiceError(
                f"this process was suspended or slow, and {_who(self._thief or {})} took over its "
                "directory",
                code="run_taken_over",
                field=self._field,
                value=str(self._path.parent),
                remedy="leave the directory to that run",
            )

    def _acquire(self) -> None:
        locked = self._flock()
        before = self._read()
        # The kernel's lock says enough if the last holder was on this machine.
        alone = locked and before.get("machine") in (None, self._own["machine"])
        if locked is False or (before and not alone and self._lives(before)):
            raise ConfigError(
                f"{_who(self._read() or before)} is using this directory",
                code="run_in_use",
                field=self._field,
                value=str(self._path.parent),
                remedy="end that run, or give this one its own directory",
            )
        # Of two waiting runs that take over at the same moment, the last one to write has it; the
        # other one's next heartbeat sees that.
        self._write()

    def _flock(self) -> bool | None:
        """Returns whether this process now has the kernel's lock; None when the file system does
        not support locks.
        """
        for _ in range(_TRIES):
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(_READER_S)
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
                return None
            else:
                return True
        return False

    def _lives(self, holder: Json) -> bool:
        """Whether a holder that the kernel's lock does not cover is alive, judged by its
        heartbeat.
        """
        log.warning(
            "%s has %s: watching its heartbeat for %.0f s",
            _who(holder),
            self._path.parent,
            _STALE_S,
        )
        end = time.monotonic() + _STALE_S
        while time.monotonic() < end:
            time.sleep(0.2)
            now = self._read()
            if now != holder:
                return bool(now)
        return False

    def _beat(self) -> None:
        while not self._ended.wait(_BEAT_S):
            if self._was_taken_over():
                return
            self._own["beat"] += 1
            self._write()

    def _was_taken_over(self) -> bool:
        """Whether another run has written its entry over this one's, even if it has ended since."""
        with suppress(OSError):  # a volume that does not answer now says nothing
            found = self._read()
            # A run that took over and has ended leaves an empty file.
            is_emptied = self._has_written and not os.fstat(self._file).st_size
            if is_emptied or (found and found.get("token") != self._own["token"]):
                self._thief = found
        return self._thief is not None

    def _read(self) -> Json:
        """Returns the holder's entry in the file; empty when nobody holds the directory. Raises
        OSError.
        """
        content = os.pread(self._file, _SIZE, 0)
        try:
            return dict(json.loads(content))
        except (TypeError, ValueError):
            return {}

    def _write(self) -> None:
        try:
            os.pwrite(self._file, json.dumps(self._own).encode().ljust(_SIZE), 0)
            self._has_written = True
        except OSError as error:  # the kernel's lock works without it
            log.warning("the heartbeat in %s cannot be written: %s", self._path, error)


def _who(holder: Json) -> str:
    if not holder:
        return "another run"
    return (
        f"run {holder.get('run')} (process {holder.get('pid')} on {holder.get('host')}, "
        f"since {holder.get('since')})"
    )


def _machine() -> str:
    """Identifies the running kernel, whose processes all share its locks, also in containers."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return platform.node()
