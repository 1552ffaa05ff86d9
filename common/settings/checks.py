"""Checks that settings fit one another."""

import re
from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter

from common.errors import Refused
from common.settings.algorithm import LOSSES, TURN_ADVANTAGES, AlgorithmSection, preset
from common.settings.lr_schedules import Conflict, wrong_arguments
from common.settings.rewards import JudgeReward, ModelReward, OwnReward
from common.settings.sections import DATA_PARALLEL, MAX_KEPT
from common.settings.settings import Settings

# Settings that apply to single completions and not to episodes.
_OF_COMPLETIONS = (
    "sampling.top_p",
    "sampling.top_k",
    "sampling.min_p",
    "sampling.stop",
    "sampling.stop_token_ids",
    "sampling.min_new_tokens",
    "sampling.ignore_eos",
    "sampling.prefill",
    "evaluation.top_p",
    "evaluation.top_k",
    "evaluation.min_p",
    "data.prompt_template",
)
# Settings that, once they are set, need single completions.
_SINGLE = (
    "teacher.url",
    "algorithm.overlong_buffer",
    "algorithm.length_penalty",
    "trainer.routing_replay",
)
# SGLang arguments for kernels that choose the experts themselves, and that arrange the weights of
# the experts in another way (of 0.5.21). A B200 may run them.
_OWN_KERNELS = re.compile(
    r"--moe-runner-backend[= ](triton_kernel|flashinfer_trtllm|flashinfer_mxfp4)\b"
)
# SGLang arguments that spread an engine over nodes.
_SEVERAL_NODES = frozenset({"--nnodes", "--node-rank", "--dist-init-addr", "--nccl-init-addr"})
# SGLang arguments that do not go with `trainer.weight_sync distributed`, by the reason.
_NOT_WITH_BROADCASTS = {
    "the ranks of an engine must be those of rollout.tensor_parallel_size": (
        "--tp",
        "--tp-size",
        "--tensor-parallel-size",
        "--pp",
        "--pp-size",
        "--pipeline-parallel-size",
    ),
    "the trainer compares every rank's share of the weights, and does not know those that this "
    "makes": (
        "--moe-dp-size",
        "--moe-data-parallel-size",
        "--dwdp-size",
        "--moe-a2a-backend",
        "--enable-eplb",
        "--ep-num-redundant-experts",
        "--init-expert-location",
        "--attn-cp-size",
        "--attention-context-parallel-size",
        "--moe-dense-tp-size",
    ),
    "the engine must hold the numbers that it is sent, and a quantised engine does not": (
        "--quantization",
        "--modelopt-quant",
        "--quantize-and-serve",
        "--rl-quant-profile",
    ),
}
# SGLang fuses these layers: an adapter that has one of the values must have the key too.
_FUSED = {
    "q_proj": ("k_proj", "v_proj"),
    "v_proj": ("q_proj",),
    "gate_proj": ("up_proj",),
    "q_a_proj": ("kv_a_proj_with_mqa",),
    "kv_a_proj_with_mqa": ("q_a_proj",),
}
# Layers for which SGLang 0.5.21 has adapters (`sglang/srt/lora/utils.py`).
_ADAPTED = {
    *("q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj", "out_proj"),
    *("gate_proj", "up_proj", "gate_up_proj", "down_proj"),
    *("q_a_proj", "kv_a_proj_with_mqa", "q_b_proj", "kv_b_proj"),
    *("in_proj", "in_proj_qkvz", "lm_head"),
}
_NAME = re.compile(r"\{([a-z0-9_.]+)(!?)\}")
"""A setting in the text of a conflict: `{name}` stands for its name and value, `{name!}` for the
name alone. So a refusal knows which settings it names."""


def check(config: Settings) -> None:
    """Raises Refused for settings that contradict one another, or that another setting makes
    pointless. The message names the settings and their values.
    """

    def shown(match: re.Match[str]) -> str:
        setting, is_alone = match.groups()
        value = attrgetter(setting)(config)
        text = f"{value:g}" if isinstance(value, float) else value
        return setting if is_alone else f"{setting} {text}"

    def refusal(reason: str, remedy: str) -> Refused:
        named = [setting for setting, _ in _NAME.findall(f"{reason} {remedy}")]
        return Refused(_NAME.sub(shown, reason), _NAME.sub(shown, remedy), *named)

    for is_conflict, reason, remedy in _conflicts(config):
        if is_conflict:
            raise refusal(reason, remedy)
    # What a recipe sets is no mistake of the user's.
    presets = {"algorithm": preset(config.algorithm.model_dump())}
    for is_pointless, names, reason in _unread(config):
        for name in names if is_pointless else ():
            section, _, field = name.partition(".")
            holder = getattr(config, section)
            default = type(holder).model_fields[field].default
            if getattr(holder, field) != presets.get(section, {}).get(field, default):
                raise refusal(f"{{{name}!}} is set but not read, since {reason}", "leave it out")


def _conflicts(config: Settings) -> Iterator[Conflict]:
    """Yields whether settings contradict one another, the reason, and the remedy. The first setting
    that a reason has in braces (`_NAME`) is the one that the error is about.
    """
    sampling = config.sampling
    algorithm = config.algorithm
    embedded = config.rollout.engine == "embedded"
    room = config.rollout.max_context_tokens
    trainer = config.trainer
    completions = trainer.batch_size * sampling.group_size
    in_flight = (trainer.max_staleness + 1) * completions
    truncated = next(iter(sampling.truncation()), "")
    yield from [
        (
            embedded and sampling.max_new_tokens >= room,
            "{sampling.max_new_tokens} leaves no room for a prompt in {rollout.max_context_tokens}",
            "lower {sampling.max_new_tokens!} or raise {rollout.max_context_tokens!}",
        ),
        (
            algorithm.overlong_buffer >= sampling.max_new_tokens,
            "{algorithm.overlong_buffer} is not below {sampling.max_new_tokens}",
            "lower {algorithm.overlong_buffer!}",
        ),
        (
            sampling.group_size == 1 and algorithm.advantage not in ("gae", "none"),
            "{algorithm.advantage} compares the completions of a group, but {sampling.group_size!} "
            "is 1",
            "raise {sampling.group_size!}, or use a critic ({algorithm.name!} ppo)",
        ),
        (
            algorithm.advantage == "none" and not config.teacher.url,
            "{algorithm.advantage} learns only from a teacher, and {teacher.url!} is empty",
            "set {teacher.url!}, or use another {algorithm.advantage!}",
        ),
        (
            algorithm.kl_coef and algorithm.kl_in == "reward" and algorithm.kl_estimator != "k1",
            "{algorithm.kl_estimator} with {algorithm.kl_in}, where only k1, the log ratio, "
            "has the gradient of the KL divergence, and the others can push the policy away from "
            "the reference",
            "use k1, or {algorithm.kl_in!} loss",
        ),
        (
            algorithm.kl_coef and algorithm.kl_in == "loss" and algorithm.kl_estimator == "k1",
            "{algorithm.kl_estimator} with {algorithm.kl_in} has an expected gradient of 0",
            "use k2 (the gradient of KL(policy ‖ reference)) or k3 (of KL(reference ‖ policy)), "
            "or {algorithm.kl_in!} reward",
        ),
        (
            config.teacher.url and truncated,
            f"{{sampling.{truncated}!}} removes tokens from the policy's distribution, so that its "
            "log-probabilities cannot be compared with the teacher's",
            "leave it out, or leave {teacher.url!} empty",
        ),
        (
            algorithm.mini_batches > completions,
            f"{{algorithm.mini_batches}} is more than the {completions} completions of a batch",
            "lower it",
        ),
        (
            trainer.audit and not trainer.keep_groups_mb,
            "{trainer.audit} needs the groups of every step, and {trainer.keep_groups_mb} "
            "keeps none",
            "raise it, or leave {trainer.audit!} out",
        ),
        (
            in_flight > config.replay.capacity,
            "({trainer.max_staleness!} + 1) × {trainer.batch_size!} × {sampling.group_size!} = "
            f"{in_flight} completions do not fit in {{replay.capacity}}",
            "raise {replay.capacity!} or lower one of the three others",
        ),
    ]
    yield from wrong_arguments(
        config.optimizer.lr_schedule,
        config.optimizer.lr_schedule_args,
        learning_rate=config.optimizer.learning_rate,
    )
    if algorithm.advantage == "reward_normalised":
        yield from _gdpo(config)
    if not embedded:
        yield from _engine_args(config)
    if config.rollout.nodes_per_engine > 1:
        yield from _several_nodes(config)
    yield from _sampling(config)
    yield from _lora(config)
    if config.rollout.colocate:
        yield from _colocate(config)
    if config.environment.name:
        yield from _environment(config)
    if config.reproducible:
        yield from _reproducible(config)


def _engine_args(config: Settings) -> Iterator[Conflict]:
    """Refuses arguments of SGLang with which weights would not arrive, or could not be compared."""
    rollout = config.rollout
    given = {word.partition("=")[0] for word in rollout.engine_args}
    for word in sorted(given & _SEVERAL_NODES):
        yield (
            True,
            f"{{rollout.engine_args!}} has {word}, which every node of an engine gets with a value "
            "of its own",
            "leave it out, and set {rollout.nodes_per_engine!}",
        )
    distributed = config.trainer.weight_sync == "distributed"
    yield (
        distributed and rollout.copies_per_engine > 1,
        f"{{rollout.engine_args!}} has {next(iter(given.intersection(DATA_PARALLEL)), '')}, "
        "but with {trainer.weight_sync} an engine that has several copies of the model takes no "
        "weights",
        "leave it out, since the router already shares requests among engines, add "
        "--enable-dp-attention, or set {trainer.weight_sync!} http",
    )
    for name, groups in (
        ("--ep-size", rollout.expert_groups),
        ("--dp-size", rollout.attention_groups),
    ):
        yield (
            distributed and rollout.tensor_parallel_size % groups,
            f"{{rollout.engine_args!}} has {name} {groups}, which does not divide "
            "{rollout.tensor_parallel_size}",
            "set {rollout.tensor_parallel_size!} to a multiple of it",
        )
    for kernels in _OWN_KERNELS.findall(" ".join(rollout.engine_args)):
        yield (
            distributed,
            f"{{rollout.engine_args!}} has --moe-runner-backend {kernels}, whose kernels arrange "
            "the experts in another way than they are sent, but with {trainer.weight_sync} the "
            "trainer compares their checksums",
            "leave it out, name triton, or set {trainer.weight_sync!} http",
        )
        yield (
            config.trainer.routing_replay,
            "{trainer.routing_replay} requires that SGLang reports the experts of every token, and "
            f"its kernels {kernels} do not record them",
            "leave --moe-runner-backend out of {rollout.engine_args}, or name triton",
        )
    if distributed:
        for reason, refused in _NOT_WITH_BROADCASTS.items():
            for word in sorted(given.intersection(refused)):
                yield (
                    True,
                    f"{{rollout.engine_args!}} has {word}, but with {{trainer.weight_sync}} "
                    f"{reason}",
                    "leave it out, or set {trainer.weight_sync!} http",
                )


def _several_nodes(config: Settings) -> Iterator[Conflict]:
    """Refuses what does not go with an engine that is larger than a node."""
    rollout = config.rollout
    yield from [
        (
            rollout.engine == "embedded",
            "{rollout.nodes_per_engine} needs an engine of several processes, and "
            "{rollout.engine!} embedded is one",
            "set {rollout.engine!} sglang, or leave {rollout.nodes_per_engine!} out",
        ),
        (
            rollout.gpus_per_engine % rollout.nodes_per_engine,
            f"the {rollout.gpus_per_engine} processes of an engine cannot be divided among "
            "{rollout.nodes_per_engine}",
            "set {rollout.tensor_parallel_size!} to a multiple of it",
        ),
        (
            rollout.colocate,
            "{rollout.nodes_per_engine} spreads an engine over nodes, but with {rollout.colocate!} "
            "trainer and engine share the GPUs of one",
            "set {rollout.colocate!} to false",
        ),
        (
            rollout.copies_per_engine > 1,
            f"{{rollout.engine_args!}} makes {rollout.copies_per_engine} copies of the model in "
            "one engine, which SGLang cannot spread over {rollout.nodes_per_engine}",
            "leave it out, since the router already shares requests among engines, or add "
            "--enable-dp-attention",
        ),
    ]


def _gdpo(config: Settings) -> Iterator[Conflict]:
    """Refuses settings that change only the sum of the rewards, when each reward is normalised
    separately.
    """
    yield from [
        (
            config.reward.require_stop,
            "{reward.require_stop!} changes only the sum of the rewards, and {algorithm.advantage} "
            "normalises each reward separately",
            "set {reward.require_stop!} to false and {algorithm.mask_truncated!} to true",
        ),
        (
            config.algorithm.kl_coef and config.algorithm.kl_in == "reward",
            "{algorithm.kl_in} changes only the sum of the rewards, and {algorithm.advantage} "
            "normalises each reward separately",
            "set {algorithm.kl_in!} loss",
        ),
    ]
    for entry in config.reward.functions:
        yield (
            isinstance(entry, OwnReward) and entry.weight != 1,
            f"{{reward.functions!}} weights {entry.name}, whose scores have the function's own "
            "name rather than its import path, and {algorithm.advantage} weights scores by name",
            "remove this weight, which is then 1",
        )


def _sampling(config: Settings) -> Iterator[Conflict]:
    sampling = config.sampling
    evaluation = config.evaluation
    rollout = config.rollout
    truncated = next(iter(sampling.truncation()), "")
    longest = evaluation.max_new_tokens or 0
    replays = config.trainer.routing_replay
    # It removes the fields of a request that it does not know.
    drops_fields = rollout.engine == "sglang" and rollout.router == "sglang-router"
    yield from [
        (
            sampling.min_new_tokens > sampling.max_new_tokens,
            "{sampling.min_new_tokens} is above {sampling.max_new_tokens}",
            "lower it",
        ),
        (
            rollout.engine == "embedded" and longest >= rollout.max_context_tokens,
            "{evaluation.max_new_tokens} leaves no room for a prompt in "
            "{rollout.max_context_tokens}",
            "lower {evaluation.max_new_tokens!} or raise {rollout.max_context_tokens!}",
        ),
        (
            evaluation.n > 1 and evaluation.temperature == 0,
            "{evaluation.n} is of no use, since greedy answers are all the same",
            "set {evaluation.temperature!}",
        ),
        (
            (sampling.top_k or 0) > MAX_KEPT,
            f"{{sampling.top_k}} is above {MAX_KEPT}, the largest number of candidates that "
            "training can record for a sampled token",
            "lower it, or leave it unset and set {evaluation.top_k!}",
        ),
        (
            truncated and drops_fields,
            f"{{sampling.{truncated}!}} requires that SGLang reports the candidates of every "
            "token, and {rollout.router} removes that field from requests",
            f"leave {{rollout.router!}} out, or set it only for evaluations "
            f"({{evaluation.{truncated}!}})",
        ),
        (
            replays and drops_fields,
            "{trainer.routing_replay} requires that SGLang reports the experts of every token, "
            "and {rollout.router} removes that field from requests",
            "leave {rollout.router!} or {trainer.routing_replay!} out",
        ),
    ]


def _colocate(config: Settings) -> Iterator[Conflict]:
    yield from [
        (
            config.trainer.max_staleness,
            "{trainer.max_staleness} lets the engines generate during the update, but with "
            "{rollout.colocate!} they take turns on the same GPUs",
            "set {trainer.max_staleness!} to 0, or {rollout.colocate!} to false",
        ),
        (
            config.trainer.weight_sync == "distributed",
            "{trainer.weight_sync} needs the GPUs of the trainer and of the engines at once, "
            "but with {rollout.colocate!} they take turns on the same GPUs",
            "set {trainer.weight_sync!} to http or shared",
        ),
        (
            config.rollout.engine == "sglang" and config.rollout.device == "cpu",
            "{rollout.device} leaves no GPU to share, and SGLang can release only the memory of "
            "GPUs",
            "set {rollout.colocate!} to false, or {rollout.engine!} embedded",
        ),
    ]


def _environment(config: Settings) -> Iterator[Conflict]:
    """Refuses settings that apply only to single completions."""
    environment = config.environment
    advantage = config.algorithm.advantage
    min_episodes = environment.min_episodes
    yield from [
        (
            config.algorithm.needs_critic,
            "{algorithm.advantage} needs a critic, which values single completions, and "
            "{environment.name!} makes episodes",
            "use another algorithm, such as grpo",
        ),
        (
            environment.tool_timeout_s is not None and environment.kind == "agent",
            "{environment.tool_timeout_s} cannot end the tools of a program, which "
            "{environment.name!} starts",
            "leave it out, and end them in the program",
        ),
        (
            min_episodes is not None and min_episodes > config.sampling.group_size,
            "{environment.min_episodes} is more than {sampling.group_size}, the episodes of a "
            "group",
            "lower {environment.min_episodes!}",
        ),
        (
            environment.turn_discount is not None and advantage not in TURN_ADVANTAGES,
            "{algorithm.advantage} does not compare single turns",
            f"leave {{environment.turn_discount!}} out, or use one of {', '.join(TURN_ADVANTAGES)}",
        ),
    ]
    needs_single = [
        *(name for name in _SINGLE if attrgetter(name)(config)),
        *(["algorithm.advantage"] if advantage == "reward_normalised" else []),
    ]
    for name in needs_single:
        yield (
            True,
            f"{{{name}}} needs single completions, but {{environment.name!}} makes episodes",
            "leave it out",
        )


def _reproducible(config: Settings) -> Iterator[Conflict]:
    """Refuses settings with which two runs differ."""
    yield from [
        (
            config.rollout.engine == "sglang" and config.rollout.device == "cpu",
            "reproducible needs an attention backend that is deterministic, and SGLang has none "
            "for {rollout.device}",
            "set {rollout.engine!} embedded, or reproducible false",
        ),
        (
            config.trainer.routing_replay,
            "a reproducible engine does not record the experts that {trainer.routing_replay} "
            "replays",
            "leave one of the two out",
        ),
        (
            config.environment.kind not in ("", "python"),
            "reproducible cannot order the calls of a program, which {environment.name} starts",
            "use an environment class (python:package.module:Class), or set reproducible false",
        ),
        (
            config.teacher.url,
            "reproducible cannot say how {teacher.url}, another server, rounds its scores",
            "leave {teacher.url!} empty, or set reproducible false",
        ),
    ]
    for entry in config.reward.functions:
        yield (
            isinstance(entry, ModelReward | JudgeReward),
            "reproducible needs rewards that depend on nothing but the answer, and "
            f"{{reward.functions!}} has {entry.name}, whose scores vary with the answers that "
            "are graded beside it",
            "leave it out, or set reproducible false",
        )
    if config.trainer.max_staleness == 0:
        return
    yield from [
        (
            config.trainer.when_stale != "wait",
            "{trainer.when_stale} trains on the groups that are ready first, and with "
            "reproducible the order must not depend on time",
            "set {trainer.when_stale!} wait",
        ),
        (
            config.algorithm.dynamic_sampling,
            "{algorithm.dynamic_sampling} draws other prompts while weights are on their way, "
            "and with reproducible their version must not depend on time",
            "set {trainer.max_staleness!} 0",
        ),
        (
            config.replay.reuse_ratio,
            "{replay.reuse_ratio} draws from a buffer that is filled meanwhile, and with "
            "reproducible the draw must not depend on time",
            "set {trainer.max_staleness!} 0",
        ),
        (
            config.data.curriculum != "none",
            "{data.curriculum} draws prompts while pass rates are on their way, and with "
            "reproducible the choice must not depend on time",
            "set {trainer.max_staleness!} 0",
        ),
    ]


def _lora(config: Settings) -> Iterator[Conflict]:
    """Refuses settings that contradict LoRA."""
    yield (
        config.lora.rank and config.algorithm.reference_refresh,
        "{algorithm.reference_refresh} with {lora.rank!}, where the reference is the frozen "
        "model, which never changes",
        "leave it at 0",
    )
    if not config.lora.publishes_adapter:
        return
    yield (
        config.trainer.weight_sync == "distributed",
        "{trainer.weight_sync} broadcasts a whole model, and {lora.publish} is not one",
        "set {lora.publish!} merged, or {trainer.weight_sync!} http (or shared), which sends "
        "the adapter's two small files",
    )
    problem = unloadable_adapter(config.lora.target_modules)
    yield (
        problem and config.rollout.engine == "sglang",
        f"{{lora.target_modules!}} {problem}",
        "name other layers, or set {lora.publish!} merged",
    )


def without_adapters(layers: Iterable[str]) -> list[str]:
    """Returns the names of layers for which SGLang has no adapters."""
    return sorted(set(layers) - _ADAPTED)


def unloadable_adapter(layers: Iterable[str]) -> str:
    """Returns why SGLang would not load an adapter of layers with these names; empty if it does."""
    named = set(layers)
    for needed, beside in _FUSED.items():
        alone = named.intersection(beside)
        if alone and needed not in named:
            return (
                f"has {', '.join(sorted(alone))} without {needed}, and SGLang, which fuses these "
                "layers, would drop it"
            )
    unknown = without_adapters(named)
    return f"has {', '.join(unknown)}, for which SGLang has no adapters" if unknown else ""


def _all(config: Settings, section: str, but: tuple[str, ...] = ()) -> list[str]:
    """Returns the names of a section's settings, except `but`."""
    fields = type(getattr(config, section)).model_fields
    return [f"{section}.{field}" for field in fields if field not in but]


def _unread(config: Settings) -> list[tuple[bool, Sequence[str], str]]:
    """Returns rows of three: whether the settings in the second place have no effect, these
    settings, and the reason, in which `{name}` stands for a setting and its value.
    """
    data = config.data
    of_columns = ("prompt_field", "answer_field", "messages_field", "columns", "task_field", "map")
    makes_episodes = bool(config.environment.name)
    known_columns = "the columns of {data.source} are known"
    rows: list[tuple[bool, Sequence[str], str]] = [
        (data.is_built_in, ("data.hub_config",), known_columns),
        (
            data.is_built_in or data.is_math,
            [f"data.{name}" for name in of_columns],
            known_columns,
        ),
        (not data.is_math, ("data.levels", "data.subjects"), "{data.source} is not math"),
        (bool(data.messages_field), ("data.prompt_field",), "{data.messages_field!} is set"),
        (
            bool(data.prompt_template) and not config.model.chat_template,
            ("sampling.system_prompt", "sampling.chat_template_kwargs"),
            "{data.prompt_template!} replaces the chat template, unless {model.chat_template!} is "
            "set",
        ),
        (
            not config.teacher.url,
            _all(config, "teacher", ("url",)),
            "{teacher.url!} is empty",
        ),
        (
            not config.teacher.is_openai,
            ("teacher.model",),
            "{teacher.url!} does not end with /v1, and an engine without /v1 serves only one model",
        ),
        (
            not config.trackers.names,
            _all(config, "trackers", ("names",)),
            "{trackers.names!} is empty",
        ),
        (
            makes_episodes,
            _OF_COMPLETIONS,
            "it applies to single completions and {environment.name!} makes episodes",
        ),
        (
            not makes_episodes,
            # A port may be set once for all runs.
            _all(config, "environment", ("name", "port")),
            "{environment.name!} is empty",
        ),
        (
            config.environment.kind not in ("agent", "harbor"),
            _all(config, "runtime"),
            "{environment.name!} starts no agent:COMMAND or harbor:COMMAND",
        ),
        (
            not config.algorithm.needs_critic,
            _all(config, "critic"),
            "{algorithm.advantage} has no critic",
        ),
        (config.model.dtype == "float32", ("model.fp32_head",), "{model.dtype!} is float32"),
        (
            config.algorithm.kl_coef == 0,
            ("model.reference", "parallel.offload_reference"),
            "{algorithm.kl_coef!} is 0",
        ),
        (
            config.sampling.ignore_eos,
            ("sampling.min_new_tokens", "sampling.stop_token_ids"),
            "{sampling.ignore_eos!} is set",
        ),
        (
            config.evaluation.samples == 0,
            _all(config, "evaluation", ("samples", "every", "pass_samples")),
            "{evaluation.samples!} is 0",
        ),
        (config.lora.rank == 0, _all(config, "lora"), "{lora.rank!} is 0"),
        (
            config.lora.rank > 0 and not config.model.reference,
            ("parallel.offload_reference",),
            "with {lora.rank!} the reference is the policy's own frozen model, not a second model",
        ),
        (
            config.trainer.max_staleness == 0,
            ("trainer.when_stale",),
            "{trainer.max_staleness!} is 0",
        ),
        (
            config.replay.reuse_ratio == 0,
            ("replay.priority", "replay.max_times_sampled", "replay.max_reuse_staleness"),
            "{replay.reuse_ratio!} is 0",
        ),
    ]
    return _unread_of_algorithm(config.algorithm) + rows


def _unread_of_algorithm(algorithm: AlgorithmSection) -> list[tuple[bool, Sequence[str], str]]:
    built_in_loss = algorithm.policy_loss in LOSSES
    is_sapo = algorithm.policy_loss == "sapo"
    asks_engine = algorithm.old_logprobs == "engine"
    return [
        (
            # A function of the user may read any setting.
            ":" not in algorithm.advantage
            and algorithm.advantage not in ("group_normalised", "reward_normalised"),
            ("algorithm.advantage_eps",),
            "{algorithm.advantage} does not divide by a standard deviation",
        ),
        (
            algorithm.advantage != "gae",
            ("algorithm.gamma", "algorithm.gae_lambda"),
            "{algorithm.advantage} is not gae",
        ),
        (
            algorithm.advantage == "none",
            (
                "algorithm.dynamic_sampling",
                "algorithm.overlong_buffer",
                "algorithm.length_penalty",
            ),
            "with {algorithm.advantage} the rewards are not used",
        ),
        (
            built_in_loss and algorithm.policy_loss != "clip",
            ("algorithm.dual_clip",),
            "{algorithm.policy_loss} is not clip",
        ),
        (
            is_sapo,
            ("algorithm.clip_low", "algorithm.clip_high"),
            "{algorithm.policy_loss} clips nothing",
        ),
        (
            built_in_loss and not is_sapo,
            ("algorithm.sapo_tau_positive", "algorithm.sapo_tau_negative"),
            "{algorithm.policy_loss} is not sapo",
        ),
        (
            algorithm.updates_per_batch == 1,
            ("algorithm.early_stop_kl",),
            "{algorithm.update_epochs!} and mini_batches are 1",
        ),
        (
            algorithm.kl_coef == 0,
            [
                f"algorithm.{name}"
                for name in ("kl_in", "kl_estimator", "kl_target", "reference_refresh")
            ],
            "{algorithm.kl_coef!} is 0, so there is no reference model",
        ),
        (
            not algorithm.dynamic_sampling,
            ("algorithm.dynamic_sampling_rounds",),
            "{algorithm.dynamic_sampling!} is off",
        ),
        (
            algorithm.rollout_correction == "none",
            ("algorithm.correction_cap", "algorithm.correction_floor"),
            "{algorithm.rollout_correction!} is none, or auto with {trainer.max_staleness!} 0 and "
            "engines on CPUs",
        ),
        (
            algorithm.rollout_correction != "mask",
            ("algorithm.correction_floor",),
            "{algorithm.rollout_correction} is not mask",
        ),
        (
            asks_engine and algorithm.rejects,
            ("algorithm.old_logprobs",),
            "{algorithm.geometric_low!} and geometric_high always use the trainer's own",
        ),
        (
            asks_engine and algorithm.correction is not None,
            ("algorithm.old_logprobs",),
            "{algorithm.rollout_correction} is set",
        ),
    ]
