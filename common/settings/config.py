"""The whole configuration, in which every setting is declared once.

Precedence, later wins: defaults < a YAML file (`--config FILE` or `RUN_CONFIG=FILE`) < environment
< `--section.field`. Environment variables are `RLHF_SECTION__FIELD` and the short names in
`SHORT_NAMES` (`MODEL_NAME`, `NUM_EPOCHS`, …). Every program reads the whole configuration and uses
its own sections; an unknown name is an error.
"""

import difflib
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError, model_validator
from pydantic.fields import FieldInfo

from common import Json
from common.errors import ConfigError, shorten
from common.process.cli import fail
from common.process.topology import Topology, setting_status
from common.settings.checks import check
from common.settings.explain import explained
from common.settings.help import print_help
from common.settings.rewards import BUILT_IN, OwnReward, Reward
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
    "TINKER_KEYS",
    "LOG_LEVEL",
    "LOG_FORMAT",
)
_VARIABLES = (*SHORT_NAMES, *_OTHERS)


class Config(Settings):
    """The whole configuration: settings that fit one another."""

    @model_validator(mode="after")
    def _resolved(self) -> "Config":
        """Resolves defaults that depend on other settings, so that no reader has to, and checks
        that all fit one another.
        """
        if self.state_dir == IN_RUN_DIR:  # unset: each run keeps its own state
            self.state_dir = (self.trainer.run_dir or Path("runs/local")) / "state"
        # Engines on GPUs round differently from the trainer, and with staleness weights differ too.
        if self.algorithm.rollout_correction == "auto":
            on_gpus = self.rollout.device == "cuda" or self.rollout.is_sglang_on_gpus
            correction = "truncate" if self.trainer.max_staleness or on_gpus else "none"
            self.algorithm = self.algorithm.model_copy(update={"rollout_correction": correction})
        check(self)
        return self

    @property
    def step_tokens(self) -> int:
        """The most tokens that the answers of a step have, if they are single ones."""
        answers = self.trainer.batch_size * self.sampling.group_size
        return answers * self.sampling.max_new_tokens

    def with_memory_use(
        self, checkpointing: bool | str, reshards: bool, pass_tokens: int
    ) -> "Config":
        """Returns a copy with what `auto` of `trainer.activation_checkpointing`,
        `parallel.reshard_after_forward` and `trainer.micro_batch_tokens` means on a machine.
        """
        trainer = self.trainer.model_copy(
            update={
                "activation_checkpointing": checkpointing,
                "micro_batch_tokens": pass_tokens,
            }
        )
        parallel = self.parallel.model_copy(update={"reshard_after_forward": reshards})
        return self.model_copy(update={"trainer": trainer, "parallel": parallel})


@dataclass(frozen=True)
class SettingsSubset:
    """A program that reads only some of the settings and has its own defaults for some of them."""

    about: str | None
    """The first text of its `--help`."""
    does: str
    """Why it does not read the other settings, for error messages."""
    reads: Collection[str]
    defaults: Mapping[str, Any]
    meanings: Mapping[str, str]
    """What a setting means to this program, for its `--help`, where that differs."""

    def check(self, config: Config) -> None:
        """Raises ConfigError for a setting that is not read."""
        # What equals the default was not set, or makes no difference.
        plain = Config()
        for name in names():
            if name in self.reads:
                continue
            value = reduce(getattr, name.split("."), config)
            if value != reduce(getattr, name.split("."), plain):
                raise ConfigError(
                    f"{name} is set but not read, since {self.does}",
                    field=name,
                    value=shorten(value),
                    remedy="leave it out",
                )


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
    subset = subset or SettingsSubset(about, does="", reads=known, defaults={}, meanings={})
    everything = "--help-all" in rest
    if everything or not {"-h", "--help"}.isdisjoint(rest):
        print_help(
            prog,
            subset.about,
            {name: field for name, field in known.items() if name in subset.reads},
            everything=everything,
            defaults=subset.defaults,
            meanings=subset.meanings,
        )
        raise SystemExit(0)
    path = path or env.get("RUN_CONFIG") or None
    try:
        # All programs of a job group know its name, and so find one directory without being told.
        run_dir = f"runs/{Topology.from_env(env).group or 'local'}"
        values: Json = {"trainer": {"run_dir": run_dir}}
        for name, own in subset.defaults.items():
            put(values, tuple(name.split(".")), own)

        # Later ones win: file, environment, command line.
        if path:
            values = merge(values, from_file(Path(path)))
        values = merge(values, from_env(env, known))
        values = merge(values, from_words(rest, known))
        config = Config(**values)
        subset.check(config)
        return config
    except ValidationError as error:
        raise from_validation(error) from None


def from_mapping(settings: Mapping[str, Any]) -> Config:
    """Builds the configuration from values by setting name, such as `trainer.batch_size`. Raises
    ConfigError.
    """
    content: Json = {}
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
        # A section has settings below it; `seed` and `state_dir` stand at the top.
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
    # One at a time: mending the first often removes those that follow from it.
    first = error.errors()[0]
    # Without list indices.
    place = ".".join(str(part) for part in first["loc"] if not isinstance(part, int))
    name = next((setting for setting in names() if place.startswith(f"{setting}.")), place)
    if name == "reward.functions":  # has arguments below its name, unlike other lists
        name = place
    if first["type"] == "extra_forbidden":
        return unknown([*names(), *_reward_arguments()], name, name, first["input"])
    wrong = explained(first)
    # A name that is no text, such as a lone surrogate, has no place.
    field = next(iter(wrong.settings), name) or "configuration"
    # A whole section explains nothing and might hold a credential.
    is_section = isinstance(first["input"], dict | BaseModel)
    value = None if is_section else shorten(first["input"])
    return ConfigError(
        wrong.reason, field=field, value=value, remedy=wrong.remedy, settings=wrong.settings
    )


def _reward_arguments() -> Iterator[str]:
    """Yields the arguments of all reward functions, such as `reward.functions.judge.url`."""
    kinds: dict[str, type[Reward]] = {**BUILT_IN, "own": OwnReward}
    for name, kind in kinds.items():
        for argument in kind.model_fields:
            yield f"reward.functions.{name}.{argument}"


def misspelt(variable_name: str) -> str:
    """Returns the variable that was probably meant; empty when the name exists or resembles none of
    ours.
    """
    known = names()
    if variable_name in _VARIABLES:
        return ""
    if variable_name.startswith(PREFIX):
        name = variable_name.removeprefix(PREFIX).lower().replace("__", ".")
        meant = [] if name in known else list(map(variable, near(name, known)))
        return " or ".join(meant) if meant or name in known else "RLHF_SECTION__FIELD"
    # `LEARNING_RATE` looks like the short names, of which there are few: the full one is meant.
    leaf = variable_name.lower()
    meant = difflib.get_close_matches(variable_name.upper(), _VARIABLES, n=1, cutoff=0.8)
    if not meant and "_" in leaf:
        meant = [variable(name) for name in known if name.rpartition(".")[2] == leaf]
    return " or ".join(meant)
