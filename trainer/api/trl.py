"""What this trainer does with each of TRL's arguments: it sets a field or a setting, has no effect,
or is refused (docs/how-to/from-trl.md).
"""

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from enum import Enum
from importlib.util import find_spec
from typing import Any

from pydantic.fields import FieldInfo

from common import Json
from common.errors import ConfigError, did_you_mean, shorten
from common.settings.algorithm import RECIPES
from trainer.api.refusals import Given, Names, Refusals
from trainer.trackers.base import LIBRARIES

Values = Json
LOSSES: dict[str, Values] = {
    "grpo": {"aggregation": "sequence_mean_token_mean"},
    "bnpo": {"aggregation": "token_mean"},
    "dapo": {"aggregation": "token_mean"},
    "dr_grpo": {"aggregation": "constant"},
    "luspo": {"aggregation": "sequence_mean_token_sum"},
}
"""Settings of TRL's losses. A recipe of the same name has more settings than its loss."""
_log = logging.getLogger(__name__)


class Effect(Enum):
    """What happens to an argument that is given."""

    USED = "used"
    NONE = "no effect"
    """It asks for what is done anyway, so there is no warning."""
    WARNED = "no effect, with a warning"
    """A warning tells the user."""
    REFUSED = "refused"


@dataclass(frozen=True)
class Argument:
    """What this trainer does with one of TRL's arguments."""

    ours: str = ""
    """The field of TrainerConfig, or the setting `section.name`, that it sets; empty without
    effect."""
    remark: str = ""
    """What differs, why it has no effect, or why it is refused."""
    convert: Callable[[Any], Values | None] | Mapping[Any, Values] | None = None
    """Returns the fields and settings for a value, or has them for each possible value; None for a
    value without effect, which is warned about. Raises `Unsupported`."""
    accepted: tuple[Any, ...] = ()
    """Values that ask for what is done here anyway, besides None, False, 0 and empty ones."""
    effect: Effect = Effect.USED


class NotLogged(ConfigError, KeyError):
    """A number was read that is not there."""

    # That of KeyError shows the text as a literal.
    __str__ = ConfigError.__str__


class NamedNumbers(Values):
    """Numbers of a run, TRL's names among them; reading one that is not there raises NotLogged."""

    def __missing__(self, name: str) -> Any:
        reasons = (why for start, why in _NOT_LOGGED.items() if str(name).startswith(start))
        reason = next(reasons, "")
        raise NotLogged(
            f"this number is not logged here{reason and f': {reason}'}",
            field=name,
            remedy=did_you_mean(str(name), self),
        )


class Unsupported(ValueError):
    """A value that this trainer cannot honour, with the reason."""


def _rows(effect: Effect, names_by_reason: Names) -> dict[str, Argument]:
    """Returns the rows of arguments without a field or setting."""
    return {
        name: Argument(remark=remark, accepted=_ACCEPTED.get(name, ()), effect=effect)
        for remark, names in names_by_reason.items()
        for name in names.split()
    }


def _warmup(value: Any) -> Values:
    return {"warmup_ratio": value} if 0 < value < 1 else {"warmup_steps": value}


def _report(value: Any) -> Values:
    names = [value] if isinstance(value, str) else list(value or [])
    if "all" in names:
        names = list(filter(find_spec, LIBRARIES))
    return {"report_to": ",".join(name for name in names if name != "none")}


def _optimizer(value: Any) -> Values | None:
    if "adamw" not in value:
        raise Unsupported("the optimiser is AdamW")
    # torch's AdamW takes the place of other variants, with a warning.
    return {} if value in ("adamw_torch", "adamw_torch_fused") else None


def _schedule(value: Any) -> Values:
    if value in ("reduce_lr_on_plateau", "greedy"):
        raise Unsupported("the learning rate is a function of the step, not of what was measured")
    return {"lr_scheduler_type": value.removesuffix("_with_warmup")}


def _refuse_generation_batch_size(value: Any) -> Values:
    """Raises Unsupported: `_combined` has already removed the values that are possible."""
    raise Unsupported(
        "give a multiple of per_device_train_batch_size, and not beside steps_per_generation"
    )


def _model_arguments(value: Any) -> Values:
    """Returns the settings for arguments of `from_pretrained`."""
    refused = [
        name
        for name in value.keys() - {"trust_remote_code", *_LOADING}
        if value[name] and (name, value[name]) != ("revision", "main")
    ]
    if refused:
        raise Unsupported(
            f"give `model` as an object that you have loaded with {', '.join(sorted(refused))}"
        )
    return {"model.trust_remote_code": True} if value.get("trust_remote_code") else {}


# Arguments of `from_pretrained` that the trainer decides itself; trained weights are float32.
_LOADING = (
    "attn_implementation",
    "device_map",
    "dtype",
    "low_cpu_mem_usage",
    "torch_dtype",
    "use_cache",
)
# Field or setting of each entry of `generation_kwargs`.
_GENERATION = {
    "stop": "sampling.stop",
    "stop_token_ids": "sampling.stop_token_ids",
    "eos_token_id": "sampling.stop_token_ids",
    "min_new_tokens": "sampling.min_new_tokens",
    "ignore_eos": "sampling.ignore_eos",
    "stop_strings": "sampling.stop",
    "min_tokens": "sampling.min_new_tokens",
    "max_tokens": "max_new_tokens",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "max_new_tokens": "max_new_tokens",
}
# Further entries of `generation_kwargs`, each with the only value that is accepted: it asks for
# what the engines do anyway.
_PLAIN_SAMPLING: Values = {
    "do_sample": True,
    "num_beams": 1,
    "repetition_penalty": 1.0,
    "num_return_sequences": 1,
    "n": 1,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "length_penalty": 1.0,
    "use_cache": True,
}
_SAMPLING = "the engines sample from the model's own distribution, without penalties"
# Entries of `generation_kwargs` that nothing reads: answers are not padded, and the prompt has the
# tokens that begin it.
_TOKENIZER_ENTRIES = ("pad_token_id", "bos_token_id")


def _top_k(value: Any) -> Any:
    return None if value in (0, -1) else value


def _generation(value: Any) -> Values:
    """Returns the fields and settings for `generation_kwargs`, and the field of that name."""
    found: Values = {"generation_kwargs": dict(value)}
    refused = []
    for name, entry in found["generation_kwargs"].items():
        if name in _GENERATION and entry is not None:
            several = entry if isinstance(entry, list | tuple) else [entry]
            ours = _GENERATION[name]
            # Several entries set the same stops.
            if ours.startswith("sampling.stop"):
                found[ours] = [*found.get(ours, []), *several]
            else:
                found[ours] = _top_k(entry) if name == "top_k" else entry
        elif name not in _TOKENIZER_ENTRIES and entry not in (None, _PLAIN_SAMPLING.get(name)):
            refused.append(f"{name}={shorten(entry)}")
    if refused:
        known = ", ".join(sorted(_GENERATION))
        raise Unsupported(f"{_SAMPLING}: there is no {', '.join(refused)}, but {known}")
    return found


_SCALES: dict[Any, Values] = {
    "group": {},
    True: {},
    "none": {"algorithm.advantage": "group_centred"},
    False: {"algorithm.advantage": "group_centred"},
}
_LOGS = "every step is logged and recorded with its completions"
_KERNELS = "the trainer chooses kernels itself (docs/explanation/batches.md)"
# Arguments that have a field of the same name, and no more to say.
_SAME_NAME = (
    "output_dir per_device_train_batch_size gradient_accumulation_steps learning_rate "
    "num_train_epochs weight_decay seed run_name overwrite_output_dir gradient_checkpointing "
    "push_to_hub hub_model_id hub_private_repo hub_token temperature top_p min_p "
    "num_generations reward_weights save_steps warmup_ratio"
)
# Arguments that are a setting of the system.
_SETTINGS = {
    "delta": "algorithm.dual_clip",
    "entropy_coef": "algorithm.entropy_coef",
    "mask_truncated_completions": "algorithm.mask_truncated",
    "importance_sampling_level": "algorithm.importance_level",
    "sapo_temperature_neg": "algorithm.sapo_tau_negative",
    "sapo_temperature_pos": "algorithm.sapo_tau_positive",
    "off_policy_mask_threshold": "algorithm.off_policy_delta",
    "adam_beta1": "optimizer.adam_betas",
    "adam_beta2": "optimizer.adam_betas",
    "trust_remote_code": "model.trust_remote_code",
    "chat_template_kwargs": "sampling.chat_template_kwargs",
    "project": "trackers.project",
}
# See `Argument.accepted`.
_ACCEPTED: dict[str, tuple[Any, ...]] = {
    "adam_epsilon": (1e-8,),
    "hub_strategy": ("every_save", "end"),
    "logging_steps": (1,),
    "repetition_penalty": (1.0,),
    "stop_token": ("eos",),
    "top_entropy_quantile": (1.0,),
    "train_sampling_strategy": ("random",),
    "vllm_importance_sampling_cap": (3.0,),
    "vllm_importance_sampling_clip_max": (3.0,),
    "vllm_importance_sampling_correction": (True,),
    "vllm_importance_sampling_mode": ("sequence_mask",),
}
# Arguments without effect, by the reason: they ask for nothing beyond what is done anyway.
_SILENT = {
    "logits are computed in float32 (model.fp32_head)": "cast_lm_head_to_fp32",
    "there is no data loader to tune": (
        "dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers "
        "dataloader_prefetch_factor dataloader_multiprocessing_context dataloader_drop_last "
        "dataloader_in_order length_column_name remove_unused_columns group_by_length "
        "pad_to_multiple_of label_names"
    ),
    _LOGS: (
        "logging_strategy logging_first_step log_completions num_completions_to_print "
        "log_unique_prompts log_on_each_node disable_tqdm logging_nan_inf_filter log_level "
        "log_level_replica log_multimodal include_num_input_tokens_seen skip_memory_metrics debug"
    ),
    "held-out problems are answered before and after training, as many at once as the engine "
    "takes": (
        "per_device_eval_batch_size eval_accumulation_steps eval_on_start do_train do_eval "
        "do_predict eval_do_concat_batches eval_use_gather_object batch_eval_metrics "
        "include_for_metrics"
    ),
    "for EarlyStoppingCallback and `state.best_metric`; checkpoints/best is that of the best "
    "accuracy, or mean reward": "metric_for_best_model greater_is_better",
    "read only with use_vllm, or for generation in transformers": (
        "vllm_mode vllm_model_impl vllm_enable_sleep_mode vllm_server_base_url vllm_server_host "
        "vllm_server_port vllm_server_timeout vllm_group_port vllm_gpu_memory_utilization "
        "vllm_max_model_length vllm_tensor_parallel_size ds3_gather_for_generation use_cache "
        "use_transformers_continuous_batching transformers_continuous_batching_config "
        "use_transformers_paged cache_implementation"
    ),
    "read only with vespo, an adaptive entropy bonus or a mixed reference, which are refused": (
        "vespo_k_pos vespo_lambda_pos vespo_k_neg vespo_lambda_neg entropy_coef_min "
        "entropy_coef_max entropy_coef_delta entropy_target ref_model_mixup_alpha "
        "ref_model_sync_steps"
    ),
    _KERNELS: (
        "gradient_checkpointing_kwargs activation_checkpointing_kwargs torch_empty_cache_steps "
        "torch_compile_backend torch_compile_mode liger_kernel_config"
    ),
    "one process trains here": (
        "ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph "
        "ddp_backend ddp_timeout average_tokens_across_devices local_rank save_on_each_node "
        "accelerator_config fsdp_config"
    ),
    "a checkpoint has all that the run needs to go on": "save_only_model",
    "for the script, which gives it to train(), as in TRL": "resume_from_checkpoint",
    "only earlier versions of TRL and transformers have it": (
        "save_safetensors use_mps_device use_ipex jit_mode_eval half_precision_backend "
        "fp16_backend fp16_opt_level dispatch_batches split_batches ray_scope tpu_num_cores "
        "include_inputs_for_metrics dataset_num_proc vllm_device vllm_dtype vllm_max_model_len "
        "vllm_enable_prefix_caching local_rollout_forward_batch_size num_sample_generations"
    ),
}
# Arguments without the effect that a user would expect, by the reason, which a warning says.
_WARNED = {
    "completions come from the embedded engine, or from SGLang with engine='sglang'": "use_vllm",
    "set algorithm.rollout_correction, which holds for every engine": (
        "vllm_importance_sampling_correction vllm_importance_sampling_mode "
        "vllm_importance_sampling_clip_max vllm_importance_sampling_clip_min "
        "vllm_importance_sampling_cap"
    ),
    _LOGS: "logging_steps",
    _KERNELS: "use_liger_kernel",
    "one process trains here; the same settings train on many GPUs as a job group "
    "(docs/how-to/clusters.md)": "deepspeed fsdp parallelism_config",
    "trained weights are float32, and bf16=True computes in bfloat16 over them": (
        "fp16 bf16_full_eval fp16_full_eval tf32"
    ),
    "`seed` decides the order of the data too": "data_seed",
    "trackers write to their own places (docs/how-to/metrics.md)": "logging_dir",
    "set evaluation.n": "num_generations_eval",
    "an evaluation answers every held-out problem, before and after training too": (
        "eval_delay prediction_loss_only"
    ),
    "dropout of a model is as its configuration says": "disable_dropout",
    "`settings={'reproducible': True}` makes two runs equal": "full_determinism",
    "a resumed run goes on at the place in the data where it stopped, at the batch size that "
    "is set": (
        "ignore_data_skip auto_find_batch_size enable_jit_checkpoint "
        "restore_callback_states_from_checkpoint"
    ),
    "push_to_hub writes the model once, after training": (
        "hub_strategy hub_always_push hub_revision log_completions_hub_repo"
    ),
    "trackio logs where its own environment variables say": (
        "trackio_space_id trackio_bucket_id trackio_static_space_id"
    ),
}
# Arguments that are refused, by the reason.
_REFUSED = {
    "set algorithm.reference_refresh: the reference is replaced by the policy, not mixed with it": (
        "sync_ref_model"
    ),
    "answers are not held to a pattern (docs/explanation/engines.md)": (
        "vllm_structured_outputs_regex"
    ),
    "an entropy bonus has a fixed weight (entropy_coef)": "use_adaptive_entropy",
    "an entropy bonus covers all tokens": "top_entropy_quantile",
    _SAMPLING: "repetition_penalty",
    "the loss of a mixture of experts has no term for its router": "router_aux_loss_coef",
    "every prompt is drawn exactly once in each epoch, in an order that the seed decides": (
        "train_sampling_strategy"
    ),
    "AdamW, decoupled, with epsilon 1e-8": "optim_args adam_epsilon optim_target_modules",
    "no noise is added to embeddings": "neftune_noise_alpha",
    "checkpoints/best is the best one": "load_best_model_at_end",
    "scale or clip rewards in the reward function, which may also see whether an answer ended": (
        "reward_clip_range normalize_reward whiten_rewards missing_eos_penalty"
    ),
    "set settings={'algorithm.advantage': 'batch_normalised'}, which has no leave-one-out": (
        "normalize_advantages"
    ),
    "set kl_coef and settings={'algorithm.kl_in': …}": "token_level_kl",
    "set max_steps": "total_episodes",
    "set generation_kwargs={'stop_token_ids': […]}": "stop_token stop_token_id",
    "give reward_funcs and model to the trainer": "reward_model_path sft_model_path",
    "it has no meaning for answers that a reward function grades": "label_smoothing_factor",
}
_REFUSED_BY_TRAINER = {
    "a reward model here has the tokenizer in its own directory": "reward_processing_classes",
    "the weights that are trained are float32": "quantization_config",
    "episodes come from an environment (docs/how-to/agents.md)": "rollout_func",
}

ARGUMENTS: dict[str, Argument] = {
    **{name: Argument(name) for name in _SAME_NAME.split()},
    "max_steps": Argument(
        "max_steps",
        "overrides num_train_epochs; a step is a generation batch with all of its updates",
    ),
    "num_iterations": Argument(
        "num_iterations", "passes within one step; in TRL each counts as steps"
    ),
    "loss_type": Argument(
        "loss_type",
        "also every recipe; the paper's whole DAPO or Dr. GRPO is trainer_type; bnpo needs "
        "gradient_accumulation_steps=1, luspo importance_sampling_level='sequence'",
    ),
    "lr_scheduler_type": Argument(
        "lr_scheduler_type",
        "all but reduce_lr_on_plateau and greedy; a warm-up does not begin with a rate of 0, and "
        "constant has none",
        _schedule,
    ),
    "warmup_steps": Argument("warmup_steps", "below 1 it is warmup_ratio", _warmup),
    "lr_scheduler_kwargs": Argument("optimizer.lr_schedule_args"),
    "max_grad_norm": Argument(
        "max_grad_norm",
        "0: gradients are not clipped",
        lambda value: {"max_grad_norm": value or 1e9},
    ),
    "bf16": Argument("bf16", "needs use_gpu"),
    "use_cpu": Argument("use_gpu", "the opposite", lambda value: {"use_gpu": not value}),
    "activation_checkpointing": Argument("gradient_checkpointing"),
    "report_to": Argument("report_to", "`all`: every tracker that is installed", _report),
    "save_strategy": Argument(
        "save_steps",
        "no, which overrides save_steps, steps or epoch",
        {"steps": {}, "no": {"save_steps": 0}, "epoch": {"save_steps": "epoch"}},
    ),
    "save_total_limit": Argument(
        "save_total_limit", convert=lambda value: {"save_total_limit": value or 1_000_000}
    ),
    "eval_steps": Argument("eval_steps"),
    "eval_strategy": Argument(
        "eval_steps",
        "no, which overrides eval_steps, steps or epoch",
        {"steps": {}, "no": {"eval_steps": 0}, "epoch": {"eval_steps": "epoch"}},
    ),
    "top_k": Argument("top_k", "0 and -1 are None", lambda value: {"top_k": _top_k(value)}),
    "generation_kwargs": Argument(
        "generation_kwargs", "sampling, lengths and ends", convert=_generation
    ),
    "max_completion_length": Argument("max_new_tokens"),
    "max_prompt_length": Argument("max_prompt_length", "a longer problem is refused, not cut"),
    "beta": Argument("kl_coef"),
    "epsilon": Argument("clip_range"),
    "epsilon_high": Argument(
        "clip_range_high", "with cispo it is the bound on the ratio itself, as in TRL"
    ),
    **{name: Argument(setting) for name, setting in _SETTINGS.items()},
    "model_init_kwargs": Argument(
        "model.trust_remote_code",
        "types, devices and attention are the trainer's own; another entry is refused: load the "
        "model with it and give the object",
        _model_arguments,
    ),
    "steps_per_generation": Argument(
        "algorithm.mini_batches",
        "a step is then this many passes, with an update after each gradient_accumulation_steps",
    ),
    "generation_batch_size": Argument(
        "algorithm.mini_batches",
        "per_device_train_batch_size times steps_per_generation",
        _refuse_generation_batch_size,
    ),
    "max_tool_calling_iterations": Argument(
        "environment.turns",
        "the answer after them is one more",
        lambda value: {"environment.turns": value + 1},
    ),
    "use_bias_correction_kl": Argument(
        "algorithm.kl_estimator",
        "True: k2, which has the same expected gradient; False: k3",
        {True: {"algorithm.kl_estimator": "k2"}, False: {"algorithm.kl_estimator": "k3"}},
    ),
    "torch_compile": Argument(
        "trainer.compile",
        "False leaves it to the trainer, which compiles on GPUs",
        {True: {"trainer.compile": True}, False: {}},
    ),
    "scale_rewards": Argument(
        "algorithm.advantage",
        "group or none; batch is refused; not read with normalize_then_sum, as in TRL",
        _SCALES,
    ),
    "multi_objective_aggregation": Argument(
        "algorithm.advantage",
        "normalize_then_sum is reward_normalised",
        {
            "sum_then_normalize": {},
            "normalize_then_sum": {"algorithm.advantage": "reward_normalised"},
        },
    ),
    "shuffle_dataset": Argument(
        remark="the order of the data is a function of the seed; False is refused",
        convert={True: {}},
        effect=Effect.NONE,
    ),
    "optim": Argument(
        remark="torch's AdamW, in float32, also for its 8-bit and paged variants",
        convert=_optimizer,
        effect=Effect.NONE,
    ),
    **_rows(Effect.NONE, _SILENT),
    **_rows(Effect.WARNED, _WARNED),
    **_rows(Effect.REFUSED, _REFUSED),
}
"""Every argument of TRL's GRPOConfig, and those of its earlier versions."""
TRAINER = _rows(Effect.REFUSED, _REFUSED_BY_TRAINER)
"""The arguments of TRL's GRPOTrainer that are refused."""
RENAMED = {
    "evaluation_strategy": "eval_strategy",
    "exp_name": "run_name",
    "no_cuda": "use_cpu",
    "normalize_advantage": "normalize_advantages",
    "num_mini_batches": "steps_per_generation",
    "num_ppo_epochs": "num_iterations",
    "response_length": "max_completion_length",
    "use_liger_loss": "use_liger_kernel",
    "vllm_guided_decoding_regex": "vllm_structured_outputs_regex",
    "wandb_log_unique_prompts": "log_unique_prompts",
}
"""TRL's present name of each argument that earlier versions called otherwise."""
# The field of TrainerConfig for names of earlier versions of TRL and of other libraries.
_OTHER_NAMES = {
    "cliprange": "clip_range",
    "init_kl_coef": "kl_coef",
    "model_name": "model_name_or_path",
    "rloo_k": "num_generations",
    "num_epochs": "num_train_epochs",
}
# Why a number that TRL logs is not there, by the beginning of its name.
_NOT_LOGGED = {
    "total_flos": "floating-point operations are not counted",
    "num_tokens": "update.trained_tokens has the completion tokens of a step",
    "num_input_tokens_seen": "update.trained_tokens has the completion tokens of a step",
    "clip_ratio/": "clip_ratio/region_mean counts clipped tokens at both bounds",
    "cispo_clip_ratio": "clip_ratio/region_mean counts clipped tokens",
    "sampling/": "update.delta_logprob and update.effective_sample_size compare with the engine",
    "tools/": "lost_episodes and refused_calls tell of episodes",
    "policy_loss": "loss has all terms",
    "eval_loss": "answers are graded, not trained on",
    "eval_steps_per_second": "answers are not evaluated in batches",
    "eval_": "an evaluation has its reward, its accuracy and what reward functions log",
}
READ_AS: Values = {
    "adam_epsilon": 1e-8,
    "dataloader_num_workers": 0,
    "eval_delay": 0,
    "importance_sampling_level": "token",
    "local_rank": -1,
    "log_level": "passive",
    "logging_steps": 10,
    "logging_strategy": "steps",
    "optim": "adamw_torch",
    "per_device_eval_batch_size": 8,
    "repetition_penalty": 1.0,
    "save_strategy": "steps",
    "scale_rewards": "group",
}
"""What a script reads from a config for arguments that were not given and are no fields. It reads
None for all others, for which TRL mostly has None, False or 0."""


def instead(flags: Names) -> dict[str, str]:
    """Returns what a command line has instead of each of TRL's arguments; `flags` are its arguments
    by the fields that they set.
    """
    names = [*flags, *_OTHER_NAMES]
    table = {name: Argument(_OTHER_NAMES.get(name, name)) for name in names}
    table |= {name: ARGUMENTS[present] for name, present in RENAMED.items()} | ARGUMENTS
    found = {}
    for name, argument in table.items():
        ours = argument.ours
        use = "only the Python API has it" if ours else "leave it out"
        if ours in flags or "." in ours:
            use = f"use {flags.get(ours, f'--set {ours}=VALUE')}"
        found[name] = ": ".join(filter(None, [use, argument.remark]))
    return found


def with_present_names(arguments: Given) -> Values:
    """Returns arguments by TRL's present names."""
    given: Values = {}
    for name, value in arguments.items():
        name = RENAMED.get(name, name)
        # YAML reads `no` as False.
        is_no = name in ("eval_strategy", "save_strategy") and value is False
        given[name] = "no" if is_no else value
    return given


def translated(
    arguments: Given,
    fields: Mapping[str, FieldInfo],
    betas: tuple[float, float],
    *,
    refusals: Refusals,
    warned: Collection[str] = (),
) -> Values:
    """Returns the fields of TrainerConfig for arguments with its own or TRL's names. Adds an error
    to `refusals` for each that is refused, and logs one warning with those that have no effect.

    Unknown arguments stay as they are. If only one of AdamW's betas is given, `betas` provides the
    other. The warning leaves out the arguments in `warned`, of which an earlier one told.
    """
    given: Values = {}
    for name, value in arguments.items():
        if value is not None or name not in ARGUMENTS:
            given[name] = value.value if isinstance(value, Enum) else value
    made = _combined(given, fields, betas)

    for (name, key), value in converted(given, ARGUMENTS, refusals, warned).items():
        conflicts = key != name and key in given and given[key] != value
        if conflicts and name != "generation_kwargs":
            error = ConfigError(
                f"this argument sets {key}, which is given too, with another value",
                field=name,
                value=shorten(given[name]),
                remedy="leave one of the two out",
            )
            refusals.add(error)
        made[key] = value

    settings = {key: made.pop(key) for key in list(made) if "." in key}
    own = made.get("settings") or {}
    if settings and isinstance(own, Mapping):
        made["settings"] = settings | dict(own)
    loss = made.get("loss_type")
    is_recipe = isinstance(loss, str) and loss in RECIPES and loss not in LOSSES
    if is_recipe and "trainer_type" not in made:
        made["trainer_type"] = loss
    return made


def converted(
    given: Values,
    table: Mapping[str, Argument],
    refusals: Refusals,
    warned: Collection[str] = (),
) -> dict[tuple[str, str], Any]:
    """Returns the value of each field and setting by (argument, name of the field or setting). For
    refused arguments, `refusals` gets an error.
    """
    found: dict[tuple[str, str], Any] = {}
    without_effect: dict[str, str] = {}
    for name, value in given.items():
        argument = table.get(name) or Argument(_OTHER_NAMES.get(name, name))
        reason = ""
        # The value may have any type: whatever a conversion raises, the user made a mistake.
        try:
            made = _converted_value(argument, value)
        except Unsupported as unsupported:
            reason = str(unsupported)
        except (TypeError, ValueError, AttributeError):
            reason = "the value is not valid"
        if reason:
            error = ConfigError(
                f"this trainer does not support TRL's argument {name}: {reason}",
                field=name,
                value=shorten(value),
                remedy="leave it out",
            )
            refusals.add(error)
        elif made is not None:
            found |= {(name, key): converted for key, converted in made.items()}
        elif name not in warned:
            without_effect[name] = argument.remark

    if without_effect:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in without_effect.items())
        _log.warning("without effect here: %s", reasons)
    return found


def _converted_value(argument: Argument, value: Any) -> Values | None:
    """Returns the fields and settings for a value; None for one without effect, which is warned
    about. Raises Unsupported.
    """
    if isinstance(argument.convert, Mapping):  # a choice, each with its settings
        if value not in argument.convert:
            choices = ", ".join(map(repr, argument.convert))
            raise Unsupported(f"there is no {shorten(value)} here: use one of {choices}")
        return argument.convert[value]
    if argument.convert is not None:
        return argument.convert(value)
    if argument.effect is Effect.USED:
        return {argument.ours: value}
    if argument.effect is Effect.NONE or not value or value in argument.accepted:
        return {}
    if argument.effect is Effect.REFUSED:
        raise Unsupported(argument.remark)
    return None


def _combined(given: Values, fields: Mapping[str, FieldInfo], betas: tuple[float, float]) -> Values:
    """Returns the fields and settings that follow from several arguments together, and removes from
    `given` the arguments that TRL would not read beside the others.
    """
    made: Values = {}
    # The system has one setting for both betas.
    if "adam_beta1" in given or "adam_beta2" in given:
        beta1 = given.pop("adam_beta1", betas[0])
        beta2 = given.pop("adam_beta2", betas[1])
        made["optimizer.adam_betas"] = (beta1, beta2)
    # Without a tracker, a divergence or a strategy, TRL ignores what belongs to it; the system
    # would refuse a setting that nothing reads.
    if not given.get("report_to") or given["report_to"] == "none":
        given.pop("project", None)
    if given.get("beta", given.get("kl_coef", fields["kl_coef"].default)) == 0:
        given.pop("use_bias_correction_kl", None)
    for kind in ("eval", "save"):
        if given.get(f"{kind}_strategy") in ("no", "epoch"):
            given.pop(f"{kind}_steps", None)
    # transformers evaluates as often as it logs, unless told otherwise.
    if given.get("eval_strategy") == "steps" and not given.get("eval_steps"):
        given["eval_steps"] = given.get("logging_steps", 10)
    if given.get("multi_objective_aggregation") == "normalize_then_sum":
        given.pop("scale_rewards", None)

    # TRL generates for several updates at once: 8 passes are generated, and every 4 make an update.
    # Here a step is all of these passes, cut into 8 / 4 = 2 mini-batches.
    passes = given.get("gradient_accumulation_steps", fields["gradient_accumulation_steps"].default)
    per_pass = given.get(
        "per_device_train_batch_size", fields["per_device_train_batch_size"].default
    )
    answers = given.get("generation_batch_size")
    is_multiple = isinstance(answers, int) and isinstance(per_pass, int) and not answers % per_pass
    if is_multiple and "steps_per_generation" not in given:
        given.pop("generation_batch_size")
        given["steps_per_generation"] = answers // per_pass
    generated = given.get("steps_per_generation")
    if isinstance(generated, int) and isinstance(passes, int):
        given.pop("steps_per_generation")
        if generated > passes:
            given["gradient_accumulation_steps"] = generated
            made["algorithm.mini_batches"] = generated // passes
        # Otherwise TRL generates an update's answers in several parts, all with the same weights:
        # here in one.

    # CISPO in TRL has only an upper bound.
    if given.get("loss_type") == "cispo":
        given.pop("epsilon", None)
        bound = given.get("epsilon_high")
        if isinstance(bound, int | float):  # of the ratio itself, not its distance from 1
            given.pop("epsilon_high")
            made["clip_range_high"] = bound - 1
    return made
