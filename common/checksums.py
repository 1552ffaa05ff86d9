"""Checksums of files, as weight manifests have them."""

import hashlib
from pathlib import Path

import xxhash

Hasher = xxhash.xxh3_128
"""128 bits of XXH3: finds what disks, networks and kills do to a file, and is not meant against people (ADR 41)."""


def checksum(path: Path) -> str:
    """Returns the checksum of a file, 32 hex digits."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, Hasher).hexdigest()
