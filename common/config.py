"""Every setting of the system, declared once.

Order, later wins: defaults here < a YAML file (`--config FILE` or `RUN_CONFIG=FILE`) < environment < `--section.field`.
Environment: `RLHF_SECTION__FIELD`, and the short names of `SHORT_NAMES` (`MODEL_NAME`, `NUM_EPOCHS`, `BATCH_SIZE`, …).
Every program reads the whole configuration and uses its own sections; an unknown name is an error.
"""

import difflib
import json
import os
import re
import sys
from argparse import SUPPRESS, ArgumentError, ArgumentParser
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.fields import FieldInfo

from common.algorithm import CORRECTION, TURN_ADVANTAGES, AlgorithmSection
from common.errors import ConfigError, shorten
from common.explain import explained
from common.logs import last_words
from common.removed import REMOVED
from common.sections import (
    MAIN,
    MAX_KEPT,
    CriticSection,
    DataSection,
    EnvironmentSection,
    EvaluationSection,
    LoraSection,
    Main,
    ModelSection,
    ReplaySection,
    RewardSection,
    RolloutSection,
    SamplingSection,
    TeacherSection,
    TrackersSection,
    TrainerSection,
)
from common.topology import Topology, setting_status

if TYPE_CHECKING:
    from pydantic_settings import PydanticBaseSettingsSource

SHORT_NAMES = {
    "MODEL_NAME": ("model", "name"),
    "NUM_EPOCHS": ("trainer", "num_epochs"),
    "BATCH_SIZE": ("trainer", "batch_size"),
    "MAX_STEPS": ("trainer", "max_steps"),
    "SEED": ("seed",),
    "STATE_DIR": ("state_dir",),
    "RUN_DIR": ("trainer", "run_dir"),
}
_VARIABLES = (*SHORT_NAMES, "RUN_CONFIG", "API_TOKEN", "HF_TOKEN", "HF_HOME", "JUDGE_API_KEY")
_VARIABLES = (*_VARIABLES, "TEACHER_API_KEY", "LOG_LEVEL", "LOG_FORMAT")
_PREFIX = "RLHF_"
_FORM = "write --section.name VALUE; --help lists the settings that matter most"
_SINGLE_SAMPLING = (
    *("top_p", "top_k", "min_p", "stop", "stop_token_ids", "min_new_tokens", "ignore_eos"),
    *("chat_template_kwargs", "prefill", "completion_timeout_s", "max_thinking_tokens"),
)
"""Settings of `sampling` that episodes do not have."""
_IN_RUN_DIR = Path("RUN_DIR/state")
"""Stands for `state` in the run directory: the state belongs to its run."""
_RANK_OPTIONS = frozenset(
    f"--{name}"
    for way, size in (("tp", "tensor-parallel-size"), ("dp", "data-parallel-size"), ("pp", "pipeline-parallel-size"))
    for name in (way, f"{way}-size", size, "nnodes")
)
"""Arguments of SGLang that change the number of ranks of an engine; a data-parallel one refuses a weight-sync group."""


class Config(BaseModel):
    """The whole configuration."""

    model_config = ConfigDict(
        extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False, protected_namespaces=(), validate_default=True
    )

    seed: Main[int] = Field(0, ge=0)
    """Seed of data order, sampling and dropout. A run repeats with the same seed."""
    state_dir: Path = _IN_RUN_DIR
    """Directory of what services keep across a restart: data position, replay store, weights and logs."""
    max_body_mb: int = Field(256, gt=0)
    """Largest request body that a service accepts, in MB."""
    model: ModelSection = ModelSection()
    lora: LoraSection = LoraSection()
    data: DataSection = DataSection()
    rollout: RolloutSection = RolloutSection()
    sampling: SamplingSection = SamplingSection()
    evaluation: EvaluationSection = EvaluationSection()
    reward: RewardSection = RewardSection()
    replay: ReplaySection = ReplaySection()
    critic: CriticSection = CriticSection()
    algorithm: AlgorithmSection = AlgorithmSection()
    teacher: TeacherSection = TeacherSection()
    trainer: TrainerSection = TrainerSection()
    environment: EnvironmentSection = EnvironmentSection()
    trackers: TrackersSection = TrackersSection()

    @model_validator(mode="after")
    def _resolved(self) -> "Config":
        """Replaces defaults that depend on other settings by what they stand for, so that no reader has to know."""
        if self.state_dir == _IN_RUN_DIR:
            self.state_dir = (self.trainer.run_dir or Path("runs/local")) / "state"
        if self.algorithm.rollout_correction == "auto":
            correction = "truncate" if self.trainer.max_staleness or self.rollout.on_gpus else "none"
            self.algorithm = self.algorithm.model_copy(update={"rollout_correction": correction})
        return self

    @model_validator(mode="after")
    def _fits(self) -> "Config":
        if self.rollout.engine == "embedded" and self.sampling.max_new_tokens >= self.rollout.max_context_tokens:
            raise ValueError(
                f"sampling.max_new_tokens {self.sampling.max_new_tokens} leaves no room for a prompt in "
                f"rollout.max_context_tokens {self.rollout.max_context_tokens}: raise the latter or lower the former"
            )
        if self.algorithm.overlong_buffer >= self.sampling.max_new_tokens:
            raise ValueError(
                f"algorithm.overlong_buffer {self.algorithm.overlong_buffer} is not below sampling.max_new_tokens "
                f"{self.sampling.max_new_tokens}: lower the former"
            )
        if self.sampling.group_size == 1 and self.algorithm.advantage not in ("gae", "none"):
            raise ValueError(
                f"algorithm.advantage {self.algorithm.advantage} compares the completions of a group, but "
                "sampling.group_size is 1: raise the latter, or take a critic (algorithm.name ppo)"
            )
        if self.algorithm.advantage == "none" and not self.teacher.url:
            raise ValueError(
                "algorithm.advantage none learns from a teacher alone, and teacher.url is empty: set the latter, or take "
                "another algorithm.advantage"
            )
        if self.algorithm.advantage == "reward_normalised":
            self._check_gdpo()
        if self.teacher.url and self.sampling.cuts():
            raise ValueError(
                f"sampling.{next(iter(self.sampling.cuts()))} leaves the policy other tokens than the teacher has, so that "
                "their log-probabilities cannot be compared: leave it out, or teacher.url empty"
            )
        completions = self.trainer.batch_size * self.sampling.group_size
        if self.algorithm.mini_batches > completions:
            raise ValueError(
                f"algorithm.mini_batches {self.algorithm.mini_batches} is more than the {completions} completions of a batch: "
                "lower it"
            )
        if self.trainer.weight_sync == "distributed" and self.rollout.engine == "sglang":
            ranks = _RANK_OPTIONS.intersection(word.partition("=")[0] for word in self.rollout.engine_args)
            if ranks:
                raise ValueError(
                    f"rollout.engine_args has {min(ranks)}, but with trainer.weight_sync distributed the ranks of an engine "
                    "are its rollout.tensor_parallel_size: set that instead, or trainer.weight_sync http"
                )
        self._check_sampling()
        self._check_lora()
        self._check_colocate()
        self._check_environment()
        for name, reason in self._unread().items():
            section, _, field = name.partition(".")
            holder = getattr(self, section)
            if getattr(holder, field) != type(holder).model_fields[field].default:
                raise ValueError(f"{name} is set but not read, since {reason}: leave it out")
        in_flight = (self.trainer.max_staleness + 1) * self.trainer.batch_size * self.sampling.group_size
        if in_flight > self.replay.capacity:
            raise ValueError(
                f"(trainer.max_staleness + 1) × trainer.batch_size × sampling.group_size = {in_flight} completions do not "
                f"fit in replay.capacity {self.replay.capacity}: raise the latter or lower one of the former"
            )
        return self

    def _check_gdpo(self) -> None:
        """Refuses what changes the sum of the rewards alone, where each reward is normalised by itself."""
        if self.reward.require_stop:
            raise ValueError(
                "reward.require_stop changes the sum of the rewards, and algorithm.advantage reward_normalised compares each "
                "by itself: set the former to false and algorithm.mask_truncated to true"
            )
        if self.algorithm.kl_coef and self.algorithm.kl_in == "reward":
            raise ValueError(
                "algorithm.kl_in reward changes the sum of the rewards, and algorithm.advantage reward_normalised compares "
                "each by itself: take algorithm.kl_in loss"
            )
        if paths := [name for name in self.reward.weights if ":" in name]:
            raise ValueError(
                f"reward.weights has {paths[0]}, whose scores come under a name of its own, and algorithm.advantage "
                "reward_normalised weighs scores by their names: leave it at 1"
            )

    def _check_sampling(self) -> None:
        sampling, evaluation = self.sampling, self.evaluation
        if sampling.min_new_tokens > sampling.max_new_tokens:
            raise ValueError(
                f"sampling.min_new_tokens {sampling.min_new_tokens} is above sampling.max_new_tokens "
                f"{sampling.max_new_tokens}: lower it"
            )
        if (sampling.max_thinking_tokens or 0) >= sampling.max_new_tokens:
            raise ValueError(
                f"sampling.max_thinking_tokens {sampling.max_thinking_tokens} leaves no room for an answer in "
                f"sampling.max_new_tokens {sampling.max_new_tokens}: lower the former"
            )
        if (sampling.completion_timeout_s or 0) > sampling.request_timeout_s:
            raise ValueError(
                f"sampling.completion_timeout_s {sampling.completion_timeout_s:g} is above sampling.request_timeout_s "
                f"{sampling.request_timeout_s:g}, after which the group is lost: lower it"
            )
        longest, room = evaluation.max_new_tokens or 0, self.rollout.max_context_tokens
        if self.rollout.engine == "embedded" and longest >= room:
            raise ValueError(
                f"evaluation.max_new_tokens {longest} leaves no room for a prompt in rollout.max_context_tokens {room}: raise "
                "the latter or lower the former"
            )
        if evaluation.n > 1 and evaluation.temperature == 0:
            raise ValueError(f"evaluation.n is {evaluation.n}, and greedy answers are all the same: set evaluation.temperature")
        if (sampling.top_k or 0) > MAX_KEPT:
            raise ValueError(
                f"sampling.top_k {sampling.top_k} is above {MAX_KEPT}, and in training the tokens that were sampled from "
                "travel with every token: lower it, or leave it unset and set evaluation.top_k"
            )
        if sampling.cuts() and self.rollout.engine == "sglang" and self.rollout.router == "sglang-router":
            raise ValueError(
                f"sampling.{next(iter(sampling.cuts()))} is for training, where the trainer has to know which tokens SGLang "
                "sampled from, and rollout.router sglang-router drops that question: set rollout.router smg, or leave it out "
                "and set that of evaluation"
            )

    def _check_colocate(self) -> None:
        if not self.rollout.colocate:
            return
        if self.trainer.max_staleness:
            raise ValueError(
                f"trainer.max_staleness {self.trainer.max_staleness} generates beside the update, and with rollout.colocate "
                "both have the same GPUs in turn: set the former to 0, or the latter to false"
            )
        if self.trainer.weight_sync == "distributed":
            raise ValueError(
                "trainer.weight_sync distributed needs the GPUs of both sides at once, and with rollout.colocate they have the "
                "same in turn: set the former to http or shared"
            )
        if self.rollout.engine == "sglang" and self.rollout.device == "cpu":
            raise ValueError(
                "rollout.device cpu leaves no GPU to share, and SGLang releases the memory of GPUs alone: set rollout.colocate "
                "to false, or rollout.engine embedded"
            )

    def _check_environment(self) -> None:
        """Refuses what is of single completions alone."""
        if not self.environment.name:
            return
        if self.algorithm.needs_critic:
            raise ValueError(
                f"algorithm.advantage {self.algorithm.advantage} needs a critic, which values single completions, and "
                "environment.name makes episodes: take another algorithm, such as grpo"
            )
        if self.environment.turn_discount is not None and self.algorithm.advantage not in TURN_ADVANTAGES:
            raise ValueError(
                f"algorithm.advantage {self.algorithm.advantage} does not compare single turns: leave "
                f"environment.turn_discount out, or take one of {', '.join(TURN_ADVANTAGES)}"
            )
        single = {"sampling": _SINGLE_SAMPLING, "evaluation": ("top_p", "top_k", "min_p"), "data": ("prompt_template",)}
        for section, names in single.items():
            holder = getattr(self, section)
            for name in names:
                if getattr(holder, name) != type(holder).model_fields[name].default:
                    raise ValueError(
                        f"{section}.{name} is of single completions, and environment.name makes episodes, where it has no "
                        "effect: leave it out"
                    )
        others = {
            "teacher.url": self.teacher.url,
            "algorithm.overlong_buffer": self.algorithm.overlong_buffer,
            "algorithm.length_penalty": self.algorithm.length_penalty,
            "algorithm.advantage": "reward_normalised" * (self.algorithm.advantage == "reward_normalised"),
        }
        for setting, value in others.items():
            if value:
                raise ValueError(
                    f"{setting} {value} is of single completions, and environment.name makes episodes: leave it out"
                )

    def _check_lora(self) -> None:
        """Refuses settings that contradict an adapter."""
        if self.lora.rank == 0:
            return
        if self.algorithm.reference_refresh:
            raise ValueError(
                f"algorithm.reference_refresh is {self.algorithm.reference_refresh}, but with lora.rank the reference is the "
                "frozen model, which never changes: leave it at 0"
            )

        if self.trainer.weight_sync == "distributed" and self.lora.publishes_adapter:
            raise ValueError(
                "trainer.weight_sync distributed broadcasts a whole model, and lora.publish is adapter: set lora.publish "
                "merged, or trainer.weight_sync http (or shared), by which an adapter comes as its two small files"
            )
        fused = {"q_proj": ("k_proj", "v_proj"), "v_proj": ("q_proj",), "gate_proj": ("up_proj",)}
        named = set(self.lora.target_modules)
        for needed, beside in fused.items():
            if self.rollout.engine == "sglang" and self.lora.publishes_adapter and needed not in named and named & {*beside}:
                raise ValueError(
                    f"lora.target_modules has {', '.join(sorted(named & {*beside}))} without {needed}, and SGLang, which fuses "
                    f"them, loses such an adapter: add {needed}, or set lora.publish merged"
                )

    def _unread(self) -> dict[str, str]:
        """Returns the settings that others make pointless, and why."""
        unread = {
            f"{section}.{name}": reason
            for section in ("data", "reward", "environment", "teacher", "trackers")
            for name, reason in getattr(self, section).unread().items()
        }
        if not self.algorithm.needs_critic:
            without = (name for name in CriticSection.model_fields if name != "port")  # ports may be set once for all runs
            unread |= {f"critic.{name}": f"algorithm.advantage {self.algorithm.advantage} has no critic" for name in without}
        if self.model.dtype == "float32":
            unread["model.fp32_head"] = "model.dtype is float32"
        if self.algorithm.kl_coef == 0:
            unread |= dict.fromkeys(("model.reference", "trainer.offload_reference"), "algorithm.kl_coef is 0")
        if self.algorithm.rollout_correction == "none":
            reason = "algorithm.rollout_correction is none, or auto with trainer.max_staleness 0 and engines on CPUs"
            unread |= {f"algorithm.{name}": reason for name in CORRECTION}
        elif self.algorithm.old_logprobs == "engine":
            unread["algorithm.old_logprobs"] = f"algorithm.rollout_correction is {self.algorithm.rollout_correction}"
        if self.algorithm.rejects and self.algorithm.old_logprobs == "engine":
            unread["algorithm.old_logprobs"] = "algorithm.geometric_low and geometric_high compare with the trainer's own"
        if self.data.prompt_template and not self.model.chat_template:
            reason = "data.prompt_template takes the place of the chat template, unless model.chat_template is set"
            unread |= dict.fromkeys(("sampling.system_prompt", "sampling.chat_template_kwargs"), reason)
        if self.sampling.ignore_eos:
            unread |= dict.fromkeys(("sampling.min_new_tokens", "sampling.stop_token_ids"), "sampling.ignore_eos is set")
        if self.trainer.eval_samples == 0:
            unread |= {f"evaluation.{name}": "trainer.eval_samples is 0" for name in EvaluationSection.model_fields}
        if self.lora.rank == 0:
            unread |= {f"lora.{name}": "lora.rank is 0" for name in LoraSection.model_fields}
        elif not self.model.reference:
            unread["trainer.offload_reference"] = "with lora.rank the reference is the policy's own frozen model, no second one"
        if self.trainer.max_staleness == 0:
            unread["trainer.when_stale"] = "trainer.max_staleness is 0"
        if self.replay.reuse_ratio == 0:
            reuse = ("priority", "max_times_sampled", "max_reuse_staleness", "corrected")
            unread |= {f"replay.{name}": "replay.reuse_ratio is 0" for name in reuse}
        return unread


@dataclass(frozen=True)
class Purpose:
    """A program that reads a part of the settings, with some defaults of its own."""

    about: str
    """Begins its `--help`."""
    does: str
    """Why it does not read the others, for errors."""
    reads: Collection[str]
    defaults: Mapping[str, Any]

    def check(self, config: Config) -> None:
        """Raises ConfigError for a setting that is not read."""
        plain = Config()
        for name in names():
            value, default = (reduce(getattr, name.split("."), holder) for holder in (config, plain))
            if name not in self.reads and value != default:
                problem = f"{name} is set but not read, since {self.does}"
                raise ConfigError(problem, field=name, value=shorten(value), remedy="leave it out")

    def explain(self, parser: ArgumentParser) -> None:
        """Hides the arguments that are not read, and shows the program's own defaults."""
        parser.description, known = self.about, names()
        for action in parser._actions:
            for name in (option[2:] for option in action.option_strings if option[2:] in known):
                if name not in self.reads:
                    action.help = SUPPRESS
                elif name in self.defaults and action.help:
                    action.help = re.sub(r"\(default: .*\)$", f"(default: {self.defaults[name]})", action.help)


def load(
    argv: Sequence[str] | None = None,
    env: Mapping[str, str] | None = None,
    prog: str | None = None,
    purpose: Purpose | None = None,
) -> Config:
    """Builds the configuration from a file, the environment and the command line, for all programs or one `purpose`.

    Raises ConfigError naming the field, its value and the remedy. `--help` and `--help-all` print settings and exit.
    """
    argv = sys.argv[1:] if argv is None else argv
    env = os.environ if env is None else env
    path, rest = _take_config_option(list(argv))
    for word, following in zip(rest, [*rest, None][1:], strict=True):
        option, _, value = word.partition("=")
        if word.startswith("--") and option[2:] not in (*names(), *Config.model_fields, "help", "help-all"):
            raise _unknown(option[2:], option, value or following)
    path = path or env.get("RUN_CONFIG") or None
    try:
        default: dict[str, Any] = {"trainer": {"run_dir": f"runs/{Topology.from_env(env).group or 'local'}"}}
        for name, own in (purpose.defaults if purpose else {}).items():
            _put(default, tuple(name.split(".")), own)
        from_file = _merge(default, _from_file(Path(path)) if path else {})
        rest, lists = _take_json_lists(rest)
        words = _merge(_command_line(rest, prog, purpose)() if rest else {}, lists)
        config = Config(**_merge(_merge(from_file, _from_env(env)), words))
        if purpose:
            purpose.check(config)
        return config
    except ValidationError as error:
        raise from_validation(error) from None
    except ConfigError:
        raise
    except Exception as error:  # argparse's own complaints, as pydantic-settings wraps them
        option, _, reason = str(error).rpartition(": ")
        reason = "it has no value" if reason == "expected one argument" else f"the command line cannot be read: {reason}"
        raise ConfigError(reason, field=option.rpartition(" ")[2] or None, remedy=_FORM) from None


def from_mapping(settings: Mapping[str, Any]) -> Config:
    """Builds the configuration from values by their names, such as `trainer.batch_size`. Raises ConfigError."""
    content: dict[str, Any] = {}
    for name, value in settings.items():
        _put(content, tuple(name.split(".")), value)
    try:
        return Config(**content)
    except ValidationError as error:
        raise from_validation(error) from None


def names() -> dict[str, FieldInfo]:
    """Returns every setting by its name, such as `trainer.batch_size`."""
    found: dict[str, FieldInfo] = {}
    for name, field in Config.model_fields.items():
        inner = getattr(field.annotation, "model_fields", None)
        found |= {f"{name}.{key}": value for key, value in inner.items()} if inner else {name: field}
    return found


def _command_line(words: list[str], prog: str | None, purpose: Purpose | None) -> "PydanticBaseSettingsSource":
    """Reads the command line. `--help` shows the settings of type `Main`, `--help-all` every one; both exit."""
    from pydantic_settings import BaseSettings, CliSettingsSource, SettingsConfigDict  # not in SkyPilot's environment

    class Words(Config, BaseSettings):
        model_config = SettingsConfigDict(cli_hide_none_type=True, cli_avoid_json=True)

    source: CliSettingsSource[ArgumentParser] = CliSettingsSource(Words, cli_prog_name=prog, cli_exit_on_error=False)
    parser, settings = source.root_parser, names()
    parser.usage = "%(prog)s [--config FILE] [--section.name VALUE ...]"
    parser.add_argument("--help-all", action="help", help="show every setting and exit")
    if purpose:
        purpose.explain(parser)
    if "--help-all" not in words:
        read = purpose.reads if purpose else settings
        rare = {f"--{name}" for name in read if MAIN not in settings[name].metadata}
        for action in parser._actions:  # argparse has no other way to hide an option that is there
            if rare.intersection(action.option_strings):
                action.help = SUPPRESS
        parser.epilog = f"{len(rare)} more settings: --help-all"
    return source(args=words)


def variable(setting: str) -> str:
    """Returns the environment variable of a setting."""
    return f"{_PREFIX}{setting}".replace(".", "__").upper()


def main(run: Callable[[Config], None], prog: str) -> None:
    """Runs a program: loads its configuration and calls `run`; a wrong setting ends with `setting_status` and its name."""
    try:
        run(load(prog=program(prog)))
    except ConfigError as error:
        fail(error, setting_status())


def program(module: str) -> str:
    """Returns the command that starts `module`: a console script, `python -m rlhf_math MODULE` or `python -m MODULE`."""
    started = [*sys.orig_argv, "", ""]
    script = Path(started[1]).name
    if script.startswith("rlhf-"):
        return script
    return f"python -m rlhf_math {module}" if started[1:3] == ["-m", "rlhf_math"] else f"python -m {module}"


def packaged(path: Path, folder: str = ".") -> Path:
    """Returns `path` if it is a file here, else that file of the installed package (below its root or `folder`) if any.

    So `jobgroup/configs/tiny-cpu.yaml` names a file where the working directory is not a checkout.
    """
    root = Path(__file__).resolve().parents[1]
    return next((each for each in (path, root / path, root / folder / path) if each.is_file()), path)


def fail(error: Exception, status: int = 2) -> NoReturn:
    """Prints the error and exits."""
    last_words(f"error: {error}")
    raise SystemExit(status)


def from_validation(error: ValidationError) -> ConfigError:
    """Converts pydantic's first problem into a ConfigError."""
    first = error.errors()[0]
    name = ".".join(str(part) for part in first["loc"])
    name = next((setting for setting in names() if name.startswith(f"{setting}.")), name)  # without the place in a list
    if first["type"] == "extra_forbidden":
        return _unknown(name, name, first["input"])
    if (gone := f"{name} {first['input']}") in REMOVED:
        return ConfigError(f"there is no {gone} any more", field=name, value=first["input"], remedy=REMOVED[gone])
    message, remedy = explained(first)
    whole = isinstance(first["input"], dict | BaseModel)  # a whole section: says nothing, and might hold a credential
    if whole:
        named = [setting for setting in names() if setting.partition(".")[2] and setting in message]
        name = min(named, key=message.index, default=name or "configuration")
    return ConfigError(message, field=name, value=None if whole else shorten(first["input"]), remedy=remedy)


def misspelt(variable_name: str) -> str:
    """Returns the variable that was probably meant; empty for one that exists, or that is not like any of ours."""
    if variable_name in _VARIABLES:
        return ""
    if variable_name.startswith(_PREFIX):
        name = variable_name.removeprefix(_PREFIX).lower().replace("__", ".")
        return "" if name in names() else " or ".join(map(variable, _near(name))) or "RLHF_SECTION__FIELD"
    meant = difflib.get_close_matches(variable_name.upper(), _VARIABLES, n=1, cutoff=0.8)
    leaf = variable_name.lower()
    return " or ".join(meant or [variable(name) for name in names() if "_" in leaf and name.rpartition(".")[2] == leaf])


def _near(name: str) -> list[str]:
    """Returns the settings that a name that does not exist may mean."""
    leaves = {setting: setting.rpartition(".")[2] for setting in names()}
    near = difflib.get_close_matches(name, leaves, n=1, cutoff=0.8)
    near = near or [setting for setting, leaf in leaves.items() if leaf == name.rpartition(".")[2]]
    return near or [setting for setting, leaf in leaves.items() if difflib.get_close_matches(name, [leaf], cutoff=0.8)]


def _unknown(name: str, field: str, value: object = None) -> ConfigError:
    """Returns the error for a setting that does not exist, or no longer does. `field` is how the user wrote it."""
    if name in REMOVED:
        return ConfigError(f"there is no setting {name} any more", field=field, value=value, remedy=REMOVED[name])
    near = _near(name := name.replace("-", "_"))
    written = map(variable, near) if field.startswith(_PREFIX) else ("--" * field.startswith("--") + each for each in near)
    hint = f"did you mean {' or '.join(written)}? " if near else ""
    return ConfigError(f"there is no setting {name}", field=field, value=value, remedy=f"{hint}--help-all lists every one")


def _take_config_option(argv: list[str]) -> tuple[str | None, list[str]]:
    """Returns the file of `--config` and the other arguments."""
    parser = ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--config")
    try:
        known, rest = parser.parse_known_args(argv)
    except ArgumentError:
        raise ConfigError("--config needs a file", field="--config", remedy="write --config FILE") from None
    return known.config, rest


def _take_json_lists(argv: list[str]) -> tuple[list[str], dict[str, Any]]:
    """Returns the arguments but for lists in JSON, and these by section: pydantic-settings would keep their escapes."""
    lists = {name for name, field in names().items() if is_list(field)}
    rest: list[str] = []
    found: dict[str, Any] = {}
    words = iter(argv)
    for word in words:
        option, equals, value = word.partition("=")
        if option[2:] not in lists or not option.startswith("--"):
            rest.append(word)
            continue
        given = [word] if equals else [word, *(following for following in [next(words, None)] if following is not None)]
        try:
            read = json.loads(value if equals else given[-1])
        except ValueError:
            read = None
        if isinstance(read, list):
            _put(found, tuple(option[2:].split(".")), read)
        else:
            rest += given
    return rest, found


def is_list(field: FieldInfo) -> bool:
    """Returns whether a setting is a list."""
    return any(get_origin(kind) is list for kind in (field.annotation, *get_args(field.annotation)))


def unread(error: Exception) -> str:
    """Returns in one line why a YAML file cannot be read."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return f"line {error.problem_mark.line + 1}: {error.problem}"
    return str(error.strerror if isinstance(error, OSError) else " ".join(str(error).split()))


def _from_file(path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(packaged(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:  # ValueError: a date that there is not
        reason = unread(error)
        remedy = "name a YAML file with settings by section, as those in jobgroup/configs"
        problem = f"the configuration file cannot be read: {reason}"
        raise ConfigError(problem, field="--config", value=str(path), remedy=remedy) from None
    if content is None:
        return {}
    if not isinstance(content, dict) or not all(isinstance(name, str) for name in content):
        remedy = "write sections with settings, such as `trainer: {max_steps: 10}`"
        raise ConfigError(
            "the configuration file is not a mapping of sections", field="--config", value=str(path), remedy=remedy
        )
    return content


def _from_env(env: Mapping[str, str]) -> dict[str, Any]:
    content, known = dict[str, Any](), names()
    for name, keys in SHORT_NAMES.items():
        if env.get(name):
            _put(content, keys, env[name])
    for name, value in sorted(env.items()):
        if name.startswith(_PREFIX):
            setting = name.removeprefix(_PREFIX).lower().replace("__", ".")
            if setting not in known:
                if setting in Config.model_fields:
                    raise ConfigError(f"{setting} is a section, not a setting", field=name, remedy="RLHF_SECTION__FIELD")
                raise _unknown(setting, name)
            given = value if known[setting].annotation is str else _list_or_text(name, value)
            _put(content, tuple(setting.split(".")), given)
    return content


def _list_or_text(name: str, value: str) -> object:
    try:
        return yaml.safe_load(value) if value[:1] in "[{" else value
    except yaml.YAMLError as error:
        raise ConfigError(f"{name} is not a list: {error}", field=name, value=value, remedy="write it as JSON") from None


def _put(content: dict[str, Any], keys: tuple[str, ...], value: object) -> None:
    for key in keys[:-1]:
        content = content.setdefault(key, {})
    content[keys[-1]] = value


def _merge(low: dict[str, Any], high: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(low)
    for key, value in high.items():
        both = isinstance(merged.get(key), dict) and isinstance(value, Mapping)
        merged[key] = _merge(merged[key], value) if both else value
    return merged
