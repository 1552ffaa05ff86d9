"""The installed package: `import rlhf_math` makes `common`, `learning`, `services`, `trainer` and
`jobgroup` importable.

These names are too general for `site-packages`, so the wheel keeps them in `rlhf_math/checkout/`,
which only this module puts on `sys.path` (docs/adr/0015-package.md). In a checkout they lie beside
this folder. The public names of `trainer` are also names of this module: `from rlhf_math import
OnlineRLTrainer`.
"""

import sys
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer import *  # noqa: F403

PACKAGES = ("common", "learning", "services", "trainer", "jobgroup")
_HERE = Path(__file__).resolve().parent
ROOT = _HERE / "checkout" if (_HERE / "checkout").is_dir() else _HERE.parent
"""The folder that holds `PACKAGES`, laid out as the repository."""
_UNUSED = ("benchmarks", "checks")
"""Packages beside them that only their own programs import: other packages of these names may
already be imported."""


def _activate() -> None:
    """Puts `ROOT` first on `sys.path`.

    Raises ImportError when another package of one of these names is imported already, and warns
    when one is hidden from now on. A folder without `__init__.py` counts only when it has been
    imported.
    """
    for name in (*PACKAGES, *_UNUSED):
        loaded = name in sys.modules
        spec = sys.modules[name].__spec__ if loaded else find_spec(name)
        origin = spec and (
            spec.origin or (loaded and next(iter(spec.submodule_search_locations or ()), None))
        )
        if (
            not origin
            or (loaded and name in _UNUSED)
            or Path(origin).resolve().is_relative_to(ROOT / name)
        ):
            continue
        if loaded:
            raise ImportError(
                f"rlhf_math needs its own package {name} in {ROOT / name}, "
                f"but another one is imported already: {origin}. "
                f"Rename it if it is yours; else import rlhf_math in a process of its own."
            )
        warnings.warn(
            f"{name} is now rlhf_math's own package in {ROOT / name}; "
            f"it hides {origin} in this process",
            RuntimeWarning,
            stacklevel=3,
        )
    sys.path[:] = [str(ROOT), *(entry for entry in sys.path if entry != str(ROOT))]


_activate()


def __getattr__(name: str) -> Any:
    import trainer

    if name == "__all__":
        return trainer.__all__
    if name not in trainer.__all__ and name not in trainer.ELSEWHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(trainer, name)


def __dir__() -> list[str]:
    import trainer

    return sorted([*globals(), *trainer.__all__])
