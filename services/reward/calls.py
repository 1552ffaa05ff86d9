"""Calls reward functions. Runs in the processes of `services.reward.worker`, not in the server."""

import json
import logging
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from common.errors import ConfigError
from common.imports import import_callable
from services.reward.functions.base import RewardFunction

log = logging.getLogger(__name__)
_MAX_REASON_CHARS = 500


def prepare(arguments: dict[str, Any]) -> Callable[[], Callable[[str], str]]:
    """Imports reward functions, and returns what makes a worker's handler, which calls one of them.

    Args:
        arguments: `functions`, a list with the import path `target` and the `arguments` of each.

    Raises:
        RuntimeError: an import path does not name a reward function.
    """
    specs: list[dict[str, Any]] = arguments["functions"]
    try:
        targets = [(import_callable(spec["target"], "reward.functions"), spec) for spec in specs]
    except ConfigError as error:
        raise RuntimeError(f"the reward function {error.message}") from error

    def make() -> Callable[[str], str]:
        functions = [_made(target, spec) for target, spec in targets]
        return lambda line: _handle(functions, json.loads(line))

    return make


def _made(target: Any, spec: dict[str, Any]) -> RewardFunction:
    try:
        function = target(**spec["arguments"]) if isinstance(target, type) else target
    except Exception as error:
        raise RuntimeError(f"the reward function {spec['target']} cannot be made: {type(error).__name__}: {error}") from error
    if not isinstance(function, RewardFunction):
        raise RuntimeError(f"{spec['target']} is not a RewardFunction: subclass services.reward.functions.RewardFunction")
    return function


def _handle(functions: list[RewardFunction], call: dict[str, Any]) -> str:
    if "names" in call:
        return json.dumps([function.name for function in functions])
    function = functions[call["function"]]
    try:
        scores = function.scores(call["completions"], **call["columns"])
    except Exception as error:
        log.warning("the reward function %s failed", function.name, exc_info=True)
        return json.dumps({"error": f"{type(error).__name__}: {error}"[:_MAX_REASON_CHARS]})
    return json.dumps({"scores": [asdict(score) for score in scores]})
