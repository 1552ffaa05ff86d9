"""Checksums of files, as used in weight manifests."""

import hashlib
from pathlib import Path

import xxhash

Hasher = xxhash.xxh3_128
"""128-bit XXH3: detects damage by disks, networks and killed processes, not deliberate changes (ADR
1)."""


def checksum(path: Path) -> str:
    """Returns the checksum of a file as 32 hex digits."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, Hasher).hexdigest()
