"""Maps TRL's arguments to fields and settings, or to the reason why they are refused
(docs/how-to/from-trl.md).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from importlib.util import find_spec
from typing import Any

from pydantic.fields import FieldInfo

from common.errors import ConfigError, shorten
from common.settings.algorithm import RECIPES
from common.settings.sections import SamplingSection
from trainer.trackers.base import LIBRARIES

Values = dict[str, Any]
LOSSES: dict[str, Values] = {
    "grpo": {"aggregation": "sequence_mean_token_mean"},
    "bnpo": {"aggregation": "token_mean"},
    "dapo": {"aggregation": "token_mean"},
    "dr_grpo": {"aggregation": "constant"},
    "luspo": {"aggregation": "sequence_mean_token_sum"},
}
"""Settings of TRL's losses, which are only a part of the recipe of that name."""


@dataclass(frozen=True)
class Argument:
    """How this system handles one of TRL's arguments."""

    ours: str = ""
    """Field of TrainerConfig, argument of the trainer, or setting `section.name`; `-`: not needed;
    empty: refused."""
    remark: str = ""
    """What differs, or why it is refused."""
    accepted: tuple[Any, ...] = ()
    """Values of a refused argument that match the behaviour here; None, False, 0 and empty values
    are accepted too."""
    convert: Callable[[Any], Values] | None = None
    """Converts the value to fields and settings. Raises TypeError or ValueError for a value of
    another type."""
    choices: Mapping[Any, Values] | None = None
    """Fields and settings for each possible value, in place of `convert`."""


def _same(names: str) -> dict[str, Argument]:
    """Returns arguments that are fields of the same name."""
    return {name: Argument(name) for name in names.split()}


def _settings(**names: str) -> dict[str, Argument]:
    """Returns arguments that are settings of the system under another name."""
    return {name: Argument(setting) for name, setting in names.items()}


def _free(remark: str, names: str) -> dict[str, Argument]:
    """Returns arguments that are accepted with any value and ignored."""
    return {name: Argument("-", remark, convert=lambda value: {}) for name in names.split()}


def _refused(reason: str, **names: Any) -> dict[str, Argument]:
    """Returns arguments that are refused; the value of each is accepted, or each of a tuple of
    values.
    """
    refused = {}
    for name, value in names.items():
        accepted = value if isinstance(value, tuple) else (value,)
        refused[name] = Argument(remark=reason, accepted=accepted)
    return refused


def _warmup(value: Any) -> Values:
    return {"warmup_ratio": value} if 0 < value < 1 else {"warmup_steps": value}


def _report(value: Any) -> Values:
    names = [value] if isinstance(value, str) else list(value or [])
    if "all" in names:
        names = list(filter(find_spec, LIBRARIES))
    return {"report_to": ",".join(name for name in names if name != "none")}


def _optional(name: str) -> Callable[[Any], Values]:
    """Returns the conversion of a truth value that may be None, which leaves `name` unset."""
    return lambda value: {} if value is None else {name: value}


_SAMPLING = (
    "the trainer computes the log-probabilities of plain sampling, and the engines sample so"
)
_GENERATION = {
    "stop": "sampling.stop",
    "stop_token_ids": "sampling.stop_token_ids",
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
"""Field or setting of each entry of `generation_kwargs`."""
_AS_HERE = {
    "do_sample": (True,),
    "num_beams": (1,),
    "repetition_penalty": (1.0,),
    "num_return_sequences": (1,),
    "n": (1,),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "length_penalty": (1.0,),
    "use_cache": (True,),
}
"""Other entries, with the values that match the behaviour here."""


def _generation(value: Any) -> Values:
    """Returns the fields and settings for `generation_kwargs`."""
    found: Values = {}
    for name, setting in dict(value or {}).items():
        if name in _GENERATION:
            single_stop = name.startswith("stop") and not isinstance(setting, list | tuple)
            found[_GENERATION[name]] = [setting] if single_stop else setting
        elif setting is not None and setting not in _AS_HERE.get(name, ()):
            raise ConfigError(
                _SAMPLING,
                field=f"generation_kwargs[{name!r}]",
                value=setting,
                remedy=f"leave it out; there are {', '.join(sorted(_GENERATION))}",
            )
    return found


_ENGINE = "completions come from the embedded engine or SGLang: OnlineRLTrainer(engine=…)"
_ANYWHERE = "0.0.0.0"  # noqa: S104
_HERE = (
    "one process trains here; the same settings train on many GPUs as a job group "
    "(docs/how-to/clusters.md)"
)
_PRECISION = (
    "the weights that are trained are float32, and bf16=True computes in bfloat16 over them"
)
_LOGS = (
    "every step is logged, printed and recorded with all of its completions "
    "(docs/how-to/metrics.md)"
)
_LOADER = (
    "the data-server draws every prompt exactly once in each epoch, in an order that the seed "
    "decides"
)
_TASK = "it has no meaning for answers that a reward function grades"
_HUB = "push_to_hub writes the model once, after training"
_NO_ENTROPY = "an entropy bonus has a fixed weight (entropy_coef) and covers all tokens"
_EVAL = (
    "an evaluation answers every held-out problem greedily, or as settings of `evaluation` say, "
    "before and after training too"
)

_SCALES: dict[Any, Values] = {
    "group": {},
    True: {},
    "none": {"algorithm.advantage": "group_centred"},
    False: {"algorithm.advantage": "group_centred"},
}

ARGUMENTS: dict[str, Argument] = {
    **_same(
        "output_dir per_device_train_batch_size gradient_accumulation_steps learning_rate "
        "num_train_epochs weight_decay max_grad_norm seed run_name overwrite_output_dir "
        "push_to_hub hub_model_id hub_private_repo temperature top_p min_p num_generations "
        "reward_weights"
    ),
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
        "constant, linear or cosine; a warm-up does not begin with a rate of 0",
    ),
    "warmup_steps": Argument("warmup_steps", "below 1 it is warmup_ratio", convert=_warmup),
    "warmup_ratio": Argument("warmup_ratio"),
    "bf16": Argument("bf16", "needs use_gpu", convert=_optional("bf16")),
    "use_cpu": Argument("use_gpu", "the opposite", convert=lambda value: {"use_gpu": not value}),
    "gradient_checkpointing": Argument("gradient_checkpointing"),
    "activation_checkpointing": Argument(
        "gradient_checkpointing",
        convert=lambda value: {} if value is None else {"gradient_checkpointing": bool(value)},
    ),
    "report_to": Argument("report_to", "`all`: every tracker that is installed", convert=_report),
    "save_steps": Argument("save_steps"),
    "save_strategy": Argument(
        "save_steps",
        "no, which overrides save_steps, or steps",
        choices={"steps": {}, "no": {"save_steps": 0}},
    ),
    "save_total_limit": Argument(
        "save_total_limit", convert=lambda value: {"save_total_limit": value or 1_000_000}
    ),
    "eval_steps": Argument("eval_steps", convert=lambda value: {"eval_steps": value or 0}),
    "eval_strategy": Argument(
        "eval_steps",
        "no, which overrides eval_steps, or steps",
        choices={"steps": {}, "no": {"eval_steps": 0}},
    ),
    "hub_token": Argument("hub_token"),
    "resume_from_checkpoint": Argument(
        "train(resume_from_checkpoint=True)",
        "of the newest checkpoint in output_dir",
        (None, False),
    ),
    "top_k": Argument("top_k", "0 is None", convert=lambda value: {"top_k": value or None}),
    "generation_kwargs": Argument(
        "generation_kwargs",
        "sampling, lengths and ends",
        convert=lambda value: {"generation_kwargs": dict(value)},
    ),
    "max_completion_length": Argument("max_new_tokens"),
    "max_prompt_length": Argument("max_prompt_length", "a longer problem is refused, not cut"),
    "beta": Argument("kl_coef"),
    "epsilon": Argument("clip_range"),
    "epsilon_high": Argument("clip_range_high", "of cispo the bound itself, as in TRL"),
    **_settings(
        delta="algorithm.dual_clip",
        entropy_coef="algorithm.entropy_coef",
        mask_truncated_completions="algorithm.mask_truncated",
        importance_sampling_level="algorithm.importance_level",
        sapo_temperature_neg="algorithm.sapo_tau_negative",
        sapo_temperature_pos="algorithm.sapo_tau_positive",
        off_policy_mask_threshold="algorithm.off_policy_delta",
        adam_beta1="trainer.adam_betas",
        adam_beta2="trainer.adam_betas",
        trust_remote_code="model.trust_remote_code",
        chat_template_kwargs="sampling.chat_template_kwargs",
        project="trackers.project",
    ),
    "max_tool_calling_iterations": Argument(
        "environment.turns",
        "the answer after them is one more",
        convert=lambda value: {"environment.turns": value + 1},
    ),
    "use_bias_correction_kl": Argument(
        "algorithm.kl_estimator",
        "True: k2, which has the same expected gradient; False: k3",
        convert=lambda value: {"algorithm.kl_estimator": "k2" if value else "k3"},
    ),
    "torch_compile": Argument(
        "trainer.compile",
        "False leaves it to the trainer, which compiles on GPUs",
        convert=lambda value: {"trainer.compile": True} if value else {},
    ),
    **_free("logits are computed in float32 (model.fp32_head)", "cast_lm_head_to_fp32"),
    "scale_rewards": Argument(
        "algorithm.advantage",
        "group or none; batch is refused; not read with normalize_then_sum, as in TRL",
        choices=_SCALES,
    ),
    "multi_objective_aggregation": Argument(
        "algorithm.advantage",
        "normalize_then_sum is reward_normalised",
        choices={
            "sum_then_normalize": {},
            "normalize_then_sum": {"algorithm.advantage": "reward_normalised"},
        },
    ),
    "sync_ref_model": Argument(
        "algorithm.reference_refresh",
        "set that instead: the reference is replaced by the policy, not mixed with it",
        (False,),
    ),
    **_refused(
        "set algorithm.reference_refresh: the reference is replaced by the policy, not mixed with "
        "it",
        ref_model_mixup_alpha=0.6, ref_model_sync_steps=512,
    ),
    **_refused(
        "a step generates its own batch; algorithm.mini_batches splits it into several updates",
        generation_batch_size=None, steps_per_generation=None,
    ),
    **_refused(
        _ENGINE,
        use_vllm=False, vllm_mode=("colocate", "server"), vllm_model_impl="vllm",
        vllm_enable_sleep_mode=False, vllm_structured_outputs_regex=None, vllm_server_base_url=None,
        vllm_server_host=_ANYWHERE, vllm_server_port=8000, vllm_server_timeout=240.0,
        vllm_group_port=51216, vllm_gpu_memory_utilization=0.3, vllm_max_model_length=None,
        vllm_tensor_parallel_size=1, use_transformers_continuous_batching=False,
        transformers_continuous_batching_config=None, use_transformers_paged=False,
        cache_implementation=None, ds3_gather_for_generation=True, use_cache=(False, True),
    ),
    **_refused(
        "set algorithm.rollout_correction, with its level, cap and floor, which holds for every "
        "engine",
        vllm_importance_sampling_correction=(True, False),
        vllm_importance_sampling_mode="sequence_mask", vllm_importance_sampling_clip_max=3.0,
        vllm_importance_sampling_clip_min=None, vllm_importance_sampling_cap=None,
    ),
    **_refused(
        "there is no VESPO",
        vespo_k_pos=2.0, vespo_lambda_pos=3.0, vespo_k_neg=3.0, vespo_lambda_neg=2.0,
    ),
    **_refused(
        _NO_ENTROPY,
        top_entropy_quantile=1.0, use_adaptive_entropy=False, entropy_coef_min=0.0,
        entropy_coef_max=1.0, entropy_coef_delta=0.005, entropy_target=0.2,
    ),
    **_refused(_SAMPLING, repetition_penalty=1.0),
    **_refused(
        "give `model` as an object that you have loaded",
        model_init_kwargs=None, router_aux_loss_coef=None,
    ),
    **_refused("dropout of a model is as its configuration says", disable_dropout=False),
    **_refused(
        "evaluation.n is the number of answers to a held-out problem",
        num_generations_eval=None,
    ),
    **_refused(
        "columns that a reward function does not name do not reach it",
        remove_unused_columns=False,
    ),
    **_free(
        "there is no data loader to tune",
        "dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers "
        "dataloader_prefetch_factor dataloader_multiprocessing_context",
    ),
    **_refused(
        _LOADER,
        shuffle_dataset=True, data_seed=None, dataloader_drop_last=(False, True),
        dataloader_in_order=True, train_sampling_strategy="random", length_column_name="length",
        ignore_data_skip=False, auto_find_batch_size=False, group_by_length=False,
    ),
    **_free(
        "every step is logged and recorded with its completions",
        "logging_strategy logging_steps logging_first_step log_completions "
        "num_completions_to_print log_unique_prompts log_on_each_node disable_tqdm "
        "logging_nan_inf_filter",
    ),
    **_refused(
        _LOGS,
        include_num_input_tokens_seen=("no",), log_completions_hub_repo=None, log_multimodal=True,
        skip_memory_metrics=True, log_level="passive", log_level_replica="warning", debug="",
        trackio_space_id=None, trackio_bucket_id=None, trackio_static_space_id=None,
    ),
    **_refused(_PRECISION, fp16=False, bf16_full_eval=False, fp16_full_eval=False, tf32=None),
    **_refused(
        "AdamW, decoupled, with epsilon 1e-8",
        optim=("adamw_torch_fused", "adamw_torch"), optim_args=None, adam_epsilon=1e-8,
        optim_target_modules=None, lr_scheduler_kwargs=None, neftune_noise_alpha=None,
    ),
    **_refused(
        "the trainer chooses kernels itself (docs/explanation/batches.md)",
        use_liger_kernel=False, liger_kernel_config=None, torch_empty_cache_steps=None,
        torch_compile_backend=None, torch_compile_mode=None, gradient_checkpointing_kwargs=None,
        activation_checkpointing_kwargs=None, pad_to_multiple_of=("auto", None),
    ),
    **_refused(
        _HERE,
        accelerator_config=None, parallelism_config=None, fsdp=None, fsdp_config=None,
        deepspeed=None, ddp_find_unused_parameters=None, ddp_bucket_cap_mb=None,
        ddp_broadcast_buffers=None, ddp_static_graph=None, ddp_backend=None, ddp_timeout=1800,
        average_tokens_across_devices=True, local_rank=-1, save_on_each_node=False,
    ),
    **_free(
        "held-out problems are answered before and after training, as many at once as the engine "
        "takes",
        "per_device_eval_batch_size eval_accumulation_steps eval_on_start do_train do_eval",
    ),
    **_refused(
        _EVAL,
        eval_delay=0, prediction_loss_only=False, eval_do_concat_batches=True,
        eval_use_gather_object=False, include_for_metrics=(), batch_eval_metrics=False,
        do_predict=False,
    ),
    **_refused(
        "a checkpoint has all that the run needs to go on, and the best one stays "
        "(checkpoints/best)",
        save_only_model=False, enable_jit_checkpoint=False, load_best_model_at_end=False,
        metric_for_best_model=None, greater_is_better=None,
        restore_callback_states_from_checkpoint=False,
    ),
    **_refused(_HUB, hub_strategy=("every_save", "end"), hub_always_push=False, hub_revision=None),
    **_refused(_TASK, label_smoothing_factor=0.0, label_names=None),
    **_refused(
        "runs with the same seed are equal up to the rounding of kernels",
        full_determinism=False,
    ),
}  # fmt: skip
"""Every argument of TRL's GRPOConfig."""
_OTHERS = {
    "cliprange": "clip_range",
    "init_kl_coef": "kl_coef",
    "model_name": "model_name_or_path",
    "rloo_k": "num_generations",
    "num_epochs": "num_train_epochs",
}
"""Argument names of earlier versions and other libraries."""

TRAINER: dict[str, Argument] = {
    "model": Argument(
        "model", "a name, a directory, or an object, which has the trained weights afterwards"
    ),
    "reward_funcs": Argument(
        "reward_fn", "functions, RewardFunction objects, names of reward models"
    ),
    "args": Argument("config"),
    "train_dataset": Argument("train_dataset", "also lists, generators and DataFrames"),
    "eval_dataset": Argument("eval_dataset", "also a dict of several"),
    "processing_class": Argument("processing_class"),
    "callbacks": Argument(
        "callbacks", "hooks on training, steps, logs, evaluations and checkpoints"
    ),
    "optimizers": Argument(
        "optimizers", "an AdamW gives its rate, betas and weight decay; schedulers are refused"
    ),
    "peft_config": Argument(
        "peft_config", "a LoraConfig; what an adapter here cannot be is refused"
    ),
    "reward_processing_classes": Argument(
        "", "a reward model here has the tokenizer in its own directory", (None,)
    ),
    "quantization_config": Argument("", "the weights that are trained are float32", (None,)),
    "tools": Argument("tools", "functions; not beside an environment_factory"),
    "environment_factory": Argument(
        "environment_factory",
        "a class or a function; reward functions get no `environments`: give it get_reward()",
    ),
    "rollout_func": Argument(
        "", "episodes come from an environment (docs/how-to/agents.md)", (None,)
    ),
}
"""Every argument of TRL's GRPOTrainer."""


def refuse(name: str, argument: Argument, value: Any) -> None:
    """Raises ConfigError for a value of a refused argument that requests other behaviour."""
    is_empty = isinstance(value, int | float | str | list | dict) and not value
    if value is None or is_empty:
        return
    for other in argument.accepted:
        if value is other or (type(value) is type(other) and value == other):
            return
    alternative = f", or set {argument.ours}" if argument.ours else ""
    raise ConfigError(
        f"this trainer does not support TRL's argument {name}: {argument.remark}",
        field=name,
        value=shorten(value),
        remedy=f"leave it out{alternative}",
    )


def translated(
    arguments: Mapping[str, Any], fields: Mapping[str, FieldInfo], betas: tuple[float, float]
) -> Values:
    """Returns the fields of TrainerConfig for arguments with its own or TRL's names. Raises
    ConfigError if refused.

    Unknown arguments stay as they are. If only one of AdamW's betas is given, `betas` provides the
    other.
    """
    given: Values = {}
    for name, value in arguments.items():
        if value is not None or name not in ARGUMENTS:
            given[name] = value.value if isinstance(value, Enum) else value

    made: Values = {}
    if "adam_beta1" in given or "adam_beta2" in given:
        beta1 = given.pop("adam_beta1", betas[0])
        beta2 = given.pop("adam_beta2", betas[1])
        made["trainer.adam_betas"] = (beta1, beta2)
    if not given.get("report_to") or given["report_to"] == "none":
        given.pop("project", None)
    kl_coef = given.get("beta", given.get("kl_coef", fields["kl_coef"].default))
    if kl_coef == 0:
        given.pop("use_bias_correction_kl", None)
    _cispo(given)
    _overridden(given)

    for name, value in given.items():
        for key, setting in _translated(name, value).items():
            conflicts = key != name and key in given and given[key] != setting
            if conflicts and name != "generation_kwargs":
                raise ConfigError(
                    f"{key} has another value",
                    field=name,
                    value=shorten(value),
                    remedy=f"leave one of them out: {name} sets {key}",
                )
            made[key] = setting
    made |= _generation(made.get("generation_kwargs"))

    found: Values = {}
    settings: Values = {}
    for key, setting in made.items():
        (settings if "." in key else found)[key] = setting
    own = found.get("settings") or {}
    if settings and isinstance(own, Mapping):
        found["settings"] = settings | dict(own)
    loss = found.get("loss_type")
    is_recipe = isinstance(loss, str) and loss in RECIPES and loss not in LOSSES
    if is_recipe and "trainer_type" not in found:
        found["trainer_type"] = loss
    return found


def _translated(name: str, value: Any) -> Values:
    """Returns the fields and settings for one argument. Raises ConfigError if it is refused."""
    argument = ARGUMENTS.get(name) or Argument(_OTHERS.get(name, name))
    if not argument.ours or argument.accepted:
        refuse(name, argument, value)
        return {}
    if argument.convert is not None or argument.choices is not None:
        return _converted(name, argument, value)
    return {argument.ours: value}


def _converted(name: str, argument: Argument, value: Any) -> Values:
    """Returns the fields and settings for a value. Raises ConfigError."""
    if argument.choices is not None:
        for choice, made in argument.choices.items():
            if choice == value:
                return made
        raise ConfigError(
            "this trainer has no such option",
            field=name,
            value=shorten(value),
            remedy=f"use one of {', '.join(map(repr, argument.choices))}",
        )
    assert argument.convert is not None
    try:
        return argument.convert(value)
    except (TypeError, ValueError):
        raise ConfigError(
            "this is no value for it",
            field=name,
            value=shorten(value),
            remedy="give a value of the type that it has in TRL",
        ) from None


def _overridden(given: Values) -> None:
    """Leaves out what another argument overrides in TRL, and adds what it implies."""
    for what in ("eval", "save"):
        if given.get(f"{what}_strategy") == "no":
            given.pop(f"{what}_steps", None)
    if given.get("eval_strategy") == "steps" and not given.get("eval_steps"):
        given["eval_steps"] = given.get("logging_steps", 10)
        if not given["eval_steps"]:
            raise ConfigError(
                "this and logging_steps are 0, and eval_strategy is steps",
                field="eval_steps",
                value=0,
                remedy="set it above 0, or eval_strategy to no",
            )
    normalises_first = given.get("multi_objective_aggregation") == "normalize_then_sum"
    if normalises_first and given.get("scale_rewards") in _SCALES:
        given.pop("scale_rewards")


def _cispo(given: Values) -> None:
    """Converts the bound of TRL's CISPO, a bound on the ratio itself, to a distance from 1."""
    if given.get("loss_type") != "cispo":
        return
    if "epsilon" in given:
        raise ConfigError(
            "TRL's cispo does not read epsilon: only epsilon_high bounds the ratio",
            field="epsilon",
            value=given["epsilon"],
            remedy="leave it out",
        )
    if given.get("epsilon_high") is not None:
        if given["epsilon_high"] <= 1:
            raise ConfigError(
                "epsilon_high bounds the ratio itself, and at 1 or below clips nearly every token",
                field="epsilon_high",
                value=given["epsilon_high"],
                remedy="set it above 1; ScaleRL recommends 5.0",
            )
        given["clip_range_high"] = given.pop("epsilon_high") - 1


def table(arguments: Mapping[str, Argument]) -> str:
    """Returns the documentation's tables of TRL's arguments; refused ones are grouped by reason."""
    rows = ["| TRL | here | remark |", "|---|---|---|"]
    for name, argument in sorted(arguments.items()):
        if argument.ours:
            ours = f"`{argument.ours}`" if argument.ours != "-" else "accepted, no effect"
            rows.append(f"| `{name}` | {ours} | {argument.remark} |")
    reasons: dict[str, list[str]] = {}
    for name, argument in arguments.items():
        if not argument.ours:
            reasons.setdefault(argument.remark, []).append(f"`{name}`")
    rows += ["", "| refused | why |", "|---|---|"]
    for reason, names in reasons.items():
        rows.append(f"| {', '.join(names)} | {reason} |")
    return "\n".join(rows)


assert {name for name in _GENERATION.values() if "." in name} <= {
    f"sampling.{name}" for name in SamplingSection.model_fields
}
