"""The whole configuration, in which every setting is declared once.

Precedence, later wins: defaults < a YAML file (`--config FILE` or `RUN_CONFIG=FILE`) < environment
< `--section.field`. Environment variables are `RLHF_SECTION__FIELD` and the short names in
`SHORT_NAMES` (`MODEL_NAME`, `NUM_EPOCHS`, …). Every program reads the whole configuration and uses
its own sections; an unknown name is an error.
"""

import difflib
import os
import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError, model_validator
from pydantic.fields import FieldInfo

from common.errors import ConfigError, did_you_mean, shorten
from common.process.cli import fail
from common.process.topology import Topology, setting_status
from common.settings.checks import check
from common.settings.explain import explained
from common.settings.help import print_help
from common.settings.rewards import BUILT_IN, OwnReward
from common.settings.settings import IN_RUN_DIR, Settings
from common.settings.sources import (
    PREFIX,
    SHORT_NAMES,
    from_env,
    from_file,
    from_words,
    merge,
    near,
    put,
    take_config_option,
    unknown,
    variable,
)

_OTHERS = (
    "RUN_CONFIG",
    "API_TOKEN",
    "HF_TOKEN",
    "HF_HOME",
    "JUDGE_API_KEY",
    "TEACHER_API_KEY",
    "LOG_LEVEL",
    "LOG_FORMAT",
)
_VARIABLES = (*SHORT_NAMES, *_OTHERS)


class Config(Settings):
    """The whole configuration: settings that fit one another."""

    @model_validator(mode="after")
    def _resolved(self) -> "Config":
        """Resolves defaults that depend on other settings, so that no reader has to."""
        if self.state_dir == IN_RUN_DIR:
            self.state_dir = (self.trainer.run_dir or Path("runs/local")) / "state"
        if self.algorithm.rollout_correction == "auto":
            correction = (
                "truncate" if self.trainer.max_staleness or self.rollout.on_gpus else "none"
            )
            self.algorithm = self.algorithm.model_copy(update={"rollout_correction": correction})
        return self

    def with_memory_use(self, checkpointing: bool | str, reshards: bool) -> "Config":
        """Returns a copy with what `auto` of `trainer.activation_checkpointing` and
        `parallel.reshard_after_forward` means on a machine.
        """
        trainer = self.trainer.model_copy(update={"activation_checkpointing": checkpointing})
        parallel = self.parallel.model_copy(update={"reshard_after_forward": reshards})
        return self.model_copy(update={"trainer": trainer, "parallel": parallel})

    @model_validator(mode="after")
    def _fits(self) -> "Config":
        check(self)
        return self


@dataclass(frozen=True)
class SettingsSubset:
    """A program that reads only some of the settings and has its own defaults for some of them."""

    about: str
    """The first text of its `--help`."""
    does: str
    """Why it does not read the other settings, for error messages."""
    reads: Collection[str]
    defaults: Mapping[str, Any]
    meanings: Mapping[str, str]
    """What a setting means to this program, for its `--help`, where that differs."""

    def check(self, config: Config) -> None:
        """Raises ConfigError for a setting that is not read."""
        plain = Config()
        for name in names():
            value = reduce(getattr, name.split("."), config)
            default = reduce(getattr, name.split("."), plain)
            if name not in self.reads and value != default:
                problem = f"{name} is set but not read, since {self.does}"
                raise ConfigError(problem, field=name, value=shorten(value), remedy="leave it out")


def load(
    argv: Sequence[str] | None = None,
    env: Mapping[str, str] | None = None,
    prog: str | None = None,
    subset: SettingsSubset | None = None,
    about: str | None = None,
) -> Config:
    """Builds the configuration from a file, the environment and the command line, for one `subset`
    or for any program. `about` is the first text of the help.

    Raises ConfigError with the field, its value and the remedy. `--help` and `--help-all` print the
    settings and exit.
    """
    argv = sys.argv[1:] if argv is None else argv
    env = os.environ if env is None else env
    path, rest = take_config_option(list(argv))
    known = names()
    everything = "--help-all" in rest
    if everything or not {"-h", "--help"}.isdisjoint(rest):
        reads = {name: field for name, field in known.items() if not subset or name in subset.reads}
        print_help(
            prog,
            subset.about if subset else about,
            reads,
            everything=everything,
            defaults=subset.defaults if subset else {},
            meanings=subset.meanings if subset else {},
        )
        raise SystemExit(0)
    path = path or env.get("RUN_CONFIG") or None
    try:
        run_dir = f"runs/{Topology.from_env(env).group or 'local'}"
        values: dict[str, Any] = {"trainer": {"run_dir": run_dir}}
        for name, own in (subset.defaults if subset else {}).items():
            put(values, tuple(name.split(".")), own)

        # Later ones win: file, environment, command line.
        if path:
            values = merge(values, from_file(Path(path)))
        values = merge(values, from_env(env, known))
        values = merge(values, from_words(rest, known))
        config = Config(**values)
        if subset:
            subset.check(config)
        return config
    except ValidationError as error:
        raise from_validation(error) from None


def from_mapping(settings: Mapping[str, Any]) -> Config:
    """Builds the configuration from values by setting name, such as `trainer.batch_size`. Raises
    ConfigError.
    """
    content: dict[str, Any] = {}
    for name, value in settings.items():
        put(content, tuple(name.split(".")), value)
    try:
        return Config(**content)
    except ValidationError as error:
        raise from_validation(error) from None


def names() -> dict[str, FieldInfo]:
    """Returns every setting by name, such as `trainer.batch_size`."""
    found: dict[str, FieldInfo] = {}
    for name, field in Config.model_fields.items():
        inner = getattr(field.annotation, "model_fields", None)
        if inner:
            found |= {f"{name}.{key}": value for key, value in inner.items()}
        else:
            found[name] = field
    return found


def main(run: Callable[[Config], None], prog: str) -> None:
    """Loads the configuration and calls `run`; a wrong setting prints its error and exits with
    `setting_status()`.
    """
    try:
        run(load(prog=f"python -m {prog}"))
    except ConfigError as error:
        fail(error, setting_status())


def from_validation(error: ValidationError) -> ConfigError:
    """Converts the first problem of a pydantic error into a ConfigError."""
    first = error.errors()[0]
    # Without list indices.
    parts = [str(part) for part in first["loc"] if not isinstance(part, int)]
    place = ".".join(parts)
    name = next((setting for setting in names() if place.startswith(f"{setting}.")), place)
    if name == "reward.functions":
        name = place
        if first["type"] == "extra_forbidden":
            _, _, function, argument = parts
            return ConfigError(
                f"the reward function {function} has no argument {argument}",
                field=name,
                value=shorten(first["input"]),
                remedy=did_you_mean(argument, BUILT_IN.get(function, OwnReward).model_fields),
            )
    if first["type"] == "extra_forbidden":
        return unknown(names(), name, name, first["input"])
    message, remedy = explained(first)
    if first["type"] == "list_type" and name.startswith("reward.functions."):
        remedy = "give a list, such as [first, second]"  # a pattern may have commas
    # A whole section explains nothing and might hold a credential.
    if isinstance(first["input"], dict | BaseModel):
        words = (word.rstrip(".") for word in re.findall(r"[\w.]+", message))
        named = (word for word in words if "." in word and word in names())
        return ConfigError(message, field=next(named, name or "configuration"), remedy=remedy)
    # A name that is no text, such as a lone surrogate, has no place.
    field = name or "configuration"
    return ConfigError(message, field=field, value=shorten(first["input"]), remedy=remedy)


def misspelt(variable_name: str) -> str:
    """Returns the variable that was probably meant; empty when the name exists or resembles none of
    ours.
    """
    if variable_name in _VARIABLES:
        return ""
    if variable_name.startswith(PREFIX):
        name = variable_name.removeprefix(PREFIX).lower().replace("__", ".")
        return (
            ""
            if name in names()
            else " or ".join(map(variable, near(name, names()))) or "RLHF_SECTION__FIELD"
        )
    meant = difflib.get_close_matches(variable_name.upper(), _VARIABLES, n=1, cutoff=0.8)
    leaf = variable_name.lower()
    return " or ".join(
        meant
        or [variable(name) for name in names() if "_" in leaf and name.rpartition(".")[2] == leaf]
    )
