"""The settings of every section but `algorithm`, each declared once with its default, bounds and meaning."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

RewardName = Annotated[str, StringConstraints(pattern=r"^(math|code|format|reward_model|judge|length|repetition|[\w.]+:\w+)$")]

TrackerName = Annotated[str, StringConstraints(pattern=r"^(tensorboard|wandb|mlflow|trackio|[\w.]+:\w+)$")]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False, protected_namespaces=())


class ModelSection(Section):
    """The policy."""

    name: str = "Qwen/Qwen2.5-0.5B-Instruct"
    """A model on the Hugging Face hub or a local directory; `python -m trainer.tiny_model DIR` makes the built-in one."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Compute precision on a GPU. Master weights are float32 always; a CPU computes in float32."""
    reference: str = ""
    """Reference model of the KL divergence (`algorithm.kl_coef`); the model that training starts from when empty."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. Only for models whose code you have read."""


class LoraSection(Section):
    """LoRA: a low-rank adapter of the frozen model is trained in the place of all its weights (docs/how-to/training.md)."""

    rank: int = Field(0, ge=0)
    """Rank of the adapter's matrices; 0: no adapter, all weights are trained."""
    alpha: float = Field(32.0, gt=0)
    """A matrix W of the model becomes W + alpha / rank × B A."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Of the adapter's input, in updates alone."""
    target_modules: list[str] = []
    """Last names of the linear layers that get an adapter (`q_proj`, …); empty: every one between embedding and head."""
    publish: Literal["adapter", "merged"] = "adapter"
    """What engines get: the `adapter` alone, or the whole model with the adapter `merged` into its weights."""

    @property
    def publishes_adapter(self) -> bool:
        return self.rank > 0 and self.publish == "adapter"


class DataSection(Section):
    """data-server: prompts."""

    port: int = Field(8000, ge=1, le=65535)
    max_requests: int = Field(256, gt=0)
    """Requests in work at once; more are answered 503 with Retry-After before their bodies are read."""
    source: str = Field("gsm8k", min_length=1)
    """`gsm8k` and `math` (from the hub), `math:SOURCE` (MATH in files or of another name on the hub), `tiny` (generated on the
    spot), a path (.jsonl, .json, .csv, .parquet or a directory), or `org/name` on the hub where there is no such path."""
    hub_config: str = ""
    """Configuration of a data set on the hub that has several (`main`); empty: the default one."""
    train_split: str = "train"
    eval_split: str = "test"
    num_samples: int | None = Field(None, gt=0)
    """Use only so many training problems, chosen by the seed; all of them when unset."""
    prompt_field: str = "question"
    """Column of the problem."""
    answer_field: str = "answer"
    """Column of the answer; of a text with `#### N` only N is kept."""
    messages_field: str = ""
    """Column of a chat, in the place of `prompt_field`: any system messages, one user message, at most one answer. Where there
    is no column `answer_field`, the ground truth is what the chat's answer states last (`#### N` or a box)."""
    columns: list[str] | None = None
    """Further columns to send with a prompt, for reward functions; all of them when unset."""
    task: str = ""
    """Which reward functions grade the answers; empty: the default ones."""
    task_field: str = ""
    """Column with the task of each row, where a data set mixes tasks."""
    map: str = Field("", pattern=r"^([\w.]+:\w+)?$")
    """A function `package.module:function` that changes every row before it is read: columns -> columns, or None to leave the
    row out."""
    levels: list[int | str] = []
    """MATH: only problems of these levels, as 5, "5" or "Level 5"; empty: all."""
    subjects: list[str] = []
    """MATH: only problems of these subjects, as in `Counting & Probability` or `counting_and_probability`; empty: all."""

    curriculum: Literal["none", "difficulty"] = "none"
    """`difficulty`: after a first pass over all prompts, those whose pass rate is near `curriculum_target` come more often."""
    curriculum_target: float = Field(0.5, gt=0, lt=1)
    """Pass rate that is preferred most."""
    curriculum_free_share: float = Field(0.2, gt=0, le=1)
    """Share of the draws that go on with the plain order, whatever the pass rates are, so that every prompt keeps coming."""
    curriculum_smoothing: float = Field(0.5, ge=0, lt=1)
    """Weight of what was known of a prompt when a new pass rate comes; 0: only the last one counts."""

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
        if self.curriculum == "none":
            parameters = ("curriculum_target", "curriculum_free_share", "curriculum_smoothing")
            names |= dict.fromkeys(parameters, "data.curriculum is none")
        if self.messages_field:
            names["prompt_field"] = "data.messages_field is set"
        return names


class RewardSection(Section):
    """reward-server: scores answers."""

    port: int = Field(8002, ge=1, le=65535)
    max_requests: int = Field(256, gt=0)
    """Requests in work at once; more are answered 503 with Retry-After before their bodies are read."""
    functions: list[RewardName] = Field(["math"], min_length=1)
    """Reward functions, the reward is their weighted sum: `math`, `code`, `format`, `length`, `repetition`,
    `reward_model`, `judge`, or the import path `package.module:Class` of a RewardFunction (docs/how-to/rewards.md)."""
    weights: dict[RewardName, float] = {}
    """Weight of a function by its name above; 1.0 for those that are not named."""
    tasks: dict[str, Annotated[list[RewardName], Field(min_length=1)]] = {}
    """Functions for the problems of a task (the data set's column `task`); `functions` for those without a task. Once one
    task is named, a problem of another one is refused."""
    function_timeout_s: float = Field(10.0, gt=0)
    """Seconds that one call of `format`, `length`, `repetition` or a function of one's own may take."""
    function_batch: int = Field(64, gt=0)
    """Completions that one call of a function gets at most; larger batches are spread over the workers."""
    workers: int = Field(2, gt=0)
    """Worker processes, of `math` and again of the functions of one's own. Each is killed when its deadline passes and
    replaced."""
    timeout_s: float = Field(1.0, gt=0)
    """Seconds that one answer may take in a worker of `math`."""
    memory_mb: int = Field(1024, ge=256)
    """Address space of one worker of `math`."""
    require_stop: bool = False
    """Reward only completions that ended by themselves: one cut at `max_new_tokens` gets 0, right or wrong."""
    max_batch_items: int = Field(4096, gt=0)
    code_timeout_s: float = Field(5.0, gt=0)
    """Seconds that one test case of `code` may take; all cases of a program have five times as much."""
    code_partial_credit: bool = False
    """`code` rewards the share of the test cases that pass instead of all or nothing."""
    code_slots: int | None = Field(None, gt=0)
    """Programs that `code` runs at once; the number of processors when unset."""
    code_memory_mb: int = Field(512, ge=32)
    """Address space of one program (which has one process)."""
    code_output_kb: int = Field(64, gt=0)
    """Output of one test case; more fails it."""
    code_python: str = ""
    """Interpreter for programs, with the packages installed for it; a bare one is found when empty."""
    code_sandbox: Literal["bubblewrap", "none"] = "bubblewrap"
    """`none` runs programs as the server's own user with no protection: only for programs that you trust."""
    format_required: list[str] = []
    """Regular expressions that `format` must find in a completion; a dot matches line ends too."""
    format_forbidden: list[str] = []
    """Regular expressions that `format` must not find."""
    length_soft_chars: int = Field(4000, ge=0)
    """Characters up to which `length` takes nothing."""
    length_hard_chars: int = Field(8000, gt=0)
    """Characters from which on `length` takes 1."""
    repetition_ngram: int = Field(20, gt=0)
    """Words in a row that count as repeated when they occur again."""

    reward_model_name: str = ""
    """Sequence-classification model of `reward_model`, on the hub or a directory."""
    reward_model_device: Literal["auto", "cuda", "cpu"] = "auto"
    reward_model_dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """`auto`: bfloat16 on a GPU, float32 on a CPU."""
    reward_model_batch_size: int = Field(8, gt=0)
    """Chats in one forward pass."""
    reward_model_max_tokens: int = Field(4096, gt=0)
    """A longer chat has no score."""
    reward_model_timeout_s: float = Field(120.0, gt=0)
    """Seconds that one call (of `function_batch` completions at most) may take."""
    judge_url: str = ""
    """OpenAI-compatible endpoint of `judge`, as http://127.0.0.1:8000/v1. Its key is in the environment, JUDGE_API_KEY."""
    judge_model: str = ""
    """Name of the model there."""
    judge_rubric: str = ""
    """What the judge is told is good; a general rubric on correctness when empty."""
    judge_scale: float = Field(10.0, gt=0)
    """Best score; the reward is the share of it."""
    judge_timeout_s: float = Field(60.0, gt=0)
    """Seconds for one request."""
    judge_retries: int = Field(3, ge=0)
    judge_concurrency: int = Field(16, gt=0)
    """Requests at once."""
    judge_max_tokens: int = Field(1024, gt=0)
    """Of a reply."""

    def function_names(self) -> list[str]:
        """Every function that any task uses, each once."""
        names = [*self.functions, *(name for task in self.tasks.values() for name in task)]
        return list(dict.fromkeys(names))

    def unread(self) -> dict[str, str]:
        """Settings that no function in use reads, and why."""
        names = self.function_names()
        unread = {
            field: f"no task uses the reward function {function}"
            for field in type(self).model_fields
            for function in ("code", "format", "length", "repetition", "reward_model", "judge")
            if field.startswith(f"{function}_") and function not in names
        }
        if "math" not in names:
            unread |= dict.fromkeys(("timeout_s", "memory_mb"), "no task uses the reward function math")
        return unread

    @model_validator(mode="after")
    def _fits(self) -> "RewardSection":
        if strangers := set(self.weights) - set(self.function_names()):
            raise ValueError(f"weights names {sorted(strangers)[0]}, which is not among the functions: name it there too")
        for function, needed in (("reward_model", ("reward_model_name",)), ("judge", ("judge_url", "judge_model"))):
            missing = [name for name in needed if not getattr(self, name)]
            if function in self.function_names() and missing:
                raise ValueError(f"the reward function {function} needs {missing[0]}: set it")
        if "@" in self.judge_url.partition("://")[2].partition("/")[0]:
            raise ValueError("judge_url has credentials, and a run saves its settings: put them into JUDGE_API_KEY instead")
        if self.length_soft_chars >= self.length_hard_chars:
            raise ValueError(
                f"length_soft_chars {self.length_soft_chars} is not below length_hard_chars {self.length_hard_chars}: lower it"
            )
        return self


class ReplaySection(Section):
    """replay-buffer: stores experience."""

    port: int = Field(8003, ge=1, le=65535)
    max_requests: int = Field(256, gt=0)
    """Requests in work at once; more are answered 503 with Retry-After before their bodies are read."""
    capacity: int = Field(100_000, gt=0)
    """Completions kept; the oldest consumed groups leave first."""
    lease_s: float = Field(600.0, gt=0)
    """Seconds after which a group that was handed out and not acknowledged is handed out again."""
    reuse_ratio: float = Field(0.0, ge=0, lt=1)
    """Share of each training batch that comes from prioritised reuse instead of fresh groups."""
    priority: str = Field("advantage", pattern=r"^(advantage|difficulty|reward|recency|[\w.]+:\w+)$")
    """What makes a group be reused more often: `advantage` (its mean |advantage|), `difficulty` (half of the answers
    right), `reward` (its mean reward), `recency`, or a function `package.module:name` of (group, advantages) that returns
    a number of at least 0."""
    recency_half_life: float = Field(4.0, gt=0)
    """Weight versions after which the priority has halved (priority recency)."""
    priority_exponent: float = Field(0.6, ge=0)
    """α of prioritised experience replay (Schaul et al. 2016): P(i) ∝ priority^α."""
    importance_exponent: float = Field(0.4, ge=0, le=1)
    """β of prioritised experience replay at the first step; annealed linearly to 1 at the last."""
    corrected: bool = True
    """Correct reused groups by their importance weights and by the policy that sampled them. Without it they are trained
    on as if they were fresh, which is biased: for comparison."""
    mix_successes: int = Field(0, ge=0)
    """In a fresh group whose answers are all wrong, replace so many by verified right answers of the same prompt from the
    buffer, where there are any (RLEP)."""
    max_reuse_staleness: int = Field(8, ge=0)
    """Oldest experience that may be reused, in weight versions."""
    max_times_sampled: int = Field(4, gt=0)
    """How often one group may be reused."""


class CriticSection(Section):
    """The critic of PPO (`algorithm.advantage gae`): a value model of its own."""

    location: Literal["trainer", "server"] = "trainer"
    """`trainer`: on the trainer's own devices. `server`: a critic-server task of the job group."""
    port: int = Field(8005, ge=1, le=65535)
    """Of the critic-server."""
    max_requests: int = Field(16, gt=0)
    """Requests in work at once on the critic-server, which computes one after the other; more are answered 503."""
    model: str = ""
    """What the value model starts from, with a new value head; the policy's model when empty."""
    learning_rate: float = Field(1e-5, gt=0)
    warmup_steps: int = Field(0, ge=0)
    """Critic warm-up: in so many first steps only the critic learns."""
    update_epochs: int = Field(1, gt=0)
    """Passes over each batch."""
    mini_batches: int = Field(1, gt=0)
    """Optimiser updates per pass."""
    value_clip: float | None = Field(0.2, gt=0)
    """A value may move so far from what it was before the update until its loss no longer falls; unset: no clipping."""
    max_grad_norm: float = Field(1.0, gt=0)
    micro_batch_tokens: int = Field(16_384, gt=0)
    """Tokens that one forward and backward pass computes, padding included; a prompt that a packed pass shares counts once."""


class RolloutSection(Section):
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
    router: Literal["sglang-router", "smg"] = "sglang-router"
    """The program in front of the engines: SGLang's router, or `smg`, its successor (`pip install -e '.[smg]'`)."""
    router_policy: Literal["round_robin", "random", "cache_aware"] = "round_robin"
    """How the router picks an engine for a request: in turn, by chance, or by what each was asked before
    (docs/explanation/engines.md)."""
    startup_timeout_s: float = Field(1800.0, gt=0)
    """Seconds an engine may take until it answers (loading a large model takes minutes)."""
    hang_timeout_s: float = Field(30.0, gt=0)
    """Seconds after which an engine or the router, healthy before, that does not answer is killed and started again."""

    @model_validator(mode="after")
    def _no_secrets(self) -> "RolloutSection":
        for word in self.engine_args:
            if word.partition("=")[0] in ("--api-key", "--admin-api-key", "--ssl-keyfile-password"):
                raise ValueError(
                    f"engine_args has {word.partition('=')[0]}, and a run saves its settings: set API_TOKEN in the environment"
                )
        return self


class SamplingSection(Section):
    """How completions are sampled."""

    group_size: int = Field(8, ge=1)
    """Completions per prompt: what a group-relative advantage compares. With a critic (`ppo`) it may be 1."""
    max_new_tokens: int = Field(512, gt=0)
    temperature: float = Field(1.0, gt=0)
    """The trainer divides its logits by the same temperature, so logprobs of both sides are comparable."""
    system_prompt: str = ""
    """Put before every problem with the model's chat template."""
    request_timeout_s: float = Field(600.0, gt=0)
    """Seconds one group may take to generate, retries included."""


class TrainerSection(Section):
    """ppo-trainer: the loop, the optimiser, evaluation and checkpoints."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the policy is updated; `auto`: on a GPU where there is one."""
    port: int = Field(8004, ge=1, le=65535)
    """Serves weight versions to the rollout nodes, and health and metrics."""
    max_requests: int = Field(1024, gt=0)
    """Requests in work at once there, more are answered 503. A rollout node has two: it waits for news, and downloads."""
    num_epochs: int = Field(3, gt=0)
    """Passes over the training prompts."""
    batch_size: int = Field(4, gt=0)
    """Prompts per step; each becomes one group of `sampling.group_size` completions."""
    max_steps: int | None = Field(None, gt=0)
    """End after this many steps even if epochs remain."""
    max_staleness: int = Field(0, ge=0)
    """How many weight versions old an experience may be when it is trained on; 0 is on-policy."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """`muon`: hidden matrices by Muon, its step scaled so that learning_rate means the same; the rest by AdamW."""
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
    """Tokens that one forward and backward pass computes, padding included; a prompt that a packed pass shares counts once."""
    micro_batch_size: int | None = Field(None, gt=0)
    """Completions of one forward and backward pass, at most; unset: as many as `micro_batch_tokens` has room for."""
    packing: Literal["auto", "on", "off"] = "auto"
    """Compute completions without padding and each prompt once for its group, also in the critic; `auto`: where the model
    permits it."""
    shard_size: int | None = Field(None, gt=0)
    """Ranks that share one copy of the models. Unset: all of them (FSDP). 1: every rank holds a copy. Something between has to
    divide the number of ranks: each so many ranks hold a copy together (HSDP). One process on a CPU always holds all."""
    activation_checkpointing: bool = False
    """Keep what goes into a decoder layer and compute the rest again in the backward pass: less memory, a third more time."""
    compile: bool = False
    """torch.compile for every decoder layer: faster steps after a slow first one. Needs a C++ compiler."""
    offload_optimizer: bool = False
    """Keep parameters, gradients and optimiser state in CPU memory, where the optimiser then steps. For sharded models."""
    offload_reference: bool = False
    """Keep the reference model in CPU memory while it is not used."""
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
    """So many of the newest stay."""
    keep_best: bool = True
    """The checkpoint with the best accuracy of an evaluation at its very step stays too; the link `best` names it."""
    keep_groups_mb: int = Field(4096, ge=0)
    """Megabytes of `run_dir/groups`, where every group that was trained on or dropped is kept in full for the rollout viewer;
    those of the oldest steps leave first. 0: none are kept."""
    resume: bool = True
    """Go on from the newest checkpoint in `run_dir`, if there is one. Without it earlier checkpoints are set aside."""
    run_dir: Path | None = None
    """Where configuration, metrics, samples, curves and checkpoints go; `runs/<group name>` when unset."""
    wait_timeout_s: float = Field(1800.0, gt=0)
    """Seconds to wait for the other tasks to become healthy, or for a batch, before giving up with the reason."""
    service_timeout_s: float = Field(600.0, gt=0)
    """Seconds one call to a service may take, retries included: longer than it takes to restart its pod."""
    weight_sync: Literal["http", "shared", "distributed"] = "http"
    """How new weights reach the engines. `http`: every rollout node downloads files. `shared`: it reads them where the trainer
    wrote them (`run_dir` on a volume that all nodes mount at the same path). `distributed`: the tensors are broadcast into the
    running engines by torch.distributed, NCCL between GPUs and gloo otherwise. Whoever cannot takes the files over HTTP."""
    publish_timeout_s: float = Field(600.0, gt=0)
    """Seconds for every rollout node to confirm a weight version; one that does not is fenced from traffic."""
    lost_after_s: float = Field(45.0, gt=0)
    """Seconds of silence after which a trainer process is lost and the others end with its name, to be started again."""
    stall_dump_s: float = Field(600.0, gt=0)
    """Seconds without a step forward in the training loop after which every rank logs where it is, with all stacks, and again
    after twice as long. Nothing is ended by it."""
    max_failed_groups: int = Field(64, gt=0)
    """Stop after this many groups in a row were dropped because of errors."""
    num_threads: int | None = Field(None, gt=0)
    """CPU threads of one trainer process; torch decides when unset."""


class TrackersSection(Section):
    """Experiment trackers: they get what `metrics.jsonl` gets, and never hold up a step (docs/how-to/trackers.md)."""

    names: list[TrackerName] = []
    """`tensorboard`, `wandb`, `mlflow`, `trackio`, or the import path `package.module:Class` of one's own."""
    project: str = Field("rlhf-math", min_length=1)
    """Project of wandb and trackio, experiment of mlflow."""
    run_name: str = ""
    """Name of the run there; the name of its directory when empty."""
    wandb_mode: Literal["online", "offline"] = "online"
    """`online` needs WANDB_API_KEY in the environment; `offline` writes into the run directory, for `wandb sync`."""
    mlflow_uri: str = ""
    """Tracking server of mlflow. Empty: MLFLOW_TRACKING_URI of the environment, or else an SQLite file in the run directory."""
    sample_every: int = Field(10, ge=0)
    """Steps from one table of samples to the next, each the completions of one group; 0: no tables."""
    flush_timeout_s: float = Field(60.0, gt=0)
    """Seconds for what is still on its way to the trackers when the run ends; then it is lost, and said to be."""

    def unread(self) -> dict[str, str]:
        """Settings that no tracker in use reads, and why."""
        if not self.names:
            return dict.fromkeys((name for name in type(self).model_fields if name != "names"), "trackers.names is empty")
        needed = {"wandb_mode": "wandb", "mlflow_uri": "mlflow"}
        return {name: f"trackers.names has no {one}" for name, one in needed.items() if one not in self.names}

    @model_validator(mode="after")
    def _no_secrets(self) -> "TrackersSection":
        if "@" in self.mlflow_uri.partition("://")[2].partition("/")[0]:
            raise ValueError(
                "mlflow_uri has credentials, and a run saves its settings: put them into MLFLOW_TRACKING_USERNAME and "
                "MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN, instead"
            )
        return self
