"""Every number of a step: what it is, and where it is shown. Whoever shows numbers reads this.

A name is that in `metrics.jsonl`: `update.loss` is `loss` in `update`. Trackers get all numbers, as
`update/loss`.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Metric:
    """One number of a step."""

    name: str
    text: str
    """What it says."""
    unit: str = ""
    """`share`: from 0 to 1."""
    gauge: str = ""
    """Name of its gauge on `/metrics`, after `rlhf_trainer_`."""
    chart: str = ""
    """Title of its chart on the dashboard."""
    held_out: str = ""
    """The number of an evaluation that the same chart shows."""
    card: bool = False
    """Whether it is one of the dashboard's key figures."""


SECTIONS = {
    "At a glance": (
        Metric(
            "reward",
            "mean reward",
            gauge="reward",
            chart="Reward",
            held_out="mean_reward",
            card=True,
        ),
        Metric(
            "accuracy",
            "share of correct completions",
            "share",
            gauge="accuracy_ratio",
            chart="Accuracy",
            held_out="accuracy",
            card=True,
        ),
        Metric(
            "update.loss", "mean loss of its updates", gauge="loss", chart="Loss", held_out="loss"
        ),
        Metric(
            "completion_tokens",
            "mean length of a completion",
            "tokens",
            gauge="completion_tokens",
            chart="Length",
            card=True,
        ),
        Metric(
            "seconds",
            "wall time by stage, with the checkpoint before it",
            "seconds",
            chart="A step",
            card=True,
        ),
    ),
    "Learning": (
        Metric(
            "update.entropy",
            "entropy per token",
            "nats/token",
            gauge="entropy_nats",
            chart="Entropy",
            card=True,
        ),
        Metric(
            "update.kl_reference",
            "KL to the reference model per token",
            "nats/token",
            gauge="kl_reference_nats",
            chart="KL to the reference",
        ),
        Metric("update.kl_coef", "weight of the KL divergence in the loss", gauge="kl_coefficient"),
        Metric("update.teacher_kl", "KL to the teacher per token", "nats/token"),
        Metric(
            "update.clip_fraction",
            "share of tokens that were clipped",
            "share",
            gauge="clip_ratio",
            chart="Clip fraction",
        ),
        Metric(
            "update.ratio", "mean probability ratio of new to old policy", gauge="probability_ratio"
        ),
        Metric(
            "update.grad_norm",
            "mean gradient norm before clipping",
            gauge="gradient_norm",
            chart="Gradient norm",
        ),
        Metric(
            "update.learning_rate", "learning rate", gauge="learning_rate", chart="Learning rate"
        ),
        Metric("update.updates", "optimiser updates that were applied"),
        Metric(
            "update.skipped",
            "updates skipped because the gradient was not finite",
            chart="Skipped updates",
        ),
        Metric("update.stopped_early", "1 when algorithm.early_stop_kl ended the updates"),
        Metric(
            "update.pass_fill",
            "share of its passes that would do if answers could be cut: 0.5 if all are half full",
            "share",
        ),
    ),
    "Groups and tokens": (
        Metric(
            "zero_variance_groups",
            "groups whose completions all got the same reward",
            "groups",
            gauge="zero_variance_groups",
            chart="Groups of equal rewards",
            card=True,
        ),
        Metric("solved_groups", "such groups whose answers are all right", "groups"),
        Metric("failed_groups", "such groups whose answers are all wrong", "groups"),
        Metric(
            "copies",
            "share of completions that equal an earlier one of their group",
            "share",
            chart="Equal completions",
        ),
        Metric("reused_groups", "groups that were trained on before", "groups"),
        Metric(
            "truncated",
            "share of completions cut at sampling.max_new_tokens",
            "share",
            gauge="truncated_ratio",
            chart="Cut at the limit",
        ),
        Metric("unparsable", "share of completions in which the grader found no answer", "share"),
        Metric(
            "dropped",
            "groups dropped since the run began, by reason",
            "groups",
            chart="Dropped groups",
        ),
        Metric(
            "lost_episodes",
            "episodes without a reward since the last step, by status",
            "episodes",
            chart="Lost episodes",
        ),
        Metric(
            "refused_calls",
            "calls of the model by episodes that were refused since the last step",
            "calls",
            chart="Refused calls",
        ),
        Metric("rewards", "mean score of every reward function, before weights"),
        Metric("logged", "mean of every value that reward functions logged"),
        Metric("update.trained_tokens", "completion tokens of its updates", "tokens"),
        Metric(
            "tokens_per_s",
            "trained tokens over the whole step",
            "per second",
            chart="Trained tokens",
        ),
    ),
    "Rollout engine and trainer": (
        Metric(
            "update.effective_sample_size",
            "effective sample size as a share of the tokens",
            "share",
            gauge="effective_sample_ratio",
            chart="Effective sample size",
        ),
        Metric(
            "update.delta_logprob",
            "mean |logprob of trainer - of rollout engine|",
            "nats",
            gauge="delta_logprob",
        ),
        Metric(
            "update.delta_logprob_current",
            "the same over tokens sampled by these very weights",
            "nats",
            gauge="delta_logprob_same_weights",
            chart="|Δ logprob|",
            card=True,
        ),
        Metric(
            "update.logprob_gap",
            "mean logprob of rollout engine - of trainer, over the same tokens",
            "nats",
        ),
        Metric(
            "update.likelihood_gap",
            "mean of entropy + logprob of sampled tokens: above 0 when they are likelier than "
            "sampling from the policy makes them",
            "nats",
        ),
        Metric("update.likelihood_error", "standard error of it", "nats"),
        Metric(
            "update.kl_rollout",
            "KL(rollout policy || trainer) per token",
            "nats/token",
            gauge="kl_rollout_nats",
            chart="KL(rollout ‖ trainer)",
        ),
        Metric(
            "staleness",
            "mean age of the fresh completions in weight versions",
            "weight versions",
            gauge="staleness_versions",
            chart="Staleness",
        ),
        Metric(
            "in_flight",
            "mean number of completions that were being generated",
            "completions",
            gauge="completions_in_flight",
            chart="Completions in flight",
        ),
        Metric("generating", "share of the wall time with generation in progress", "share"),
        Metric(
            "coordinator",
            "processor time of the thread that collects, as a share of the wall time",
            "share",
            gauge="coordinator_ratio",
            chart="Coordinator",
        ),
        Metric("cpu_seconds", "CPU time of the trainer's process, without evaluations", "seconds"),
        Metric("gpus", "GPUs that trainer and engines hold; none when external servers generate"),
    ),
    "Critic": (
        Metric(
            "critic.value_loss", "mean value loss", gauge="critic_value_loss", chart="Value loss"
        ),
        Metric(
            "critic.explained_variance",
            "1 - Var(returns - values) / Var(returns)",
            gauge="critic_explained_variance_ratio",
            chart="Explained variance",
        ),
        Metric(
            "critic.value_mean",
            "mean value before the update",
            gauge="critic_value_mean",
            chart="Value",
        ),
        Metric("critic.return_mean", "mean return", gauge="critic_return_mean", chart="Return"),
        Metric(
            "critic.grad_norm",
            "gradient norm of the critic before clipping",
            gauge="critic_gradient_norm",
            chart="Gradient norm of the critic",
        ),
        Metric(
            "critic.clip_fraction",
            "share of tokens whose value was clipped",
            "share",
            gauge="critic_clip_ratio",
        ),
    ),
    "Supervised fine-tuning": (
        Metric("epoch", "passes over the examples"),
        Metric("examples", "examples of the step"),
    ),
}
"""The numbers by section of the dashboard, whose charts have this order; those of the first section
are shown even if they never change. Of `seconds`, `dropped`, `lost_episodes`, `rewards` and
`logged` there are several, as `seconds.update`.
"""
METRICS = [metric for section in SECTIONS.values() for metric in section]
