"""Environments: the user's classes, as for TRL's `environment_factory`, optionally with `step` for
several turns.

    reset(**columns) -> str | None      begins; the text is appended to the user's last message any
    other public method             is a tool; every argument needs a type and a description
    step(messages) -> ... | None        called if an answer has no tool call; text or messages to
    continue, None to end get_reward() -> float | dict        called at the end; a mapping holds the
    parts, whose sum is the reward get_turn_rewards() -> list          called at the end; a number
    for every answer of the model, added to the reward close()                             always
    called

All but `reset` are optional. Without `get_reward` the run's reward functions grade the last answer.
"""

import inspect
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from common.errors import ConfigError
from common.process.imports import import_callable

FIELD = "environment.name"
BUILT_IN = {"python": "services.environment.python_tool:PythonEnvironment"}
_RESERVED = frozenset({"reset", "step", "get_reward", "get_turn_rewards", "close"})


@dataclass(frozen=True)
class Environment:
    """A checked environment class."""

    name: str
    make: Callable[[], Any]
    columns: frozenset[str] | None
    """Columns that `reset` accepts; None for all."""
    tools: dict[str, Any] = field(default_factory=dict)
    """The functions offered to the model in OpenAI's format, by name."""
    has_steps: bool = False
    has_reward: bool | None = False
    """None: it may have no reward; then the run's reward functions grade the answer."""
    tool: Callable[[Any, str], Callable[..., Any]] = getattr
    """Returns a tool's function, given the object that `make` returned and the tool's name."""
    is_done: Callable[[Any], bool] = lambda _: False
    """Whether a tool has ended the episode."""

    @classmethod
    def load(cls, name: str) -> "Environment":
        """Imports the environment of a setting: `python` or `python:package.module:Class`.

        Raises ConfigError when it does not exist or violates the interface.
        """
        path = name.partition(":")[2]
        if path and ":" not in path:
            module, _, leaf = path.rpartition(".")
            path = f"{module}:{leaf}"
        found = import_callable(path or BUILT_IN["python"], FIELD)
        return cls.of(found, name)

    @classmethod
    def of(cls, made: Callable[[], Any], name: str) -> "Environment":
        """Checks a class. Raises ConfigError."""
        if not inspect.isclass(made) or not callable(getattr(made, "reset", None)):
            remedy = "name a class with reset(**columns); its other public methods are tools"
            raise ConfigError(
                f"{name} is not a class of environments", field=FIELD, value=name, remedy=remedy
            )
        parameters = inspect.signature(getattr(made, "reset", made)).parameters.values()
        takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters)
        methods = {
            key: value
            for key, value in inspect.getmembers(made, inspect.isfunction)
            if not key.startswith("_")
        }
        return cls(
            name,
            made,
            None if takes_all else frozenset(each.name for each in parameters),
            {
                key: _schema(types.MethodType(method, object()), name)
                for key, method in methods.items()
                if key not in _RESERVED
            },
            "step" in methods,
            "get_reward" in methods,
        )

    @classmethod
    def of_functions(cls, functions: Iterable[Callable[..., Any]], name: str) -> "Environment":
        """Returns an environment whose tools are stateless functions. Raises ConfigError."""
        tools = {function.__name__: function for function in functions}
        schemas = {key: _schema(function, name) for key, function in tools.items()}
        return cls(name, _Stateless, frozenset(), schemas, tool=lambda _, key: tools[key])

    def columns_of(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the columns of a row that `reset` accepts."""
        return {
            name: value
            for name, value in row.items()
            if self.columns is None or name in self.columns
        }


class _Stateless:
    """The environment for tools that are plain functions."""

    def reset(self) -> None:
        """Nothing begins."""


def _schema(method: Callable[..., Any], name: str) -> Any:
    """Returns a tool's description for the model, from its types and docstring. Raises
    ConfigError.
    """
    from transformers.utils import get_json_schema  # slow to import

    try:
        return get_json_schema(method)
    except Exception as error:
        raise ConfigError(
            f"the tool {method.__name__} of {name} cannot be described: {error}",
            field=FIELD,
            value=f"{name}.{method.__name__}",
            remedy="give every argument a type and a line in the docstring's `Args:`, or start its name with _",
        ) from None
