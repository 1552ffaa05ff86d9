"""Makes the reward functions of a worker process, and the handler that calls them."""

import json
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from common import Json
from common.errors import ConfigError
from common.process.imports import import_callable
from services.reward.functions.base import RewardFunction, Score, WrongScores, reason_of
from services.reward.functions.plain import PlainFunction

_FIELDS = [field.name for field in fields(Score)]


def prepare(arguments: Json) -> Callable[[], Callable[[str], str]]:
    """Imports reward functions, and returns a function that creates a worker's handler, which calls
    one of them.

    Args:
        arguments: `functions`, a list with the import path `target` and the `arguments` of each.

    Raises:
        RuntimeError: an import path does not name a reward function.
    """
    specs: list[Json] = arguments["functions"]
    try:
        targets = [import_callable(spec["target"], "reward.functions") for spec in specs]
    except ConfigError as error:
        raise RuntimeError(f"the reward function {error.message}") from error

    def make() -> Callable[[str], str]:
        functions = [_made(target, spec) for target, spec in zip(targets, specs, strict=True)]

        def handle(line: str) -> str:
            call = json.loads(line)
            if "functions" in call:
                return json.dumps([[each.name, each.gives_verdicts] for each in functions])
            function = functions[call["function"]]
            try:
                scores = function.scores(call["completions"], **call["columns"])
            except Exception as error:
                always = isinstance(error, WrongScores)
                return json.dumps({"error": reason_of(error), "always": always})
            return json.dumps(
                {"scores": [{name: getattr(score, name) for name in _FIELDS} for score in scores]}
            )

        return handle

    return make


def _made(target: Any, spec: Json) -> RewardFunction:
    try:
        function = target(**spec["arguments"]) if isinstance(target, type) else target
    except Exception as error:
        raise RuntimeError(
            f"the reward function {spec['target']} cannot be created: "
            f"{type(error).__name__}: {error}"
        ) from error
    if isinstance(function, RewardFunction):
        return function
    if not callable(function):
        raise RuntimeError(
            f"{spec['target']} is neither a RewardFunction nor a function of completions"
        )
    return PlainFunction(function)
