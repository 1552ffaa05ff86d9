"""Every setting of the system, declared once.

Order, later wins: defaults here < a YAML file (`--config FILE` or `RUN_CONFIG=FILE`) < environment < `--section.field`.
Environment: `RLHF_SECTION__FIELD`, and the short names of `SHORT_NAMES` (`MODEL_NAME`, `NUM_EPOCHS`, `BATCH_SIZE`, …).
Every program reads the same configuration and uses its own sections; a name that does not exist is refused.
"""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_settings import (
    BaseSettings,
    CliSettingsSource,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from common.errors import ConfigError, shorten

SHORT_NAMES = {
    "MODEL_NAME": ("model", "name"),
    "NUM_EPOCHS": ("trainer", "num_epochs"),
    "BATCH_SIZE": ("trainer", "batch_size"),
    "MAX_STEPS": ("trainer", "max_steps"),
    "SEED": ("seed",),
    "STATE_DIR": ("state_dir",),
    "RUN_DIR": ("trainer", "run_dir"),
}
_PREFIX = "RLHF_"


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False, protected_namespaces=())


class ModelSection(_Section):
    """The policy."""

    name: str = "Qwen/Qwen2.5-0.5B-Instruct"
    """A model on the Hugging Face hub or a local directory; `python -m trainer.tiny_model DIR` makes the built-in one."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Compute precision on a GPU. Master weights are float32 always; a CPU computes in float32."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. Only for models whose code you have read."""


class DataSection(_Section):
    """data-server: prompts."""

    port: int = Field(8000, ge=1, le=65535)
    source: str = "gsm8k"
    """`gsm8k` (from the hub), `tiny` (generated on the spot), or a path: .jsonl, .json, .csv, .parquet or a directory."""
    train_split: str = "train"
    eval_split: str = "test"
    num_samples: int | None = Field(None, gt=0)
    """Use only the first N training problems (after a seeded shuffle); all of them when unset."""
    prompt_field: str = "question"
    """Column of the problem in files."""
    answer_field: str = "answer"
    """Column of the answer in files; of a text with `#### N` only N is kept."""


class RewardSection(_Section):
    """reward-server: verifies answers."""

    port: int = Field(8002, ge=1, le=65535)
    workers: int = Field(2, gt=0)
    """Grader processes. Each is killed when its deadline passes and replaced."""
    timeout_s: float = Field(1.0, gt=0)
    """Seconds that one answer may take in a grader."""
    memory_mb: int = Field(1024, ge=256)
    """Address space of one grader process."""
    require_stop: bool = False
    """Reward only completions that ended by themselves: one cut at `max_new_tokens` gets 0, right or wrong."""
    max_batch_items: int = Field(4096, gt=0)


class ReplaySection(_Section):
    """replay-buffer: stores experience."""

    port: int = Field(8003, ge=1, le=65535)
    capacity: int = Field(100_000, gt=0)
    """Completions kept; the oldest consumed groups leave first."""
    lease_s: float = Field(600.0, gt=0)
    """Seconds after which a group that was handed out and not acknowledged is handed out again."""
    reuse_ratio: float = Field(0.0, ge=0, lt=1)
    """Share of each training batch that comes from prioritised reuse instead of fresh groups."""
    priority_exponent: float = Field(0.6, ge=0)
    """α of prioritised experience replay (Schaul et al. 2016): P(i) ∝ priority^α."""
    importance_exponent: float = Field(0.4, ge=0, le=1)
    """β of prioritised experience replay at the first step; annealed linearly to 1 at the last."""
    max_reuse_staleness: int = Field(8, ge=0)
    """Oldest experience that may be reused, in weight versions."""
    max_times_sampled: int = Field(4, gt=0)
    """How often one group may be reused."""


class RolloutSection(_Section):
    """rollout-server: the engines, the agent of every node, and the router."""

    router_port: int = Field(30000, ge=1, le=65535)
    engine_port: int = Field(30001, ge=1, le=65535)
    agent_port: int = Field(30002, ge=1, le=65535)
    router_metrics_port: int = Field(29000, ge=1, le=65535)
    engine: Literal["sglang", "embedded"] = "sglang"
    """`sglang`, or `embedded`: a small CPU engine that answers the same HTTP API."""
    device: Literal["cuda", "cpu"] = "cuda"
    """Where SGLang computes; `cpu` needs what `make sglang-cpu` installs. The embedded engine ignores it: it uses the CPU."""
    engine_python: str = ".venv-sglang/bin/python"
    """The Python that has sglang installed: its dependencies clash with the other services', so it has its own."""
    engine_args: list[str] = []
    """More arguments for `sglang.launch_server`, as they are."""
    tensor_parallel_size: int = Field(1, gt=0)
    """GPUs that share one engine."""
    max_running_requests: int = Field(256, gt=0)
    """Completions decoded at once by one engine."""
    max_context_tokens: int = Field(2048, gt=1)
    """Prompt plus completion, in tokens, of the embedded engine. SGLang on a CPU takes what the model can; there this times
    `max_running_requests` is the size of the KV cache in tokens (and 30 % of the free memory at most)."""
    router_policy: Literal["round_robin", "random", "power_of_two", "cache_aware"] = "round_robin"
    """How the router picks an engine for a request."""
    startup_timeout_s: float = Field(1800.0, gt=0)
    """Seconds an engine may take until it answers (loading a large model takes minutes)."""


class SamplingSection(_Section):
    """How completions are sampled."""

    group_size: int = Field(8, ge=2)
    """Completions per prompt: what a group-relative advantage compares."""
    max_new_tokens: int = Field(512, gt=0)
    temperature: float = Field(1.0, gt=0)
    """The trainer divides its logits by the same temperature, so logprobs of both sides are comparable."""
    system_prompt: str = ""
    """Put before every problem with the model's chat template."""
    request_timeout_s: float = Field(600.0, gt=0)
    """Seconds one group may take to generate, retries included."""


RECIPES: dict[str, dict[str, Any]] = {
    "grpo": {},
    "dr_grpo": {"advantage": "group_centred", "aggregation": "constant"},
    "dapo": {"clip_high": 0.28, "dynamic_sampling": True},
    "gspo": {
        "importance_level": "sequence",
        "clip_low": 3e-4,
        "clip_high": 4e-4,
        "aggregation": "sequence_mean_token_mean",
    },
    "cispo": {"policy_loss": "cispo", "clip_low": 1.0, "clip_high": 4.0},
    "rloo": {"advantage": "leave_one_out"},
    "reinforce_pp": {"advantage": "batch_normalised"},
    "opo": {"advantage": "length_weighted"},
}
"""What each named algorithm sets, where it differs from the defaults of `AlgorithmSection`."""


class AlgorithmSection(_Section):
    """How a batch becomes an update. A recipe sets the rest; what is set beside it wins; what nothing reads is refused."""

    name: Literal["grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "reinforce_pp", "opo"] = "grpo"
    """The recipe; docs/algorithms.md has a row for each."""
    advantage: Literal["group_normalised", "group_centred", "leave_one_out", "batch_normalised", "length_weighted"] = (
        "group_normalised"
    )
    """How rewards of a group become advantages."""
    advantage_eps: float = Field(1e-6, gt=0)
    """Added to the standard deviation (group_normalised and batch_normalised)."""
    policy_loss: Literal["clip", "cispo"] = "clip"
    """PPO's clipped surrogate, or CISPO, whose clipped tokens keep their gradient."""
    importance_level: Literal["token", "sequence"] = "token"
    """Ratio of each token, or (GSPO) one for the whole completion."""
    clip_low: float = Field(0.2, gt=0, le=1)
    """The probability ratio is clipped to [1 - clip_low, 1 + clip_high]."""
    clip_high: float = Field(0.2, gt=0)
    dual_clip: float | None = Field(None, gt=1)
    """Bound c on the loss of tokens with negative advantage, -c·A; usually 3."""
    aggregation: Literal["token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "constant"] = "token_mean"
    """How the losses of the global batch's tokens become one number."""
    kl_coef: float = Field(0.0, ge=0)
    """Weight of the KL divergence to the reference model in the loss; 0 loads no reference model."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Schulman's estimators, http://joschu.net/blog/kl-approx.html."""
    entropy_coef: float = Field(0.0, ge=0)
    """Weight of the entropy bonus: keeps the policy from becoming certain too early."""
    dynamic_sampling: bool = False
    """Replace groups of equal rewards (unshaped), which carry no gradient, until the batch is full."""
    dynamic_sampling_rounds: int = Field(10, gt=0)
    """Stop with the reason when so many rounds of replacing did not fill a batch."""
    overlong_buffer: int = Field(0, ge=0)
    """Soft overlong penalty over the last so many tokens before sampling.max_new_tokens; 0: none."""
    overlong_factor: float = Field(1.0, gt=0)
    """Penalty at sampling.max_new_tokens."""
    mask_truncated: bool = False
    """Leave completions cut at sampling.max_new_tokens out of the loss; they still count in their group's statistics."""
    rollout_correction: Literal["none", "truncate", "mask"] = "none"
    """Importance sampling between the rollout engine's policy and the trainer's at the start of the update."""
    correction_level: Literal["token", "sequence"] = "token"
    correction_cap: float = Field(2.0, gt=1)
    """`truncate` bounds weights by it, `mask` drops what is above it or below its inverse."""
    off_policy_delta: float | None = Field(None, gt=0)
    """Drop completions with negative advantage whose mean log ratio behaviour/policy is above this (OPSM)."""

    @model_validator(mode="wrap")
    @classmethod
    def _recipe(cls, data: Any, handler: Callable[[Any], "AlgorithmSection"]) -> "AlgorithmSection":
        if not isinstance(data, dict):
            return handler(data)
        preset = RECIPES.get(data.get("name", "grpo"), {})
        section = handler({**preset, **data})
        defaults = {name: field.default for name, field in cls.model_fields.items()} | preset
        for name, reason in section._unread().items():
            if name in data and getattr(section, name) != defaults[name]:
                raise ValueError(f"algorithm.{name} is set but not read: {reason}")
        return section

    def _unread(self) -> dict[str, str]:
        """Settings that the others make pointless, and why."""
        unread: dict[str, str] = {}
        if self.advantage not in ("group_normalised", "batch_normalised"):
            unread["advantage_eps"] = f"advantage {self.advantage} divides by nothing"
        if self.policy_loss == "cispo":
            unread["dual_clip"] = "policy_loss is cispo"
        if self.kl_coef == 0:
            unread["kl_estimator"] = "kl_coef is 0"
        if not self.dynamic_sampling:
            unread["dynamic_sampling_rounds"] = "dynamic_sampling is off"
        if not self.overlong_buffer:
            unread["overlong_factor"] = "overlong_buffer is 0"
        if self.rollout_correction == "none":
            unread["correction_level"] = unread["correction_cap"] = "rollout_correction is none"
        return unread


class TrainerSection(_Section):
    """ppo-trainer: the loop, the optimiser, evaluation and checkpoints."""

    port: int = Field(8004, ge=1, le=65535)
    """Serves weight versions to the rollout nodes, and health and metrics."""
    num_epochs: int = Field(3, gt=0)
    """Passes over the training prompts."""
    batch_size: int = Field(4, gt=0)
    """Prompts per step; each becomes one group of `sampling.group_size` completions."""
    max_steps: int | None = Field(None, gt=0)
    """End after this many steps even if epochs remain."""
    max_staleness: int = Field(0, ge=0)
    """How many weight versions old an experience may be when it is trained on; 0 is on-policy."""
    learning_rate: float = Field(1e-6, gt=0)
    adam_betas: tuple[float, float] = (0.9, 0.98)
    weight_decay: float = Field(0.0, ge=0)
    warmup_steps: int = Field(10, ge=0)
    """Steps over which the learning rate rises linearly from zero."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After the warm-up: stays, or falls to zero at the last step."""
    max_grad_norm: float = Field(1.0, gt=0)
    max_skipped_updates: int = Field(3, ge=0)
    """An update whose gradient is not finite is skipped and counted; stop after more than so many in a row."""
    micro_batch_tokens: int = Field(16_384, gt=0)
    """Tokens (padding included) of one forward and backward pass."""
    eval_every: int = Field(0, ge=0)
    """Evaluate on the held-out split every N steps; 0: only before and after training."""
    eval_samples: int = Field(256, ge=0)
    """Held-out problems per evaluation; 0 skips evaluation."""
    eval_k: int = Field(8, gt=0)
    """k of pass@k in the first and the last evaluation."""
    eval_pass_samples: int = Field(64, ge=0)
    """Held-out problems of the pass@k measurement (each is answered k times)."""
    checkpoint_every: int = Field(50, ge=0)
    """Write a checkpoint every N steps, and always at the end; 0: only at the end."""
    keep_checkpoints: int = Field(3, gt=0)
    resume: bool = True
    """Go on from the newest checkpoint in `run_dir`, if there is one."""
    run_dir: Path | None = None
    """Where configuration, metrics, samples, curves and checkpoints go; `runs/<group name>` when unset."""
    wait_timeout_s: float = Field(1800.0, gt=0)
    """Seconds to wait for the other tasks to become healthy, or for a batch, before giving up with the reason."""
    service_timeout_s: float = Field(600.0, gt=0)
    """Seconds one call to a service may take, retries included: longer than it takes to restart its pod."""
    publish_timeout_s: float = Field(600.0, gt=0)
    """Seconds for every rollout node to confirm a weight version; one that does not is fenced from traffic."""
    max_failed_groups: int = Field(64, gt=0)
    """Stop after this many groups in a row were dropped because of errors."""
    num_threads: int | None = Field(None, gt=0)
    """CPU threads of one trainer process; torch decides when unset."""


class Config(BaseSettings):
    """The whole configuration."""

    model_config = SettingsConfigDict(
        extra="forbid",
        use_attribute_docstrings=True,
        allow_inf_nan=False,
        protected_namespaces=(),
        validate_default=True,
        cli_hide_none_type=True,
        cli_avoid_json=True,
    )

    seed: int = Field(0, ge=0)
    """Of everything random: data order, sampling, dropout. A run on one seed repeats."""
    state_dir: Path = Path("state")
    """Where services keep what must survive a restart (data cursor, replay store, weights, logs)."""
    max_body_mb: int = Field(256, gt=0)
    """Largest request body a service accepts."""
    model: ModelSection = ModelSection()
    data: DataSection = DataSection()
    rollout: RolloutSection = RolloutSection()
    sampling: SamplingSection = SamplingSection()
    reward: RewardSection = RewardSection()
    replay: ReplaySection = ReplaySection()
    algorithm: AlgorithmSection = AlgorithmSection()
    trainer: TrainerSection = TrainerSection()

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
        in_flight = (self.trainer.max_staleness + 1) * self.trainer.batch_size * self.sampling.group_size
        if in_flight > self.replay.capacity:
            raise ValueError(
                f"(trainer.max_staleness + 1) × trainer.batch_size × sampling.group_size = {in_flight} completions do not "
                f"fit in replay.capacity {self.replay.capacity}: raise the latter or lower one of the former"
            )
        return self

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Only what `load` passes counts; pydantic-settings' own reading of the environment is not used."""
        return (init_settings,)


def load(argv: Sequence[str] | None = None, env: Mapping[str, str] | None = None, prog: str | None = None) -> Config:
    """Builds the configuration from a file, the environment and the command line.

    Raises ConfigError naming the field, its value and the remedy. `--help` prints every setting and exits.
    """
    argv = sys.argv[1:] if argv is None else argv
    env = os.environ if env is None else env
    path, rest = _take_config_option(list(argv))
    path = path or env.get("RUN_CONFIG") or None
    try:
        sources: list[PydanticBaseSettingsSource] = [
            CliSettingsSource(Config, cli_parse_args=rest, cli_prog_name=prog, cli_exit_on_error=False),
            InitSettingsSource(Config, init_kwargs=_from_env(env)),
            InitSettingsSource(Config, init_kwargs=_from_file(Path(path)) if path else {}),
        ]
        merged: dict[str, Any] = {}
        for source in reversed(sources):
            merged = _merge(merged, source())
        return Config(**merged)
    except ValidationError as error:
        raise from_validation(error) from None
    except ConfigError:
        raise
    except Exception as error:  # argparse's own complaints, as pydantic-settings wraps them
        raise ConfigError(f"the command line cannot be read: {error}", remedy="see --help") from None


def main(run: Callable[[Config], None], prog: str) -> None:
    """The body of every `__main__`: loads the configuration and runs; a wrong setting ends with status 2 and its name."""
    try:
        run(load(prog=f"python -m {prog}"))
    except ConfigError as error:
        fail(error)


def fail(error: Exception, status: int = 2) -> NoReturn:
    """Prints an error for people and exits."""
    print(f"error: {error}", file=sys.stderr, flush=True)
    raise SystemExit(status)


def from_validation(error: ValidationError) -> ConfigError:
    """The first problem pydantic found, in the project's words."""
    first = error.errors()[0]
    name = ".".join(str(part) for part in first["loc"]) or "configuration"
    if first["type"] == "extra_forbidden":
        return ConfigError(f"there is no setting {name}", field=name, value=first["input"], remedy="see --help")
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    return ConfigError(f"{first['msg']}{more}", field=name, value=shorten(first["input"]), remedy="see --help")


def _take_config_option(argv: list[str]) -> tuple[str | None, list[str]]:
    for i, word in enumerate(argv):
        if word == "--config":
            if i + 1 == len(argv):
                raise ConfigError("--config needs a file", field="--config")
            return argv[i + 1], argv[:i] + argv[i + 2 :]
        if word.startswith("--config="):
            return word.removeprefix("--config="), argv[:i] + argv[i + 1 :]
    return None, argv


def _from_file(path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"the configuration file cannot be read: {error}", field="--config", value=str(path)) from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError("the configuration file is not a mapping of sections", field="--config", value=str(path))
    return content


def _from_env(env: Mapping[str, str]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    for name, keys in SHORT_NAMES.items():
        if env.get(name):
            _put(content, keys, env[name])
    for name, value in sorted(env.items()):
        if name.startswith(_PREFIX):
            keys = tuple(name.removeprefix(_PREFIX).lower().split("__"))
            _check_exists(keys, name)
            _put(content, keys, _list_or_text(name, value))
    return content


def _list_or_text(name: str, value: str) -> object:
    try:
        return yaml.safe_load(value) if value[:1] in "[{" else value
    except yaml.YAMLError as error:
        raise ConfigError(f"{name} is not a list: {error}", field=name, value=value, remedy="write it as JSON") from None


def _check_exists(keys: tuple[str, ...], name: str) -> None:
    model: Any = Config
    for key in keys:
        fields = getattr(model, "model_fields", {})
        if key not in fields:
            raise ConfigError(f"there is no setting {'.'.join(keys)}", field=name, remedy="RLHF_SECTION__FIELD; see --help")
        model = fields[key].annotation
    if hasattr(model, "model_fields"):
        raise ConfigError(f"{'.'.join(keys)} is a section, not a setting", field=name, remedy="RLHF_SECTION__FIELD; see --help")


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
