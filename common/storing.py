"""The error for a disk that is full or does not work."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from common.errors import ServiceError

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class StorageFailed(ServiceError):
    """The disk is full (507) or does not work (500); what was stored before is unchanged."""

    status = 500
    code = "storage_failed"


@contextmanager
def storing(what: str, path: Path, field: str, remedy: str = "try again") -> Iterator[None]:
    """Turns errors of the disk while `what` is written to `path` into StorageFailed, also those that libraries wrap.

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
            remedy=f"free disk space there, then {remedy}" if full else f"look at that disk, then {remedy}",
            code="disk_full" if full else None,
            status=507 if full else None,
        ) from error
