"""Disk errors by name: a full or broken disk, a directory that is not writable."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile

from common.errors import ConfigError, ServiceError

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NEVER = (
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ENOTDIR,
    errno.EEXIST,
    errno.ENOENT,
    errno.ENAMETOOLONG,
)


class StorageFailed(ServiceError):
    """The disk is full (507) or broken (500); data stored before is unchanged."""

    status = 500
    code = "storage_failed"


@contextmanager
def storing(what: str, path: Path, field: str, remedy: str = "try again") -> Iterator[None]:
    """Turns disk errors while `what` is written to `path` into StorageFailed, including errors
    wrapped by libraries.

    `field` is the setting of the path; `remedy` follows on "free disk space there, then".
    """
    try:
        yield
    except Exception as error:
        number = error.errno if isinstance(error, OSError) else None
        full = number in _FULL or "No space left on device" in str(error)
        if isinstance(error, ServiceError) or not (full or isinstance(error, OSError)):
            raise
        raise StorageFailed(
            f"{what} cannot be written: {error}".splitlines()[0],
            field=field,
            value=str(path),
            remedy=f"free disk space there, then {remedy}"
            if full
            else f"check that disk, then {remedy}",
            code="disk_full" if full else None,
            status=507 if full else None,
        ) from error


def make_directory(path: Path, field: str) -> None:
    """Makes a writable directory. Raises ConfigError naming `field` when that is impossible, except
    on a full disk.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=path):
            pass
    except OSError as error:
        if error.errno in _NEVER:
            is_file = isinstance(error, FileExistsError)
            problem = "a file has this name" if is_file else error.strerror
            raise ConfigError(
                f"the directory is not writable: {problem}",
                field=field,
                value=str(path),
                remedy="name another directory",
            ) from None
