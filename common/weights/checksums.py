"""Checksums of files, as used in weight manifests: `trainer.weights.versions` writes them,
`services.rollout.weights.store` compares them.
"""

from collections.abc import Callable
from pathlib import Path

import xxhash

Hasher = xxhash.xxh3_128
"""128-bit XXH3: detects damage by disks, networks and killed processes, not deliberate changes (ADR
1)."""
PIECE_BYTES = 1 << 20


def checksum(path: Path, read: Callable[[], None] = lambda: None) -> str:
    """Returns the checksum of a file as 32 hex digits; calls `read` after every MiB."""
    digest = Hasher()
    with path.open("rb", buffering=0) as stream:
        while chunk := stream.read(PIECE_BYTES):
            digest.update(chunk)
            read()
    return digest.hexdigest()
