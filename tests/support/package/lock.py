"""What uv.lock says that an installation brings."""

import tomllib
from collections.abc import Sequence

from packaging.utils import canonicalize_name

from tests.support.paths import ROOT


def locked(extras: Sequence[str], packages: Sequence[str] = ()) -> set[str]:
    """Returns the distributions that our package with these extras brings, and those of other
    `packages`."""
    lock = tomllib.loads((ROOT / "uv.lock").read_text(encoding="utf-8"))
    known = {package["name"]: package for package in lock["package"]}
    waiting: list[tuple[str, tuple[str, ...]]] = [
        ("rlhf-math", tuple(extras)),
        *((name, ()) for name in packages),
    ]
    seen: set[tuple[str, tuple[str, ...]]] = set()
    while waiting:
        found = waiting.pop()
        if found in seen:
            continue
        seen.add(found)
        name, wanted = found
        optional = known[name].get("optional-dependencies", {})
        needed = list(known[name].get("dependencies", []))
        for extra in wanted:
            needed += optional.get(extra, [])
        waiting += [(each["name"], tuple(each.get("extra", []))) for each in needed]
    return {canonicalize_name(name) for name, _ in seen}
