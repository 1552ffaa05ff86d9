"""Environments: the user's classes, as for TRL's `environment_factory`, optionally with `step` for
several turns.

    reset(**columns) -> str | None  begins; the text is appended to the user's last message
    any other public method         is a tool; every argument needs a type and a description
    step(messages) -> ... | None    called if an answer has no tool call; text or messages to
                                    continue, None to end
    get_reward() -> float | dict    called at the end; a mapping holds the parts, whose sum is the
                                    reward
    get_turn_rewards() -> list      called at the end; a number for every answer of the model, added
                                    to the reward
    close()                         always called
    gives_verdicts = True           get_reward returns 1 for a solved problem, else 0

All but `reset` are optional. Without `get_reward` the run's reward functions grade the last answer.
"""

import inspect
import types
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from common.errors import ConfigError
from common.process.imports import import_callable

FIELD = "environment.name"
Grade = Callable[..., Awaitable[tuple[float, dict[str, float | None]]]]
"""Returns the reward of an episode and its parts, for the environment's object, the task, the
messages after the prompt and the tokens that follow it."""
_PYTHON_TOOL = "services.environment.python_tool:PythonEnvironment"
_PARAMETERS = {"step": 1, "get_reward": 0, "get_turn_rewards": 0, "close": 0}
"""The methods that the server calls, besides `reset`, and how many arguments it passes."""
_SCALARS = (str, int, float, bool, "str", "int", "float", "bool")


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
    has_reward: bool = False
    """Otherwise the run's reward functions grade the answer."""
    gives_verdicts: bool = False
    """Whether its rewards say which episodes were right."""
    tool: Callable[[Any, str], Callable[..., Any]] = getattr
    """Returns a tool's function, given the object that `make` returned and the tool's name."""
    grade: Grade | None = None
    """Gives the reward in place of the environment."""

    @classmethod
    def load(cls, name: str) -> "Environment":
        """Imports the environment of a setting: `python` or `python:package.module:Class`.

        Raises ConfigError when it does not exist or violates the interface.
        """
        path = name.partition(":")[2] or _PYTHON_TOOL
        return cls.of(import_callable(path, FIELD), name)

    @classmethod
    def of(cls, user_class: Callable[[], Any], name: str) -> "Environment":
        """Checks a class. Raises ConfigError."""
        reset = getattr(user_class, "reset", None)
        if not inspect.isclass(user_class) or not callable(reset):
            raise ConfigError(
                f"{name} is not a class of environments",
                field=FIELD,
                value=name,
                remedy="name a class with reset(**columns); its other public methods are tools",
            )
        parameters = inspect.signature(reset).parameters.values()
        takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters)

        def is_method(member: Any) -> bool:
            return inspect.isfunction(member) or inspect.ismethod(member)

        methods = dict(inspect.getmembers(user_class, is_method))
        tools: dict[str, Any] = {}
        for method_name, method in methods.items():
            if method_name.startswith("_"):
                continue
            own = inspect.getattr_static(user_class, method_name)
            has_self = not isinstance(own, staticmethod | classmethod)
            bound = types.MethodType(method, object()) if has_self else method
            if method_name in _PARAMETERS:
                _refuse_tool_name(bound, method_name, name)
            elif method_name != "reset":
                tools[method_name] = _schema(bound, name)

        return cls(
            name=name,
            make=user_class,
            columns=None if takes_all else frozenset(each.name for each in parameters),
            tools=tools,
            has_steps="step" in methods,
            has_reward="get_reward" in methods,
            gives_verdicts=bool(getattr(user_class, "gives_verdicts", False)),
        )

    @classmethod
    def of_functions(cls, functions: Iterable[Callable[..., Any]], name: str) -> "Environment":
        """Returns an environment whose tools are stateless functions. Raises ConfigError."""
        tools = {function.__name__: function for function in functions}
        return cls(
            name=name,
            make=_Stateless,
            columns=frozenset(),
            tools={tool_name: _schema(function, name) for tool_name, function in tools.items()},
            tool=lambda _, tool_name: tools[tool_name],
        )

    def columns_of(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the columns of a row that `reset` accepts."""
        if self.columns is None:
            return dict(row)
        return {name: value for name, value in row.items() if name in self.columns}


class _Stateless:
    """The environment for tools that are plain functions."""

    def reset(self) -> None:
        """Does nothing: functions have no state."""


def _refuse_tool_name(method: Callable[..., Any], method_name: str, name: str) -> None:
    """Raises ConfigError for a tool that has the name of a method that the server calls, as its
    arguments show. For TRL, such a method is a tool like any other.
    """
    signature = inspect.signature(method)
    required = [each for each in signature.parameters.values() if each.default is each.empty]
    is_tool = any(each.annotation in _SCALARS for each in required)
    try:
        signature.bind(*[None] * _PARAMETERS[method_name])
    except TypeError:
        is_tool = True
    if is_tool:
        given = "messages" if method_name == "step" else ""
        raise ConfigError(
            f"{name} has a tool named {method_name}, but the server itself calls "
            f"{method_name}({given})",
            field=FIELD,
            value=f"{name}.{method_name}",
            remedy="give the tool another name",
        )


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
            remedy="give every argument a type and a line in the docstring's `Args:`, or start its "
            "name with _",
        ) from None
