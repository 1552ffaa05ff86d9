"""Imports a function that a setting names."""

import importlib
from collections.abc import Callable
from typing import Any

from common.errors import ConfigError


def import_function(path: str, field: str, service: str, takes: str) -> Callable[..., Any]:
    """Returns the function at the import path `package.module:name`.

    Args:
        path: value of the setting.
        field: name of the setting.
        service: process that imports it, for the remedy.
        takes: arguments of the function, for the remedy.

    Raises:
        ConfigError: the module cannot be imported, or has no such function.
    """
    module_name, _, name = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # importing runs the module, which may raise anything
        raise ConfigError(
            f"{module_name} cannot be imported ({type(error).__name__}: {error})",
            field=field,
            value=path,
            remedy=f"correct the path, or add its directory to PYTHONPATH of {service}",
        ) from error
    function: Callable[..., Any] | None = getattr(module, name, None)
    if not callable(function):
        found = "there is no such name" if function is None else f"it is of type {type(function).__name__}"
        raise ConfigError(
            f"{name} of {module_name} is not a function: {found}", field=field, value=path, remedy=f"name a function of {takes}"
        )
    return function
