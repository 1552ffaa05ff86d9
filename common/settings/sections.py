"""The settings of every section except `algorithm`, each declared once with its default, bounds and
meaning.
"""

import os
import re
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from common.errors import Refused, did_you_mean
from common.settings.chat_templates import read_chat_template, read_template_variables
from common.settings.lr_schedules import LrSchedule
from common.settings.prompt_templates import read_template
from common.settings.rewards import OwnReward, Reward, RewardEntry
from common.settings.section import InHelp, Named, Section, among

_Entry = TypeVar("_Entry", bound=Reward)


# Maximum characters of `environment.name`, as on the wire.
_MAX_NAME = 512
HARBOR_COLUMN = "harbor_task"
"""The column with the path of a Harbor task's folder, which data-server and environment-server both
read."""


def _checked_environment(text: str) -> str:
    # A class of the user, or a kind of environment with its argument.
    if text in ("", "python") or re.fullmatch(
        r"python:[\w.]+[:.]\w+|(agent|harbor):\s*\S.*", text, re.DOTALL
    ):
        if len(text) > _MAX_NAME:
            raise Refused(
                f"{len(text)} characters are too many",
                f"give an environment name of at most {_MAX_NAME}",
            )
        return text
    forms = ["agent:COMMAND", "agent:URL", "harbor:COMMAND"]
    hint = did_you_mean(text, ["python", "an import path python:package.module:Class", *forms])
    raise Refused(f"there is no environment {text}", hint)


Port = Annotated[int, Field(ge=1, le=65535)]
TrackerName = Annotated[
    str, among("tensorboard", "wandb", "mlflow", "trackio", path="package.module:Class")
]


class ModelSection(Section):
    """The policy."""

    name: InHelp[str] = "Qwen/Qwen2.5-0.5B-Instruct"
    """Model on the Hugging Face hub, or a local directory. `rlhf tiny-model DIR` makes the built-in
    one."""
    dtype: InHelp[Literal["float32", "bfloat16"]] = "bfloat16"
    """Compute precision on a GPU. Master weights are always float32; a CPU always computes in
    float32."""
    fp32_head: bool = True
    """Compute logits in float32 instead of rounding them to `model.dtype`, in the trainer and the
    engines alike."""
    reference: str = ""
    """Reference model of the KL divergence (`algorithm.kl_coef`). Empty: the model that training
    starts from."""
    chat_template: Annotated[str, AfterValidator(read_chat_template)] = ""
    """Chat template instead of the model's own: a file, or the Jinja text; it is saved with the
    model. Empty: the model's own, if it has one and `data.prompt_template` is not set. `own`: the
    model's own, with the text of `data.prompt_template` as the user's message."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. Only for models whose code you have read."""


class LoraSection(Section):
    """LoRA: train a low-rank adapter of the frozen model instead of all its weights
    (docs/how-to/training.md#train-a-lora-adapter).
    """

    rank: InHelp[NonNegativeInt] = 0
    """Rank of the adapter's matrices. 0: no adapter, all weights are trained."""
    alpha: PositiveFloat = 32.0
    """Scale of the adapter: a matrix W becomes W + alpha / rank × B A."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout of the adapter's input during updates, from 0 to below 1."""
    target_modules: list[str] = []
    """Names of the linear layers that get an adapter (`q_proj`, …). Empty: all of attention and
    dense MLPs; routed experts and routers never have one."""
    publish: Literal["adapter", "merged"] = "adapter"
    """Weights sent to the engines: the `adapter` alone, or the whole model with the adapter
    `merged` into it."""

    @property
    def publishes_adapter(self) -> bool:
        return self.rank > 0 and self.publish == "adapter"


class DataSection(Section):
    """data-server: prompts."""

    port: Port = 8000
    """Port of the data-server."""
    source: InHelp[str] = Field("gsm8k", min_length=1)
    """`gsm8k` and `math` (from the hub), `math:SOURCE` (MATH in files or under another name on the
    hub), `tiny` (generated), a path (.jsonl, .json, .csv, .parquet or a directory), or `org/name`
    on the hub if there is no such path."""
    hub_config: str = ""
    """Configuration of a hub data set that has several, such as `main`. Empty: the default one."""
    train_split: str = "train"
    """Split of the training problems."""
    eval_split: str = "test"
    """Split of the held-out problems."""
    num_samples: InHelp[int | None] = Field(None, gt=0)
    """Number of training problems to use, chosen by the seed. Unset: all."""
    prompt_field: InHelp[str] = "question"
    """Column of the problem."""
    answer_field: InHelp[str] = "answer"
    """Column of the answer. From a text with `#### N`, only N is kept."""
    messages_field: InHelp[str] = ""
    """Column of a chat, instead of `prompt_field`: system messages, one user message, at most one
    answer. Without a column `answer_field`, the ground truth is the final answer of the chat's
    answer (`#### N` or a box)."""
    prompt_template: InHelp[Annotated[str, AfterValidator(read_template)]] = ""
    """Text of a prompt, with `{question}` and other columns (`{level}`): the text, a file, or
    `plain`, `boxed`, `r1_zero` (of DeepSeek-R1-Zero) or `few_shot` (docs/how-to/data.md). It
    replaces the chat template unless `model.chat_template` is set. Empty: the problem alone."""
    columns: list[str] | None = None
    """Further columns passed to reward functions and the prompt template. Unset: all."""
    task_field: str = ""
    """Column with the task of each row, which selects its reward functions (`tasks` in
    `reward.functions`)."""
    map: Annotated[str, among("", path="package.module:function")] = ""
    """Function `package.module:function` that transforms every row before it is used. It gets the
    columns and returns columns, or None to skip the row."""
    levels: list[int | str] = []
    """Levels of MATH to use, as 5, "5" or "Level 5". Empty: all."""
    subjects: list[str] = []
    """Subjects of MATH to use, as `Counting & Probability` or `counting_and_probability`. Empty:
    all."""

    curriculum: InHelp[Literal["none", "difficulty"]] = "none"
    """`difficulty`: after a first pass over all prompts, prompts solved about half of the time are
    drawn more often."""

    @property
    def is_built_in(self) -> bool:
        return self.source in ("gsm8k", "tiny")

    @property
    def is_math(self) -> bool:
        return self.source == "math" or self.source.startswith("math:")


class RewardSection(Section):
    """reward-server: scores answers."""

    port: Port = 8002
    """Port of the reward-server."""
    functions: InHelp[list[RewardEntry]] = Field(["math"], min_length=1, validate_default=True)
    """Reward functions; the reward is their weighted sum. Each is a name (`math`, `code`, `format`,
    `length`, `repetition`, `reward_model`, `judge`, or the import path `package.module:Class` of
    your own), or a mapping of `name`, `weight`, `tasks` and the function's own arguments
    (docs/how-to/rewards.md)."""
    function_timeout_s: PositiveFloat = 10.0
    """Seconds for one call of `format`, `length`, `repetition` or your own function. Waiting for a
    processor does not count."""
    workers: PositiveInt = 2
    """Worker processes for `math` (with as many spares), and also the number for your own
    functions."""
    require_stop: bool = False
    """Reward only completions that ended by themselves. A completion cut at `max_new_tokens` gets
    0, right or wrong."""

    @property
    def weights(self) -> dict[str, float]:
        """Weight of each function by its name."""
        return {entry.name: entry.weight for entry in self.functions}

    def for_objects(self, weights: Mapping[str, float]) -> "RewardSection":
        """Returns these settings for the caller's own objects, whose weights are given by name."""
        functions = [OwnReward(name=name, weight=weight) for name, weight in weights.items()]
        return self.model_copy(update={"functions": functions})

    def function(self, kind: type[_Entry]) -> _Entry | None:
        """Returns the entry of a built-in function; None if there is none."""
        return next((entry for entry in self.functions if isinstance(entry, kind)), None)

    @model_validator(mode="after")
    def _names_differ(self) -> "RewardSection":
        names = [entry.name for entry in self.functions]
        for name in names:
            if names.count(name) > 1:
                raise Refused(
                    f"reward.functions has {name} twice",
                    "leave one out, and name all its tasks in the other",
                    "reward.functions",
                )
        return self


class TeacherSection(Section):
    """A teacher for on-policy distillation: a model with the same tokenizer that scores the
    policy's completions.
    """

    url: InHelp[str] = ""
    """URL of the teacher: SGLang or this system's own engine, such as http://127.0.0.1:30000, or,
    if the URL ends with /v1, an OpenAI-compatible endpoint that returns log-probabilities of
    prompts. The key comes from TEACHER_API_KEY. Empty: no teacher."""
    model: str = ""
    """Name of the model at an OpenAI-compatible endpoint."""
    coef: PositiveFloat = 1.0
    """Weight of log π_teacher − log π of each token, which is added to its advantage."""
    timeout_s: PositiveFloat = 120.0
    """Seconds for the scores of one group, with all retries, in which the teacher does not get on
    with what it has: SGLang says whether it does, of other servers each answer counts. Then the
    group is dropped and its prompt tried again."""
    concurrency: PositiveInt = 16
    """Groups scored at once."""

    @property
    def is_openai(self) -> bool:
        return self.url.rstrip("/").endswith("/v1")

    @model_validator(mode="after")
    def _fits(self) -> "TeacherSection":
        scheme, _, rest = self.url.partition("://")
        if self.url and (scheme not in ("http", "https") or not rest):
            raise Refused(
                f"teacher.url {self.url} is not a URL",
                "write http://HOST:PORT, or http://HOST:PORT/v1",
                "teacher.url",
            )
        if "@" in rest.partition("/")[0]:
            raise Refused(
                "teacher.url contains credentials, but a run saves its settings",
                "put them into TEACHER_API_KEY",
                "teacher.url",
            )
        if self.is_openai and not self.model:
            raise Refused(
                "teacher.url ends with /v1, and an OpenAI-compatible endpoint needs the name of "
                "the model",
                "set teacher.model",
                "teacher.url",
            )
        return self


class ReplaySection(Section):
    """replay-buffer: stores experience."""

    port: Port = 8003
    """Port of the replay-buffer."""
    capacity: PositiveInt = 100_000
    """Completions that the buffer keeps. The oldest groups that were trained on are removed
    first."""
    lease_s: PositiveFloat = 600.0
    """Seconds after which a group that was handed out and not acknowledged is handed out again. The
    trainer has its groups as long as its run lasts: this is for other clients."""
    reuse_ratio: float = Field(0.0, ge=0, lt=1)
    """Share of each batch that comes from prioritised reuse instead of fresh groups, from 0 to
    below 1."""
    priority: Annotated[str, among("advantage", "reward")] = "advantage"
    """Priority of a group for reuse: its mean |`advantage`|, its mean `reward`, or what your own
    function `package.module:name` of (group, advantages) returns, at least 0."""
    max_reuse_staleness: NonNegativeInt = 8
    """Oldest group that may be reused, in weight versions."""
    max_times_sampled: PositiveInt = 4
    """Times that one group may be reused."""


class CriticSection(Section):
    """The critic of PPO (`algorithm.advantage gae`): a separate value model."""

    model: str = ""
    """Model that the critic starts from, with a new value head. Empty: the policy's model."""
    learning_rate: PositiveFloat = 1e-5
    """Learning rate of the critic."""
    warmup_steps: NonNegativeInt = 0
    """First steps in which only the critic learns."""
    value_clip: float | None = Field(0.2, gt=0)
    """Distance that a value may move in one update before its loss is clipped. Unset: no
    clipping."""


# SGLang's arguments for the sizes of an engine, besides that of tensor parallelism.
_PIPELINE = ("--pp", "--pp-size", "--pipeline-parallel-size")
DATA_PARALLEL = ("--dp", "--dp-size", "--data-parallel-size")
_EXPERT = ("--ep", "--ep-size", "--expert-parallel-size")


class RolloutSection(Section):
    """rollout-server: the engines, the agent of every node, and the router."""

    router_port: Port = 30000
    """Port of the router."""
    engine_port: Port = 30001
    """Port of every engine."""
    agent_port: Port = 30002
    """Port of every rollout node's agent."""
    router_metrics_port: Port = 29000
    """Port of the router's Prometheus metrics."""
    trainer: Literal["ppo-trainer", "tinker-server"] = "ppo-trainer"
    """Task that the nodes serve. The tinker-server gives the engines an adapter for each of its
    samplers, beside the model they start with."""
    engine: InHelp[Literal["sglang", "embedded"]] = "sglang"
    """`sglang`, or `embedded`: a small engine with the same HTTP API that needs only torch."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the engine. `auto`: a GPU for SGLang; for the embedded engine a GPU if there is
    one. SGLang on a `cpu` needs what `make sglang-cpu` installs."""
    engine_python: str = ".venv-sglang/bin/python"
    """Python that has SGLang installed. Its dependencies clash with those of the other services."""
    engine_args: InHelp[list[str]] = []
    """Further arguments for `sglang.launch_server`, passed on unchanged."""
    tensor_parallel_size: InHelp[PositiveInt] = 1
    """GPUs that share one engine, over all of its nodes."""
    nodes_per_engine: PositiveInt = 1
    """Consecutive nodes of rollout-server that form one engine (SGLang's `--nnodes`), for a model
    larger than a node. Only the first of them answers requests."""
    colocate: InHelp[bool] = False
    """Let trainer and engines take turns on the same GPUs: the engines release their memory during
    the update, and the trainer keeps its models and optimisers in host memory during generation
    (docs/how-to/training.md#train-on-one-gpu)."""
    max_running_requests: PositiveInt = 256
    """Completions that one engine decodes at once. The embedded engine on a GPU takes fewer if its
    KV cache, with `max_context_tokens` tokens for each, needs more than 30 % of the free memory."""
    max_context_tokens: int = Field(2048, gt=1)
    """Longest prompt plus completion of the embedded engine, in tokens. It decides the factors of a
    model with LongRoPE (docs/reference/models.md). For SGLang on a CPU, this times
    `max_running_requests` is the size of the KV cache in tokens (at most 30 % of the free
    memory)."""
    router: Literal["auto", "sglang-router", "smg"] = "auto"
    """Program in front of the engines: `sglang-router`, or `smg`, its successor, which passes on
    every field of a request. `auto` takes smg where a run needs a field that sglang-router drops
    (docs/adr/0072-router-auto.md)."""
    router_policy: Literal["round_robin", "random", "cache_aware"] = "round_robin"
    """How the router chooses an engine: in turn, at random, or by what each has cached
    (docs/explanation/engines.md)."""
    hang_timeout_s: PositiveFloat = 30.0
    """Seconds without an answer after which a healthy engine or router is killed and started
    again."""
    stuck_after_s: PositiveFloat = 600.0
    """Seconds without progress after which an engine that starts, loads weights or generates is
    killed and started again. Progress is what its processes read, write, take as memory, or say for
    the first time, and then its tokens: a large model may take as long as it needs."""

    def nccl_env(self) -> dict[str, str]:
        """Returns NCCL's variables, which must be equal in SGLang's and the trainer's environment
        before CUDA starts.

        The values are SGLang's.
        """
        default = "1" if "--enable-symm-mem" in self.engine_args else "0"
        return {"NCCL_CUMEM_ENABLE": os.environ.get("NCCL_CUMEM_ENABLE", default)}

    def engine_argument(self, *names: str) -> str | None:
        """Returns the value of the last of these arguments in `engine_args`, written `--name 1` or
        `--name=1`; None without one.
        """
        found = None
        words = [*self.engine_args, ""]
        for word, following in pairwise(words):
            name, equals, value = word.partition("=")
            if name in names:
                found = value if equals else following
        return found

    @property
    def has_dp_attention(self) -> bool:
        """Whether each group of an engine's ranks has all weights of attention; all ranks of the
        engine share the other weights.
        """
        return "--enable-dp-attention" in self.engine_args

    @property
    def attention_groups(self) -> int:
        """Groups of an engine's ranks that each hold all of attention."""
        return self._size(*DATA_PARALLEL) if self.has_dp_attention else 1

    @property
    def copies_per_engine(self) -> int:
        """Copies of the model in an engine, with GPUs of their own."""
        return 1 if self.has_dp_attention else self._size(*DATA_PARALLEL)

    @property
    def expert_groups(self) -> int:
        """Groups of an engine's ranks that hold different experts of a mixture."""
        return self._size(*_EXPERT)

    @property
    def gpus_per_engine(self) -> int:
        """GPUs of an engine of SGLang, over all of its nodes: those of a tensor-parallel group, for
        each pipeline stage and each copy of the model.
        """
        return self.tensor_parallel_size * self._size(*_PIPELINE) * self.copies_per_engine

    @property
    def gpus_per_node(self) -> int:
        """GPUs that an engine of SGLang uses on each of its nodes."""
        return -(-self.gpus_per_engine // self.nodes_per_engine)

    def _size(self, *names: str) -> int:
        text = self.engine_argument(*names) or ""
        return max(1, int(text)) if text.isdecimal() else 1

    @property
    def context_bound(self) -> int | None:
        """The longest sequence in tokens, for the trainer and the embedded engine; None with
        SGLang, which has its own.
        """
        return self.max_context_tokens if self.engine == "embedded" else None

    @property
    def is_sglang_on_gpus(self) -> bool:
        """Whether the engines are SGLang on GPUs, which receives weights over NCCL."""
        return self.engine == "sglang" and self.device != "cpu"

    @model_validator(mode="after")
    def _no_secrets(self) -> "RolloutSection":
        for word in self.engine_args:
            if word.partition("=")[0] in ("--api-key", "--admin-api-key", "--ssl-keyfile-password"):
                raise Refused(
                    f"rollout.engine_args contains a secret ({word.partition('=')[0]}), but a run "
                    "saves its settings",
                    "set API_TOKEN in the environment instead",
                    "rollout.engine_args",
                )
        return self


class Truncation(Section):
    """Truncation of the sampling distribution."""

    top_p: float = Field(1.0, gt=0, le=1)
    """Sample only from the likeliest tokens whose probabilities add up to this share. 1: all."""
    top_k: int | None = Field(None, gt=1)
    """Sample only from this many likeliest tokens. Unset: all, or 4096 in training with `top_p` or
    `min_p`."""
    min_p: float = Field(0.0, ge=0, lt=1)
    """Minimum probability of a sampled token, relative to that of the likeliest token. 0: all."""

    def truncation(self) -> dict[str, float]:
        """Returns the bounds that have an effect, by SGLang's names."""
        bounds = {"top_p": self.top_p, "min_p": self.min_p, "top_k": self.top_k or -1}
        return {name: bound for name, bound in bounds.items() if bound != _NO_TRUNCATION[name]}


_NO_TRUNCATION = {"top_p": 1.0, "top_k": -1, "min_p": 0.0}
MAX_KEPT = 4096
"""Most tokens that truncated sampling may keep in training (SGLang's limit)."""


class SamplingSection(Truncation):
    """Sampling of completions."""

    group_size: InHelp[int] = Field(8, ge=1)
    """Completions per prompt, which a group-relative advantage compares. With a critic (`ppo`) it
    may be 1."""
    max_new_tokens: InHelp[PositiveInt] = 512
    """Longest completion, in tokens."""
    temperature: InHelp[PositiveFloat] = 1.0
    """Sampling temperature. The trainer also divides its logits by it, so that logprobs of both
    sides are comparable."""
    stop: list[Annotated[str, Field(min_length=1)]] = []
    """Texts that end a completion, such as a blank line. Graders do not get them."""
    stop_token_ids: list[Annotated[int, Field(ge=0)]] = []
    """Further tokens that end a completion, besides those of the model."""
    min_new_tokens: NonNegativeInt = 0
    """Minimum completion length in tokens. Until then no token can end it, but texts of
    `sampling.stop` can."""
    ignore_eos: bool = False
    """Let no token end a completion, so that all have `sampling.max_new_tokens` tokens (for
    measurements)."""
    system_prompt: InHelp[str] = ""
    """System message before every problem."""
    chat_template_kwargs: InHelp[
        Annotated[dict[str, bool | int | float | str], BeforeValidator(read_template_variables)]
    ] = {}
    """Variables of the chat template, such as `{enable_thinking: false}` of Qwen3."""
    prefill: str = ""
    """Start of every answer, such as `<think>`: the model continues from there, and graders get it
    with the answer."""

    def training_truncation(self) -> dict[str, float]:
        """Returns `truncation` for training, where the kept tokens are sent with every token."""
        truncation = self.truncation()
        return {"top_k": MAX_KEPT, **truncation} if truncation else {}

    def stop_conditions(self) -> dict[str, Any]:
        """Returns the settings, by SGLang's names, that end a completion besides stop tokens and
        length, if set.
        """
        bounds = {
            "stop": self.stop,
            "min_new_tokens": self.min_new_tokens,
            "ignore_eos": self.ignore_eos,
        }
        return {name: value for name, value in bounds.items() if value}


class EvaluationSection(Truncation):
    """Evaluations on held-out problems: when, how many, and how their answers are sampled."""

    every: InHelp[NonNegativeInt] = 0
    """Steps between evaluations on held-out problems. 0: only before and after training."""
    samples: InHelp[NonNegativeInt] = 256
    """Held-out problems per evaluation. 0: no evaluation."""
    pass_samples: NonNegativeInt = 64
    """Held-out problems for pass@8 in the first and the last evaluation. Each is answered eight
    times."""

    temperature: NonNegativeFloat = 0.0
    """Temperature of the answers that count for the accuracy. 0: greedy."""
    n: int = Field(1, ge=1)
    """Answers per problem; the accuracy is their mean."""
    max_new_tokens: int | None = Field(None, gt=0)
    """Longest answer, in tokens. Unset: `sampling.max_new_tokens`."""


class TrainerSection(Section):
    """ppo-trainer: the loop, its steps, and what it writes."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the update. `auto`: a GPU if there is one."""
    port: Port = 8004
    """Port of weights, health, metrics and the dashboard."""
    num_epochs: InHelp[PositiveInt] = 3
    """Passes over the training prompts; not read with `max_steps`."""
    batch_size: InHelp[PositiveInt] = 4
    """Prompts per step. Each becomes a group of `sampling.group_size` completions."""
    max_steps: InHelp[int | None] = Field(None, gt=0)
    """Steps of the run, over the training data as often as they need. Unset: `num_epochs`
    passes."""
    max_staleness: InHelp[NonNegativeInt] = 0
    """Oldest experience that is trained on, in weight versions. 0: on-policy."""
    when_stale: Literal["wait", "train", "drop"] = "wait"
    """`wait`: train on groups in the order of their prompts, so that an update waits for long
    answers and no group gets too old. `train`: take the groups that are ready, the oldest first,
    and train on too old ones with the correction. `drop`: drop groups that are too old and draw
    their prompts again, which favours short answers."""
    micro_batch_tokens: InHelp[PositiveInt | Literal["auto"]] = "auto"
    """Tokens of one forward and backward pass, padding included, of policy and critic. A prompt
    that a packed pass shares counts once. `auto`: on a GPU, with `activation_checkpointing`, the
    fastest passes by the estimate of `rlhf doctor --plan` that are full of the longest answers;
    16,384 on a CPU."""
    micro_batch_size: int | None = Field(None, gt=0)
    """Most completions in one forward and backward pass. Unset: as many as `micro_batch_tokens`
    allows."""
    packing: Literal["auto", "on", "off"] = "auto"
    """Compute completions without padding, and each prompt only once per group. `auto`: if the
    model supports it."""
    routing_replay: bool = False
    """For a mixture of experts: compute each token with the experts that the engine chose for it,
    so that a choice that rounding tips changes no log-probability (docs/how-to/training.md). For
    single completions."""
    activation_checkpointing: InHelp[bool | Literal["auto", "selective"]] = "auto"
    """`true`: keep only the inputs of decoder layers and recompute the rest: less memory, about a
    third more time. `selective`: keep the results of matrix products and attention too, so that
    little is recomputed. `false`: keep everything. `auto`: the fastest of them that the estimate of
    `rlhf doctor --plan` lets fit 90 % of a GPU; everything on a CPU."""
    compile: bool | Literal["auto"] = "auto"
    """Compile every decoder layer with torch.compile: faster steps after a slow first one. `auto`:
    on GPUs, if there is a C compiler."""
    keep_groups_mb: NonNegativeInt = 4096
    """Size of `run_dir/groups` in MB, where every group is kept in full for the rollout viewer. The
    oldest steps are removed first. 0: keep none."""
    audit: bool = False
    """Record what `rlhf audit` needs to re-execute any step of the run and compare it bit for bit,
    in `run_dir/audit.jsonl` beside `run_dir/groups`."""
    run_dir: InHelp[Named[Path | None]] = None
    """Directory of configuration, metrics, samples and checkpoints. Unset: `runs/<group
    name>`."""
    weight_sync: Literal["http", "shared", "distributed"] = "http"
    """How weights reach the engines. `http`: every rollout node downloads files, or reads them if
    the job group is on one machine. `shared`: it reads them from `run_dir` on a volume that all
    nodes mount at the same path. `distributed`: NCCL or gloo broadcasts the tensors into the
    running engines; a node that cannot take part downloads the files."""

    @property
    def pass_tokens(self) -> int:
        """The tokens of a pass; `auto` counts as on a CPU."""
        return 16_384 if self.micro_batch_tokens == "auto" else self.micro_batch_tokens


class OptimizerSection(Section):
    """The optimiser of the policy (AdamW) and its learning rate."""

    learning_rate: InHelp[PositiveFloat] = 1e-6
    """Highest learning rate of the policy."""
    adam_betas: tuple[float, float] = (0.9, 0.98)
    """β1 and β2 of AdamW."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay."""
    moments: Literal["float32", "bfloat16"] = "float32"
    """Type in which AdamW's moments are stored. `bfloat16`: 4 bytes a parameter instead of 8,
    rounded at random so that their means are right (docs/how-to/training.md)."""
    warmup_steps: InHelp[NonNegativeInt] = 10
    """Warm-up steps W: update k = 1, 2, … uses k/W of the learning rate. (`transformers` uses (k −
    1)/W.)"""
    lr_schedule: InHelp[LrSchedule] = "constant"
    """Learning rate after the warm-up: `constant`, or falling until the last step, with the names
    and formulas of `transformers`."""
    lr_schedule_args: dict[str, Any] = {}
    """Arguments of the schedule, such as `{"min_lr_rate": 0.1}` of `cosine_with_min_lr`."""
    max_grad_norm: PositiveFloat = 1.0
    """Norm to which the gradients of policy and critic are clipped."""


class ParallelSection(Section):
    """How the models of the trainer are shared among its ranks, and what of them is in CPU memory
    (docs/how-to/training.md).
    """

    shard_size: int | None = Field(None, gt=0)
    """Ranks that share one copy of the models. Unset: all (FSDP). 1: every rank holds a copy. A
    divisor of the number of ranks in between: HSDP. A single process on a CPU always holds
    everything."""
    context_size: PositiveInt = 1
    """Ranks that compute each completion together, for contexts too long for one. A divisor of the
    number of ranks and of the model's attention heads."""
    expert_size: PositiveInt = 1
    """Ranks that own the experts of every layer together, instead of gathering all of them: for
    mixtures of experts. A divisor of `shard_size` (unset: of the number of ranks) and of the number
    of experts."""
    reshard_after_forward: bool | Literal["auto"] = "auto"
    """Free the gathered weights of a layer after each use (ZeRO-3). `false`: gather them once for
    an update and free them after its last backward pass (ZeRO-2), for 2 bytes per parameter.
    `auto`: `false` where that fits 90 % of a GPU. For sharded models."""
    offload_optimizer: bool = False
    """Keep parameters, gradients and optimiser state in CPU memory, and run the optimiser there.
    For sharded models."""
    offload_reference: bool = False
    """Keep the reference model in CPU memory while it is not used."""


class CheckpointSection(Section):
    """What a run saves to continue later."""

    every: InHelp[NonNegativeInt] = 50
    """Steps between checkpoints; one is always written at the end. 0: only at the end."""
    keep: PositiveInt = 3
    """Newest checkpoints to keep. The checkpoint with the best evaluation accuracy (or the best
    mean reward, if rewards are not verdicts) is also kept, as `best`."""
    resume: bool = True
    """Continue from the newest checkpoint in `run_dir`. Otherwise earlier checkpoints are set
    aside."""


class LimitsSection(Section):
    """How long the trainer waits, and which faults end the run."""

    stuck_after_s: PositiveFloat = 1800.0
    """Seconds without progress after which the run ends and says what stands still: another task
    that is not healthy yet, a batch (its graded groups), or all ranks."""
    service_timeout_s: PositiveFloat = 600.0
    """Seconds for one call to a service, retries included, in which it does not get on: the time
    begins anew whenever more of a large body was received or sent, and while the service makes
    progress with the call, as engines do that generate, however long their queue is. Should exceed
    the time in which the service's pod restarts."""
    fence_after_s: PositiveFloat = 900.0
    """Seconds without progress (bytes fetched, an engine that loads) after which a rollout node
    that does not serve the newest weights is fenced from traffic. Should exceed
    `rollout.stuck_after_s`."""
    lost_after_s: PositiveFloat = 45.0
    """Seconds of silence after which a trainer process counts as lost; the others then exit and
    name it."""
    max_failed_groups: PositiveInt = 64
    """Consecutive groups that may be dropped because of errors before the run ends."""


class EnvironmentSection(Section):
    """environment-server: multi-turn episodes with tools instead of single completions."""

    port: Port = 8006
    """Port of the environment-server."""
    name: InHelp[Annotated[str, AfterValidator(_checked_environment)]] = ""
    """Environment of the problems: `python`, a tool that runs programs;
    `python:package.module:Class`, your own class; `agent:COMMAND` or `agent:URL`, any program that
    talks to a model; `harbor:COMMAND`, such a program in the container of a Harbor task
    (docs/how-to/agents.md). Empty: single completions, without an environment-server."""
    turns: PositiveInt = 8
    """Maximum answers of the model in one episode. It may make eight times as many tool calls, and
    sample this many times `sampling.max_new_tokens` tokens."""
    context: int = Field(32_768, gt=1)
    """Maximum tokens of one sequence of an episode. With the embedded engine at most
    `rollout.max_context_tokens`."""
    turn_discount: float | None = Field(None, ge=0, le=1)
    """Discount per turn for rewards that an environment gives for single answers
    (`get_turn_rewards`): an answer is then credited only with the rewards that follow it, not with
    earlier ones. Unset: they count for the whole episode."""
    deadline_s: PositiveFloat = 600.0
    """Seconds for one episode, without those in which it waits for answers of the model, for a
    thread or for its container. One that takes longer is lost: it has no reward."""
    tool_timeout_s: PositiveFloat | None = None
    """Seconds for one tool call of a class. If it takes longer, the model gets an error as its
    result, and the episode goes on. Unset: as long as the episode."""
    min_episodes: int | None = Field(None, ge=2)
    """Fewest whole episodes with which a group is trained on. A group with fewer plays new episodes
    in place of the lost ones, once, and is dropped if there are still too few. Unset: all of
    `sampling.group_size`."""
    workers: int | None = Field(None, gt=0)
    """Concurrent calls of environments and tools in one environment-server. Unset: 1,024 threads
    for your own class, because fewer threads than episodes waiting for slow tools would leave the
    engines idle; otherwise 64 programs."""

    @property
    def kind(self) -> str:
        """`python`, `agent` or `harbor`; empty for single completions."""
        return self.name.partition(":")[0]

    @property
    def grades_itself(self) -> bool:
        """Whether the problems have tests instead of ground truths."""
        return self.kind == "harbor"


class RuntimeSection(Section):
    """Where the programs of episodes run (docs/how-to/agents.md#containers)."""

    kind: Literal["local", "sandbox", "docker", "kubernetes"] = "local"
    """`local`: processes of the environment-server's user. Otherwise every episode has a container,
    which reaches only the gateway: `sandbox`, bubblewrap on this machine; `docker`; `kubernetes`, a
    pod."""
    image: str = ""
    """Image of the containers of Docker and Kubernetes; `{task}` in it is replaced by the name of a
    Harbor task's folder. A task that names its own image has that one."""
    tools: list[Annotated[str, Field(min_length=1)]] = []
    """Folders of the environment-server that containers have too, under the same absolute paths and
    read-only, such as the one in which the agent is installed."""
    cpus: PositiveFloat = 1.0
    """CPUs of a container of Docker or Kubernetes, unless a task says otherwise."""
    memory_mb: PositiveInt = 4096
    """Memory of a container in MB, unless a task says otherwise; in the sandbox, of each of its
    processes."""
    processes: PositiveInt = 512
    """Processes and threads of a container. Kubernetes ignores it: its nodes have such a limit
    (`podPidsLimit`)."""
    gateway: str = ""
    """URL at which containers of Docker and Kubernetes reach the environment-server, for networks
    where they do not find it by themselves."""
    grader_network: bool = False
    """Whether the containers in which Harbor tasks are graded have the network of their host, for
    tests that install packages. What the agent wrote runs there."""


class TinkerSection(Section):
    """tinker-server: Tinker's API for training loops of other programs (docs/how-to/tinker.md)."""

    port: Port = 8007
    """Port of the server."""
    host: str = ""
    """Address to listen on. Empty: this machine only, and all of a cluster's network in a job
    group."""
    name: str = ""
    """Name of the model for clients, which load the tokenizer of that name. Empty: `model.name`."""
    max_runs: PositiveInt = 1000
    """Runs of a client that the server keeps."""
    resident_runs: PositiveInt = 8
    """Runs in memory. The run that was used longest ago gives way, and comes back from its file."""
    stable_reinforce: Literal["", "importance_sampling", "ppo", "cispo"] = ""
    """The loss that is computed where a client asks for `stable_reinforce`, whose formula Tinker
    does not publish. Empty: it is refused."""


class TrackersSection(Section):
    """Experiment trackers: they get what `metrics.jsonl` gets and never delay a step
    (docs/how-to/metrics.md).
    """

    names: InHelp[list[TrackerName]] = []
    """`tensorboard`, `wandb`, `mlflow`, `trackio`, or the import path `package.module:Class` of
    your own."""
    project: str = Field("rlhf-math", min_length=1)
    """Project name in wandb and trackio; experiment name in mlflow."""
    run_name: str = ""
    """Name of the run in the trackers. Empty: the name of its directory."""
