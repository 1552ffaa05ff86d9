"""Checks that settings fit one another."""

from common.settings.algorithm import CORRECTION, TURN_ADVANTAGES
from common.settings.sections import MAX_KEPT, CriticSection, EvaluationSection, LoraSection
from common.settings.settings import Settings

_SINGLE_SAMPLING = (
    "top_p",
    "top_k",
    "min_p",
    "stop",
    "stop_token_ids",
    "min_new_tokens",
    "ignore_eos",
    "chat_template_kwargs",
    "prefill",
    "completion_timeout_s",
    "max_thinking_tokens",
)
"""Settings of `sampling` that do not apply to episodes."""
_SEVERAL_NODES = frozenset({"--nnodes", "--node-rank"})
"""SGLang arguments that spread an engine over nodes."""
_RANKS = frozenset(
    {
        "--tp",
        "--tp-size",
        "--tensor-parallel-size",
        "--dp",
        "--dp-size",
        "--data-parallel-size",
        "--pp",
        "--pp-size",
        "--pipeline-parallel-size",
    }
)
"""SGLang arguments that change the number of ranks of an engine; a data-parallel engine refuses a
weight-sync group."""
_SHARES = frozenset(
    {
        "--ep",
        "--ep-size",
        "--expert-parallel-size",
        "--moe-dp-size",
        "--moe-data-parallel-size",
        "--dwdp-size",
        "--moe-a2a-backend",
        "--enable-eplb",
        "--ep-num-redundant-experts",
        "--init-expert-location",
        "--attn-cp-size",
        "--attention-context-parallel-size",
        "--enable-dp-attention",
    }
)
"""SGLang arguments that give a rank another share of the weights than tensor parallelism does."""
_PRECISION = frozenset(
    {"--quantization", "--modelopt-quant", "--quantize-and-serve", "--rl-quant-profile"}
)
"""SGLang arguments that make it hold other numbers than it gets."""


def check(config: Settings) -> None:
    """Raises ValueError for settings that contradict one another, or that another setting makes
    pointless.

    The message names the settings, their values and the remedy.
    """
    if (
        config.rollout.engine == "embedded"
        and config.sampling.max_new_tokens >= config.rollout.max_context_tokens
    ):
        raise ValueError(
            f"sampling.max_new_tokens {config.sampling.max_new_tokens} leaves no room for a "
            f"prompt in rollout.max_context_tokens {config.rollout.max_context_tokens}: lower "
            "sampling.max_new_tokens or raise rollout.max_context_tokens"
        )
    if config.algorithm.overlong_buffer >= config.sampling.max_new_tokens:
        raise ValueError(
            f"algorithm.overlong_buffer {config.algorithm.overlong_buffer} is not below "
            f"sampling.max_new_tokens {config.sampling.max_new_tokens}: lower "
            "algorithm.overlong_buffer"
        )
    if config.sampling.group_size == 1 and config.algorithm.advantage not in ("gae", "none"):
        raise ValueError(
            f"algorithm.advantage {config.algorithm.advantage} compares the completions of a "
            "group, but sampling.group_size is 1: raise sampling.group_size, or use a critic "
            "(algorithm.name ppo)"
        )
    if config.algorithm.advantage == "none" and not config.teacher.url:
        raise ValueError(
            "algorithm.advantage none learns only from a teacher, and teacher.url is empty: set "
            "teacher.url, or use another algorithm.advantage"
        )
    if config.algorithm.advantage == "reward_normalised":
        _check_gdpo(config)
    if config.teacher.url and config.sampling.truncation():
        raise ValueError(
            f"sampling.{next(iter(config.sampling.truncation()))} removes tokens from the "
            "policy's distribution, so that its log-probabilities cannot be compared with the "
            "teacher's: leave it out, or leave teacher.url empty"
        )
    completions = config.trainer.batch_size * config.sampling.group_size
    if config.algorithm.mini_batches > completions:
        raise ValueError(
            f"algorithm.mini_batches {config.algorithm.mini_batches} is more than the "
            f"{completions} completions of a batch: lower it"
        )
    if config.rollout.engine == "sglang":
        _check_engine_args(config)
    _check_sampling(config)
    _check_lora(config)
    _check_colocate(config)
    _check_environment(config)
    for name, reason in _unread(config).items():
        section, _, field = name.partition(".")
        holder = getattr(config, section)
        if getattr(holder, field) != type(holder).model_fields[field].default:
            raise ValueError(f"{name} is set but not read, since {reason}: leave it out")
    in_flight = (
        (config.trainer.max_staleness + 1) * config.trainer.batch_size * config.sampling.group_size
    )
    if in_flight > config.replay.capacity:
        raise ValueError(
            "(trainer.max_staleness + 1) × trainer.batch_size × sampling.group_size = "
            f"{in_flight} completions do not fit in replay.capacity {config.replay.capacity}: "
            "raise replay.capacity or lower one of the three others"
        )


def _check_engine_args(config: Settings) -> None:
    """Refuses arguments of SGLang with which weights would not arrive, or could not be compared."""
    given = {word.partition("=")[0] for word in config.rollout.engine_args}
    nodes = given & _SEVERAL_NODES
    if nodes:
        raise ValueError(
            f"rollout.engine_args has {min(nodes)}, but every node of rollout-server runs engines "
            "of its own: leave it out, and set rollout.tensor_parallel_size to at most the GPUs "
            "of a node"
        )
    if config.trainer.weight_sync != "distributed":
        return
    ranks = given & _RANKS
    if ranks:
        raise ValueError(
            f"rollout.engine_args has {min(ranks)}, but with trainer.weight_sync distributed the "
            "ranks of an engine must be its rollout.tensor_parallel_size: set that instead, or "
            "set trainer.weight_sync http"
        )
    shares = given & _SHARES
    if shares:
        raise ValueError(
            f"rollout.engine_args has {min(shares)}, but with trainer.weight_sync distributed the "
            "trainer compares every rank's share of the weights, and knows only those of tensor "
            "parallelism: leave it out, or set trainer.weight_sync http"
        )
    precision = given & _PRECISION
    if precision:
        raise ValueError(
            f"rollout.engine_args has {min(precision)}, but with trainer.weight_sync distributed "
            "the engine must hold the numbers that it is sent, and a quantised engine does not: "
            "leave it out, or set trainer.weight_sync http"
        )


def _check_gdpo(config: Settings) -> None:
    """Refuses settings that change only the sum of the rewards, when each reward is normalised
    separately.
    """
    if config.reward.require_stop:
        raise ValueError(
            "reward.require_stop changes only the sum of the rewards, and algorithm.advantage "
            "reward_normalised normalises each reward separately: set reward.require_stop to "
            "false and algorithm.mask_truncated to true"
        )
    if config.algorithm.kl_coef and config.algorithm.kl_in == "reward":
        raise ValueError(
            "algorithm.kl_in reward changes only the sum of the rewards, and algorithm.advantage "
            "reward_normalised normalises each reward separately: set algorithm.kl_in loss"
        )
    paths = [name for name in config.reward.weights if ":" in name]
    if paths:
        raise ValueError(
            f"reward.weights has {paths[0]}, whose scores have the function's own name rather "
            "than its import path, and algorithm.advantage reward_normalised weights scores by "
            "name: remove this weight, which is then 1"
        )


def _check_sampling(config: Settings) -> None:
    sampling = config.sampling
    evaluation = config.evaluation
    if sampling.min_new_tokens > sampling.max_new_tokens:
        raise ValueError(
            f"sampling.min_new_tokens {sampling.min_new_tokens} is above sampling.max_new_tokens "
            f"{sampling.max_new_tokens}: lower it"
        )
    if (sampling.max_thinking_tokens or 0) >= sampling.max_new_tokens:
        raise ValueError(
            f"sampling.max_thinking_tokens {sampling.max_thinking_tokens} leaves no room for an "
            f"answer in sampling.max_new_tokens {sampling.max_new_tokens}: lower "
            "sampling.max_thinking_tokens"
        )
    if (sampling.completion_timeout_s or 0) > sampling.request_timeout_s:
        raise ValueError(
            f"sampling.completion_timeout_s {sampling.completion_timeout_s:g} is above "
            f"sampling.request_timeout_s {sampling.request_timeout_s:g}, after which the group is "
            "lost: lower it"
        )
    longest = evaluation.max_new_tokens or 0
    room = config.rollout.max_context_tokens
    if config.rollout.engine == "embedded" and longest >= room:
        raise ValueError(
            f"evaluation.max_new_tokens {longest} leaves no room for a prompt in "
            f"rollout.max_context_tokens {room}: lower evaluation.max_new_tokens or raise "
            "rollout.max_context_tokens"
        )
    if evaluation.n > 1 and evaluation.temperature == 0:
        raise ValueError(
            f"evaluation.n is {evaluation.n}, and greedy answers are all the same: set "
            "evaluation.temperature"
        )
    if (sampling.top_k or 0) > MAX_KEPT:
        raise ValueError(
            f"sampling.top_k {sampling.top_k} is above {MAX_KEPT}, the largest number of "
            "candidates that training can record for a sampled token: lower it, or leave it unset "
            "and set evaluation.top_k"
        )
    if (
        sampling.truncation()
        and config.rollout.engine == "sglang"
        and config.rollout.router == "sglang-router"
    ):
        raise ValueError(
            f"sampling.{next(iter(sampling.truncation()))} requires that SGLang reports the "
            "candidates of every token, and rollout.router sglang-router removes that field from "
            "requests: set rollout.router smg, or leave it out here and set it in evaluation"
        )


def _check_colocate(config: Settings) -> None:
    if not config.rollout.colocate:
        return
    if config.trainer.max_staleness:
        raise ValueError(
            f"trainer.max_staleness {config.trainer.max_staleness} lets the engines generate "
            "during the update, but with rollout.colocate they take turns on the same GPUs: set "
            "trainer.max_staleness to 0, or rollout.colocate to false"
        )
    if config.trainer.weight_sync == "distributed":
        raise ValueError(
            "trainer.weight_sync distributed needs the GPUs of the trainer and of the engines at "
            "once, but with rollout.colocate they take turns on the same GPUs: set "
            "trainer.weight_sync to http or shared"
        )
    if config.rollout.engine == "sglang" and config.rollout.device == "cpu":
        raise ValueError(
            "rollout.device cpu leaves no GPU to share, and SGLang can release only the memory of "
            "GPUs: set rollout.colocate to false, or rollout.engine embedded"
        )


def _check_environment(config: Settings) -> None:
    """Refuses settings that apply only to single completions."""
    if not config.environment.name:
        return
    if config.algorithm.needs_critic:
        raise ValueError(
            f"algorithm.advantage {config.algorithm.advantage} needs a critic, which values "
            "single completions, and environment.name makes episodes: use another algorithm, such "
            "as grpo"
        )
    if (
        config.environment.turn_discount is not None
        and config.algorithm.advantage not in TURN_ADVANTAGES
    ):
        raise ValueError(
            f"algorithm.advantage {config.algorithm.advantage} does not compare single turns: "
            f"leave environment.turn_discount out, or use one of {', '.join(TURN_ADVANTAGES)}"
        )
    single = {
        "sampling": _SINGLE_SAMPLING,
        "evaluation": ("top_p", "top_k", "min_p"),
        "data": ("prompt_template",),
    }
    for section, names in single.items():
        holder = getattr(config, section)
        for name in names:
            if getattr(holder, name) != type(holder).model_fields[name].default:
                raise ValueError(
                    f"{section}.{name} applies to single completions, and environment.name makes "
                    "episodes, where it has no effect: leave it out"
                )
    advantage = config.algorithm.advantage
    others = {
        "teacher.url": config.teacher.url,
        "algorithm.overlong_buffer": config.algorithm.overlong_buffer,
        "algorithm.length_penalty": config.algorithm.length_penalty,
        "algorithm.advantage": advantage if advantage == "reward_normalised" else "",
    }
    for setting, value in others.items():
        if value:
            raise ValueError(
                f"{setting} {value} needs single completions, but environment.name makes "
                "episodes: leave it out"
            )


def _check_lora(config: Settings) -> None:
    """Refuses settings that contradict LoRA."""
    if config.lora.rank == 0:
        return
    if config.algorithm.reference_refresh:
        raise ValueError(
            f"algorithm.reference_refresh is {config.algorithm.reference_refresh}, but with "
            "lora.rank the reference is the frozen model, which never changes: leave it at 0"
        )

    if config.trainer.weight_sync == "distributed" and config.lora.publishes_adapter:
        raise ValueError(
            "trainer.weight_sync distributed broadcasts a whole model, and lora.publish is "
            "adapter: set lora.publish merged, or trainer.weight_sync http (or shared), which "
            "sends the adapter's two small files"
        )
    fused = {"q_proj": ("k_proj", "v_proj"), "v_proj": ("q_proj",), "gate_proj": ("up_proj",)}
    named = set(config.lora.target_modules)
    if config.rollout.engine != "sglang" or not config.lora.publishes_adapter:
        return
    for needed, beside in fused.items():
        alone = named.intersection(beside)
        if alone and needed not in named:
            raise ValueError(
                f"lora.target_modules has {', '.join(sorted(alone))} without "
                f"{needed}, and SGLang, which fuses these layers, would drop such an adapter: add "
                f"{needed}, or set lora.publish merged"
            )


def _unread(config: Settings) -> dict[str, str]:
    """Returns the settings that others make pointless, and why."""
    unread = dict[str, str]()
    for section in ("data", "reward", "environment", "teacher", "trackers"):
        own = getattr(config, section).unread()
        unread |= {f"{section}.{name}": reason for name, reason in own.items()}

    if not config.algorithm.needs_critic:
        reason = f"algorithm.advantage {config.algorithm.advantage} has no critic"
        unread |= {f"critic.{name}": reason for name in CriticSection.model_fields}
        del unread["critic.port"]  # a port may be set once for all runs
    if config.model.dtype == "float32":
        unread["model.fp32_head"] = "model.dtype is float32"
    if config.trainer.lr_schedule == "constant":
        unread["trainer.min_lr_share"] = "trainer.lr_schedule is constant"
    if config.algorithm.kl_coef == 0:
        unread |= dict.fromkeys(
            ("model.reference", "trainer.offload_reference"), "algorithm.kl_coef is 0"
        )
    if config.algorithm.rollout_correction == "none":
        reason = (
            "algorithm.rollout_correction is none, or auto with trainer.max_staleness 0 and "
            "engines on CPUs"
        )
        unread |= {f"algorithm.{name}": reason for name in CORRECTION}
    elif config.algorithm.old_logprobs == "engine":
        unread["algorithm.old_logprobs"] = (
            f"algorithm.rollout_correction is {config.algorithm.rollout_correction}"
        )
    if config.algorithm.rejects and config.algorithm.old_logprobs == "engine":
        unread["algorithm.old_logprobs"] = (
            "algorithm.geometric_low and geometric_high always use the trainer's own"
        )
    if config.data.prompt_template and not config.model.chat_template:
        reason = (
            "data.prompt_template replaces the chat template, unless model.chat_template is set"
        )
        unread |= dict.fromkeys(("sampling.system_prompt", "sampling.chat_template_kwargs"), reason)
    if config.sampling.ignore_eos:
        unread |= dict.fromkeys(
            ("sampling.min_new_tokens", "sampling.stop_token_ids"), "sampling.ignore_eos is set"
        )
    if config.trainer.eval_samples == 0:
        unread |= {
            f"evaluation.{name}": "trainer.eval_samples is 0"
            for name in EvaluationSection.model_fields
        }
    if config.lora.rank == 0:
        unread |= {f"lora.{name}": "lora.rank is 0" for name in LoraSection.model_fields}
    elif not config.model.reference:
        unread["trainer.offload_reference"] = (
            "with lora.rank the reference is the policy's own frozen model, not a second model"
        )
    if config.trainer.max_staleness == 0:
        unread["trainer.when_stale"] = "trainer.max_staleness is 0"
    if config.replay.reuse_ratio == 0:
        reuse = ("priority", "max_times_sampled", "max_reuse_staleness", "corrected")
        unread |= {f"replay.{name}": "replay.reuse_ratio is 0" for name in reuse}
    return unread
