"""The settings of every section but `algorithm`, each declared once with its default, bounds and meaning."""

import re
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from common.explain import did_you_mean

_T = TypeVar("_T")
MAIN = "main"
Main = Annotated[_T, MAIN]
"""The type of a setting that `--help` shows; the others are in `--help-all`."""


def _among(*names: str, path: str = "package.module:name") -> AfterValidator:
    """Returns a check that a text is one of `names` or an import path."""

    def check(text: str) -> str:
        if text in names or re.fullmatch(r"[\w.]+:\w+", text):
            return text
        raise ValueError(f"there is no {text}: {did_you_mean(text, [*filter(None, names), f'an import path {path}'])}")

    return AfterValidator(check)


RewardName = Annotated[
    str, _among("math", "code", "format", "reward_model", "judge", "length", "repetition", path="package.module:Class")
]
TrackerName = Annotated[str, _among("tensorboard", "wandb", "mlflow", "trackio", path="package.module:Class")]


class Section(BaseModel):
    """A section of the settings; unknown names and numbers that are not finite are refused."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False, protected_namespaces=())


class ModelSection(Section):
    """The policy."""

    name: Main[str] = "Qwen/Qwen2.5-0.5B-Instruct"
    """Model on the Hugging Face hub, or a local directory. `python -m trainer.tiny_model DIR` makes the built-in one."""
    dtype: Main[Literal["float32", "bfloat16"]] = "bfloat16"
    """Compute precision on a GPU. Master weights are always float32, and a CPU computes in float32."""
    reference: str = ""
    """Reference model of the KL divergence (`algorithm.kl_coef`). Empty: the model that training starts from."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. Only for models whose code you have read."""


class LoraSection(Section):
    """LoRA: a low-rank adapter of the frozen model is trained in the place of all its weights (docs/how-to/training.md)."""

    rank: Main[int] = Field(0, ge=0)
    """Rank of the adapter's matrices. 0: no adapter, all weights are trained."""
    alpha: float = Field(32.0, gt=0)
    """Scale of the adapter: a matrix W becomes W + alpha / rank × B A."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout of the adapter's input during updates, 0 to below 1."""
    target_modules: list[str] = []
    """Names of the linear layers that get an adapter (`q_proj`, …). Empty: all between embedding and head."""
    publish: Literal["adapter", "merged"] = "adapter"
    """Weights for the engines: the `adapter` alone, or the whole model with the adapter `merged` into it."""

    @property
    def publishes_adapter(self) -> bool:
        return self.rank > 0 and self.publish == "adapter"


class DataSection(Section):
    """data-server: prompts."""

    port: int = Field(8000, ge=1, le=65535)
    """Port of the data-server."""
    source: Main[str] = Field("gsm8k", min_length=1)
    """`gsm8k` and `math` (from the hub), `math:SOURCE` (MATH in files or under another name on the hub), `tiny` (generated), a
    path (.jsonl, .json, .csv, .parquet or a directory), or `org/name` on the hub where there is no such path."""
    hub_config: str = ""
    """Configuration of a hub data set that has several, such as `main`. Empty: the default one."""
    train_split: str = "train"
    """Split of the training problems."""
    eval_split: str = "test"
    """Split of the held-out problems."""
    num_samples: Main[int | None] = Field(None, gt=0)
    """Number of training problems to use, chosen by the seed. Unset: all."""
    prompt_field: Main[str] = "question"
    """Column of the problem."""
    answer_field: Main[str] = "answer"
    """Column of the answer. Of a text with `#### N` only N is kept."""
    messages_field: str = ""
    """Column of a chat, instead of `prompt_field`: system messages, one user message, at most one answer. Without a column
    `answer_field`, the ground truth is the final answer of the chat's answer (`#### N` or a box)."""
    columns: list[str] | None = None
    """Further columns that reward functions get. Unset: all."""
    task_field: str = ""
    """Column with the task of each row, which chooses its reward functions (`reward.tasks`)."""
    map: Annotated[str, _among("", path="package.module:function")] = ""
    """Function `package.module:function` that changes every row before it is read. It gets the columns and returns columns, or
    None to leave the row out."""
    levels: list[int | str] = []
    """Levels of MATH to use, as 5, "5" or "Level 5". Empty: all."""
    subjects: list[str] = []
    """Subjects of MATH to use, as `Counting & Probability` or `counting_and_probability`. Empty: all."""

    curriculum: Literal["none", "difficulty"] = "none"
    """`difficulty`: after a first pass over all prompts, those that are solved about half of the time come more often."""

    @property
    def is_math(self) -> bool:
        return self.source == "math" or self.source.startswith("math:")

    def unread(self) -> dict[str, str]:
        """Settings of this section that others of it make pointless, and why."""
        built_in = self.source in ("gsm8k", "tiny")
        reason = f"data.source is {self.source}, whose columns are known"
        names: dict[str, str] = {}
        if built_in or self.is_math:
            own = ("prompt_field", "answer_field", "messages_field", "columns", "task_field", "map")
            names |= dict.fromkeys(own, reason)
        if built_in:
            names["hub_config"] = reason
        if not self.is_math:
            names |= dict.fromkeys(("levels", "subjects"), f"data.source is {self.source}, not math")
        if self.messages_field:
            names["prompt_field"] = "data.messages_field is set"
        return names


class RewardSection(Section):
    """reward-server: scores answers."""

    port: int = Field(8002, ge=1, le=65535)
    """Port of the reward-server."""
    functions: Main[list[RewardName]] = Field(["math"], min_length=1)
    """Reward functions; the reward is their weighted sum: `math`, `code`, `format`, `length`, `repetition`, `reward_model`,
    `judge`, or the import path `package.module:Class` of a RewardFunction (docs/how-to/rewards.md)."""
    weights: Main[dict[RewardName, float]] = {}
    """Weight of each function by its name. 1.0 where none is given."""
    tasks: dict[str, Annotated[list[RewardName], Field(min_length=1)]] = {}
    """Functions for the problems of each task; `functions` grade those without a task. Once a task is named here, a problem of
    any other task is refused."""
    function_timeout_s: float = Field(10.0, gt=0)
    """Seconds for one call of `format`, `length`, `repetition` or your own function. Waiting for a processor does not count."""
    workers: int = Field(2, gt=0)
    """Worker processes for `math`, with as many spare ones, and as many for your own functions."""
    math_timeout_s: float = Field(1.0, gt=0)
    """Seconds for one answer in a worker of `math`. Waiting for a processor does not count."""
    require_stop: bool = False
    """Reward only completions that ended by themselves. One cut at `max_new_tokens` gets 0, right or wrong."""
    code_timeout_s: float = Field(5.0, gt=0)
    """Seconds for one test case of `code`. All cases of a program share five times as much. Waiting for a processor does not
    count."""
    code_partial_credit: bool = False
    """`code` rewards the share of test cases that pass, instead of all or nothing."""
    code_slots: int | None = Field(None, gt=0)
    """Programs that `code` runs at once. Unset: one per processor."""
    code_memory_mb: int = Field(512, ge=32)
    """Address space of one program of `code`, in MB."""
    code_python: str = ""
    """Python interpreter for programs, with the packages installed for it. Empty: a bare one."""
    code_sandbox: Literal["bubblewrap", "none"] = "bubblewrap"
    """`none` runs programs as the server's own user without protection. Only for programs that you trust."""
    format_required: list[str] = []
    """Regular expressions that `format` must find in a completion. A dot matches line ends too."""
    format_forbidden: list[str] = []
    """Regular expressions that `format` must not find in a completion."""
    length_soft_chars: int = Field(4000, ge=0)
    """Characters up to which `length` takes nothing from the reward."""
    length_hard_chars: int = Field(8000, gt=0)
    """Characters from which on `length` takes 1 from the reward."""

    reward_model_name: str = ""
    """Sequence-classification model of `reward_model`, on the hub or in a directory."""
    reward_model_max_tokens: int = Field(4096, gt=0)
    """Longest chat that `reward_model` scores, in tokens. A longer one has no score."""
    judge_url: str = ""
    """OpenAI-compatible endpoint of `judge`, such as http://127.0.0.1:8000/v1. Its key comes from JUDGE_API_KEY."""
    judge_model: str = ""
    """Model name at the judge's endpoint."""
    judge_rubric: str = ""
    """Criteria for the judge. Empty: a general rubric on correctness."""
    judge_timeout_s: float = Field(60.0, gt=0)
    """Seconds for one request to the judge."""
    judge_concurrency: int = Field(16, gt=0)
    """Requests to the judge at once."""
    judge_max_tokens: int = Field(1024, gt=0)
    """Longest reply of the judge, in tokens."""

    def function_names(self) -> list[str]:
        """Every function that any task uses, each once."""
        names = [*self.functions, *(name for task in self.tasks.values() for name in task)]
        return list(dict.fromkeys(names))

    def unread(self) -> dict[str, str]:
        """Settings that no function in use reads, and why."""
        names = self.function_names()
        return {
            field: f"no task uses the reward function {function}"
            for field in type(self).model_fields
            for function in ("math", "code", "format", "length", "reward_model", "judge")
            if field.startswith(f"{function}_") and function not in names
        }

    @model_validator(mode="after")
    def _fits(self) -> "RewardSection":
        if strangers := set(self.weights) - set(self.function_names()):
            raise ValueError(f"reward.weights names {sorted(strangers)[0]}, which reward.functions lacks: name it there too")
        for function, needed in (("reward_model", ("reward_model_name",)), ("judge", ("judge_url", "judge_model"))):
            missing = [name for name in needed if not getattr(self, name)]
            if function in self.function_names() and missing:
                raise ValueError(f"the reward function {function} needs reward.{missing[0]}: set it")
        if "@" in self.judge_url.partition("://")[2].partition("/")[0]:
            raise ValueError("reward.judge_url has credentials, and a run saves its settings: put them into JUDGE_API_KEY")
        if self.length_soft_chars >= self.length_hard_chars:
            raise ValueError(
                f"reward.length_soft_chars {self.length_soft_chars} is not below reward.length_hard_chars "
                f"{self.length_hard_chars}: lower it"
            )
        return self


class ReplaySection(Section):
    """replay-buffer: stores experience."""

    port: int = Field(8003, ge=1, le=65535)
    """Port of the replay-buffer."""
    capacity: int = Field(100_000, gt=0)
    """Completions that the buffer keeps. The oldest groups that were trained on leave first."""
    lease_s: float = Field(600.0, gt=0)
    """Seconds after which a group that was handed out and not acknowledged is handed out again."""
    reuse_ratio: Main[float] = Field(0.0, ge=0, lt=1)
    """Share of each batch that comes from prioritised reuse instead of fresh groups, 0 to below 1."""
    priority: Annotated[str, _among("advantage", "reward")] = "advantage"
    """Priority of a group for reuse: its mean |`advantage`|, its mean `reward`, or what your own function
    `package.module:name` of (group, advantages) returns, at least 0."""
    corrected: bool = True
    """Correct reused groups by importance weights and by the policy that sampled them. Without it the update is biased."""
    max_reuse_staleness: int = Field(8, ge=0)
    """Oldest group that may be reused, in weight versions."""
    max_times_sampled: int = Field(4, gt=0)
    """Times that one group may be reused."""


class CriticSection(Section):
    """The critic of PPO (`algorithm.advantage gae`): a value model of its own."""

    location: Main[Literal["trainer", "server"]] = "trainer"
    """`trainer`: on the trainer's own devices. `server`: in a critic-server task of the job group."""
    port: int = Field(8005, ge=1, le=65535)
    """Port of the critic-server."""
    model: str = ""
    """Model that the critic starts from, with a new value head. Empty: the policy's model."""
    learning_rate: Main[float] = Field(1e-5, gt=0)
    """Learning rate of the critic."""
    warmup_steps: int = Field(0, ge=0)
    """First steps in which only the critic learns."""
    value_clip: float | None = Field(0.2, gt=0)
    """Distance that a value may move in one update before its loss stops falling. Unset: no clipping."""


class RolloutSection(Section):
    """rollout-server: the engines, the agent of every node, and the router."""

    router_port: int = Field(30000, ge=1, le=65535)
    """Port of the router."""
    engine_port: int = Field(30001, ge=1, le=65535)
    """Port of every engine."""
    agent_port: int = Field(30002, ge=1, le=65535)
    """Port of every rollout node's agent."""
    router_metrics_port: int = Field(29000, ge=1, le=65535)
    """Port of the router's Prometheus metrics."""
    engine: Main[Literal["sglang", "embedded"]] = "sglang"
    """`sglang`, or `embedded`: a small CPU engine with the same HTTP API."""
    device: Literal["cuda", "cpu"] = "cuda"
    """Device of SGLang; `cpu` needs what `make sglang-cpu` installs. The embedded engine always uses the CPU."""
    engine_python: str = ".venv-sglang/bin/python"
    """Python that has SGLang installed. Its dependencies clash with those of the other services."""
    engine_args: Main[list[str]] = []
    """Further arguments of `sglang.launch_server`, unchanged."""
    tensor_parallel_size: Main[int] = Field(1, gt=0)
    """GPUs that share one engine."""
    max_running_requests: int = Field(256, gt=0)
    """Completions that one engine decodes at once."""
    max_context_tokens: int = Field(2048, gt=1)
    """Longest prompt plus completion of the embedded engine, in tokens. For SGLang on a CPU, this times `max_running_requests`
    is the size of the KV cache in tokens (at most 30 % of the free memory)."""
    router: Literal["sglang-router", "smg"] = "sglang-router"
    """Program in front of the engines: SGLang's router, or `smg`, its successor (`pip install -e '.[smg]'`)."""
    router_policy: Literal["round_robin", "random", "cache_aware"] = "round_robin"
    """Choice of the engine by the router: in turn, at random, or by what each has cached (docs/explanation/engines.md)."""
    hang_timeout_s: float = Field(30.0, gt=0)
    """Seconds without an answer after which a healthy engine or router is killed and started again."""

    @model_validator(mode="after")
    def _no_secrets(self) -> "RolloutSection":
        for word in self.engine_args:
            if word.partition("=")[0] in ("--api-key", "--admin-api-key", "--ssl-keyfile-password"):
                raise ValueError(
                    f"rollout.engine_args has {word.partition('=')[0]}, and a run saves its settings: set API_TOKEN in the "
                    "environment instead"
                )
        return self


class SamplingSection(Section):
    """Sampling of completions."""

    group_size: Main[int] = Field(8, ge=1)
    """Completions per prompt, which a group-relative advantage compares. With a critic (`ppo`) it may be 1."""
    max_new_tokens: Main[int] = Field(512, gt=0)
    """Longest completion, in tokens."""
    temperature: Main[float] = Field(1.0, gt=0)
    """Sampling temperature. The trainer divides its logits by it too, so that logprobs of both sides are comparable."""
    system_prompt: Main[str] = ""
    """System message before every problem."""
    request_timeout_s: float = Field(600.0, gt=0)
    """Seconds for one group to be generated, retries included."""


class TrainerSection(Section):
    """ppo-trainer: the loop, the optimiser, evaluation and checkpoints."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the update. `auto`: a GPU where there is one."""
    port: int = Field(8004, ge=1, le=65535)
    """Port of weights, health, metrics and the dashboard."""
    num_epochs: Main[int] = Field(3, gt=0)
    """Passes over the training prompts."""
    batch_size: Main[int] = Field(4, gt=0)
    """Prompts per step. Each becomes a group of `sampling.group_size` completions."""
    max_steps: Main[int | None] = Field(None, gt=0)
    """Steps after which training ends even if epochs remain. Unset: no limit."""
    max_staleness: Main[int] = Field(0, ge=0)
    """Oldest experience that is trained on, in weight versions. 0: on-policy."""
    learning_rate: Main[float] = Field(1e-6, gt=0)
    """Highest learning rate of the policy."""
    adam_betas: tuple[float, float] = (0.9, 0.98)
    """β1 and β2 of AdamW."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay."""
    warmup_steps: Main[int] = Field(10, ge=0)
    """Steps W over which the learning rate rises: update k = 1, 2, … has k/W of it. (`transformers` begins with 0, k − 1.)"""
    lr_schedule: Main[Literal["constant", "linear", "cosine"]] = "constant"
    """Learning rate after the warm-up: `constant`, or falling to zero at the last step."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Norm to which gradients of policy and critic are clipped."""
    micro_batch_tokens: Main[int] = Field(16_384, gt=0)
    """Tokens of one forward and backward pass, padding included, of policy and critic. A prompt that a packed pass shares
    counts once."""
    micro_batch_size: int | None = Field(None, gt=0)
    """Most completions in one forward and backward pass. Unset: as many as `micro_batch_tokens` allows."""
    packing: Literal["auto", "on", "off"] = "auto"
    """Compute completions without padding, and each prompt once for its group. `auto`: where the model permits it."""
    shard_size: Main[int | None] = Field(None, gt=0)
    """Ranks that share one copy of the models. Unset: all (FSDP). 1: every rank holds a copy. A divisor of the number of ranks
    between: HSDP. One process on a CPU always holds all."""
    activation_checkpointing: bool = False
    """Keep only the inputs of decoder layers and recompute the rest: less memory, about a third more time."""
    compile: bool = False
    """Compile every decoder layer with torch.compile: faster steps after a slow first one. Needs a C++ compiler."""
    offload_optimizer: bool = False
    """Keep parameters, gradients and optimiser state in CPU memory, where the optimiser then steps. For sharded models."""
    offload_reference: bool = False
    """Keep the reference model in CPU memory while it is not used."""
    eval_every: Main[int] = Field(0, ge=0)
    """Steps between evaluations on held-out problems. 0: only before and after training."""
    eval_samples: Main[int] = Field(256, ge=0)
    """Held-out problems per evaluation. 0: no evaluation."""
    eval_k: int = Field(8, gt=0)
    """k of pass@k in the first and the last evaluation."""
    eval_pass_samples: int = Field(64, ge=0)
    """Held-out problems for pass@k. Each is answered k times."""
    checkpoint_every: Main[int] = Field(50, ge=0)
    """Steps between checkpoints; one is always written at the end. 0: only at the end."""
    keep_checkpoints: int = Field(3, gt=0)
    """Newest checkpoints to keep. The one with the best accuracy in an evaluation stays too, as `best`."""
    keep_groups_mb: int = Field(4096, ge=0)
    """Size of `run_dir/groups` in MB, where every group is kept in full for the rollout viewer. The oldest steps leave first.
    0: none are kept."""
    resume: bool = True
    """Continue from the newest checkpoint in `run_dir`. Otherwise earlier checkpoints are set aside."""
    run_dir: Main[Path | None] = None
    """Directory of configuration, metrics, samples, curves and checkpoints. Unset: `runs/<group name>`."""
    wait_timeout_s: float = Field(1800.0, gt=0)
    """Seconds to wait for the other tasks to become healthy, or for a batch, before the run ends with the reason."""
    weight_sync: Main[Literal["http", "shared", "distributed"]] = "http"
    """Way of weights to the engines. `http`: every rollout node downloads files. `shared`: it reads them from `run_dir` on
    a volume that all nodes mount at the same path. `distributed`: tensors are broadcast into the running engines by NCCL or
    gloo; a node that cannot take part downloads the files."""
    service_timeout_s: float = Field(600.0, gt=0)
    """Seconds for one call to a service, retries included. Should be longer than a restart of its pod."""
    publish_timeout_s: float = Field(600.0, gt=0)
    """Seconds for every rollout node to confirm a weight version. One that does not is fenced from traffic."""
    lost_after_s: float = Field(45.0, gt=0)
    """Seconds of silence after which a trainer process counts as lost and the others end with its name."""
    max_failed_groups: int = Field(64, gt=0)
    """Groups in a row that may be dropped because of errors before the run ends."""
    num_threads: int | None = Field(None, gt=0)
    """CPU threads of one trainer process. Unset: torch decides."""


class TrackersSection(Section):
    """Experiment trackers: they get what `metrics.jsonl` gets, and never hold up a step (docs/how-to/trackers.md)."""

    names: Main[list[TrackerName]] = []
    """`tensorboard`, `wandb`, `mlflow`, `trackio`, or the import path `package.module:Class` of your own."""
    project: str = Field("rlhf-math", min_length=1)
    """Project of wandb and trackio, experiment of mlflow."""
    run_name: str = ""
    """Name of the run in the trackers. Empty: the name of its directory."""
    sample_every: int = Field(10, ge=0)
    """Steps between tables of samples, each the completions of one group. 0: no tables."""

    def unread(self) -> dict[str, str]:
        """Settings that no tracker in use reads, and why."""
        unread = () if self.names else (name for name in type(self).model_fields if name != "names")
        return dict.fromkeys(unread, "trackers.names is empty")
