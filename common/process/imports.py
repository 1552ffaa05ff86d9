"""Imports what a setting names by import path, and imports heavy libraries quickly."""

import gc
import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from common.errors import ConfigError

_T = TypeVar("_T")


def named_or_imported(name: str, built_in: Mapping[str, _T], field: str) -> _T:
    """Returns the built-in function of that name, or the one at the import path
    `package.module:name`; `name` is the value of the setting `field`. Raises ConfigError.
    """
    found: Any = built_in.get(name) or import_callable(name, field)
    return found  # type: ignore[no-any-return]  # nobody checks what an imported one is


def import_callable(path: str, field: str) -> Callable[..., Any]:
    """Imports the function or class at `package.module:name`, the value of the setting `field`.

    Raises ConfigError with `path` and `field`, whatever the module raises on import.
    """
    module, _, name = path.partition(":")
    try:
        if not module or not name:
            raise ValueError("an import path has the form package.module:name")
        found: Callable[..., Any] = getattr(importlib.import_module(module), name)
        if not callable(found):
            raise TypeError(f"it is of type {type(found).__name__}, which cannot be called")
    except Exception as error:
        raise ConfigError(
            f"{path} cannot be imported: {type(error).__name__}: {error}",
            field=field,
            value=path,
            remedy="correct the path, or add its directory to the PYTHONPATH of the task",
        ) from error
    return found


@contextmanager
def heavy_imports() -> Iterator[None]:
    """Imports torch and transformers without garbage collection, which takes a seventh of their
    import otherwise.

    The imported objects live as long as the process; later collections skip them.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
