"""Refuses what scripts for TRL replace in a trainer, by a method of their class or an assignment,
where this trainer would never read it.
"""

from collections.abc import Iterator, Mapping
from inspect import getattr_static
from typing import Any

from common.errors import ConfigError
from trainer.api.settings import TrainerConfig
from trainer.api.trl import ARGUMENTS, TRAINER

_METHODS = """
    _build_accelerator_args _calculate_rewards _clip_grad_norm _compute_advantages _compute_loss
    _defer_fsdp_gradient_reduction _determine_best_metric _enable_gradient_checkpointing
    _evaluate _finalize_training _finish_current_push _fix_param_name_to_vllm _generate
    _generate_and_score_completions _generate_single_turn _get_collator_with_removed_columns
    _get_dataloader _get_eval_sampler _get_grad_norm _get_last_hidden_state _get_learning_rate
    _get_num_items_in_batch _get_output_dir _get_per_token_logps
    _get_per_token_logps_and_entropies _get_tool_suffix_ids _get_train_sampler
    _has_mixed_mesh_grads _hp_search_setup _init_training_state _inner_training_loop
    _issue_warnings_after_load _load_best_model _load_callback_state _load_from_checkpoint
    _load_optimizer_and_scheduler _load_rng_state _load_scaler _log_completion_extra _log_metric
    _maybe_log_save_evaluate _mixed_mesh_grad_norm _move_model_to_device _move_model_to_vllm
    _prepare_context_parallel_inputs _prepare_for_training _prepare_input _prepare_inputs
    _push_from_checkpoint _remove_unused_columns _report_to_hp_search _run_epoch _save
    _save_checkpoint _save_optimizer_and_scheduler _save_rng_state _save_scaler _send_telemetry
    _set_signature_columns_if_needed _sync_fsdp1_params_to_vllm _sync_fsdp2_params_to_vllm
    _sync_fsdp_params_to_vllm _sync_replicated_trainable_parameters _tokenize_prompts
    _tool_call_loop _track_num_input_tokens _tune_save_checkpoint _update_auto_batch_size
    _validate_args _wrap_model autocast_smart_context_manager call_model_init compute_liger_loss
    compute_loss compute_loss_context_manager create_accelerator_and_postprocess
    create_model_card create_optimizer create_optimizer_and_scheduler create_scheduler evaluate
    evaluation_loop floating_point_ops generate_completions get_batch_samples get_cp_size
    get_decay_parameter_names get_eval_dataloader get_gamma_weights get_high_entropy_mask
    get_off_policy_mask get_optimizer_cls_and_kwargs get_sapo_token_loss get_sp_size
    get_test_dataloader get_total_train_batch_size get_tp_size get_train_dataloader log
    num_examples prediction_step save_model set_initial_training_values store_flos training_step
"""
_ATTRIBUTES = """
    _async_tool_dicts _attn_mask_causal_checked _batch_environments _buffered_inputs
    _created_lr_scheduler _current_train_step_time _dist _entropy_bonus_enabled
    _entropy_window_stats _env_tools _environment_pool _eval_dataloaders _forward_redirection
    _globalstep_last_logged _has_async_funcs _image_pad_token_id _initial_global_step
    _initial_num_input_tokens_seen _is_vlm _last_loaded_step _last_world_entropy
    _loggers_initialized _logs _loss_shifts_labels _memory_tracker _metrics _mixed_mesh_grads
    _multi_environment _pending_extra_logs _pending_metrics _signature_columns _standalone_tools
    _step _sync_tool_dicts _textual_logs _tokenizer _total_loss_scalar _total_train_tokens
    _tr_loss _train_batch_size _trial _video_pad_token_id accelerator args async_loop
    async_loop_ready_event async_loop_thread aux_loss_enabled callback_handler callbacks
    can_return_loss chat_template commit_scheduler compute_loss_func compute_metrics
    compute_objective config continuous_batching_config control current_flos
    current_gradient_accumulation_steps data_collator engine environment_factories
    environment_factory environments eos_token_id eos_token_ids epsilon_low gather_function
    generation_config guided_decoding_regex hp_name hp_search_backend hp_space
    is_deepspeed_enabled is_distributed_loading_by_transformers is_fsdp_enabled
    is_fsdp_xla_enabled is_fsdp_xla_v1_enabled is_fsdp_xla_v2_enabled is_in_train
    is_model_parallel label_smoother liger_grpo_loss llm loss_is_scaled_for_ga lr_scheduler
    model model_accepts_loss_kwargs model_init model_kwarg_keys model_preparation_time
    model_wrapped neftune_hook_handle normalize_advantages objective optimizer
    optimizer_cls_and_kwargs optimizers pad_token pad_token_id peft_config place_model_on_device
    preprocess_logits_for_metrics processing_class push_in_progress ref_model reward_clip_range
    reward_fn reward_func_names sampling_params state tokenizer tools vllm_client
    vllm_generation
"""
METHODS = frozenset(_METHODS.split())
"""Methods that TRL's and transformers' trainers call while they train."""
ATTRIBUTES = frozenset(_ATTRIBUTES.split())
"""What else they keep, besides data, reward functions and the arguments of a config."""
# What to do instead, by a part of the name.
_INSTEAD = {
    "log": "a callback's on_log gets what is logged",
    "evaluat": "a callback's on_evaluate gets the numbers",
    "optim": "give optimizers=(an AdamW, None), or set learning_rate and lr_scheduler_type",
    "scheduler": "set lr_scheduler_type and lr_scheduler_kwargs",
    "loss": "set loss_type, or settings={'algorithm.…': …}",
    "save": "a callback's on_save gets every checkpoint",
    "reward": "assign reward_funcs, or return the number from a reward function",
    "model": "give it to the constructor",
    "process": "give it to the constructor",
    "tool": "give it to the constructor",
    "environment": "give it to the constructor",
    "engine": "give it to the constructor",
}


def _instead(name: str) -> str:
    for part, remedy in _INSTEAD.items():
        if part in name:
            return remedy
    return "use a callback, a reward function, an environment or a setting"


def own_methods(kind: type) -> dict[str, Any]:
    """Returns what a class has for each of `METHODS`."""
    return {name: getattr_static(kind, name, None) for name in METHODS}


def overridden(kind: type, own: Mapping[str, Any]) -> Iterator[ConfigError]:
    """Yields an error for each method of a class that is not among its `own_methods`."""
    for name, method in sorted(own_methods(kind).items()):
        if method is not own[name]:
            yield ConfigError(
                "this trainer does not call TRL's method that your class overrides",
                field=name,
                remedy=_instead(name),
            )


def check_assignment(name: str, value: Any, config: str) -> None:
    """Raises ConfigError for an assignment to an attribute that nothing would read; `config` is
    that of the settings.
    """
    if name in ARGUMENTS or name in TrainerConfig.model_fields:
        remedy = f"set trainer.{config}.{name} before train()"
    elif name in ("args", "config"):
        remedy = f"set its fields, as trainer.{config}.learning_rate = 1e-6"
    elif name in METHODS or name in ATTRIBUTES or name in TRAINER:
        remedy = _instead(name)
    else:
        return
    raise ConfigError(
        "this trainer does not read this attribute",
        field=f"trainer.{name}",
        value=type(value).__name__,
        remedy=remedy,
    )
