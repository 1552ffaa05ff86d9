"""Alarms: measurements of an update that are out of bounds, with the likely cause. Pure."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from common.settings.config import Config
from common.wire.schemas import Group
from trainer.observe.catalogue import ALARMS, OWN_DEFAULTS, Texts, limits

if TYPE_CHECKING:
    from trainer.policy.update_metrics import UpdateMetrics


@dataclass(frozen=True)
class Agreement:
    """How well engine and trainer agreed in the steps before."""

    step: int = 0
    """The last step in which |Δ logprob| was below the alarm; 0: none."""
    delta: float = 0.0
    """Its |Δ logprob|."""


def alarms(
    metrics: "UpdateMetrics",
    staleness: float,
    config: Config,
    dropout: Collection[str] = (),
    agreement: Agreement = Agreement(),
) -> Texts:
    """Returns the texts of raised alarms by name; empty when there are none.

    Args:
        metrics: of the update.
        staleness: the mean age of the experience in weight versions: 0 when the current policy
            sampled all of it.
        config: the settings of the run.
        dropout: the settings of the model that make updates, and nothing else, drop some of its
            numbers.
        agreement: how engine and trainer agreed before.
    """
    mismatch = _mismatch(metrics, config, agreement)
    if dropout:
        mismatch = (
            f"dropout ({', '.join(dropout)}), which applies in updates and not in the engine. Set "
            "it to 0: `lora.dropout` in the settings, the others in the model's config.json"
        )
    cause = _age(staleness, config) if staleness > 0 else mismatch
    raised = {}
    for name, bound in limits(is_old=staleness > 0).items():
        row = ALARMS[name]
        measured = getattr(metrics, row.metric)
        if measured < bound if row.is_minimum else measured > bound:
            raised[name] = row.text(
                config, measured=measured, bound=bound, mismatch=mismatch, cause=cause
            )
    # Tokens that were not sampled from the policy, although their log-probabilities are right. For
    # tokens that were, entropy + log-probability has the mean 0; a filter, or a lower temperature,
    # prefers likely tokens and raises it.
    row = ALARMS["likelihood"]
    gap = metrics.likelihood_gap
    chance = row.further_limits["standard errors"] * metrics.likelihood_error
    is_likelier = gap > 0 and gap >= max(row.limit * metrics.entropy, chance)
    if is_likelier and metrics.trained_tokens and not config.sampling.truncation():
        raised["likelihood"] = row.text(config, gap=gap, entropy=metrics.entropy)
    return raised


def _mismatch(metrics: "UpdateMetrics", config: Config, agreement: Agreement) -> str:
    """Returns the likely cause of a difference between engine and trainer on the same weights."""
    delta = metrics.delta_logprob_current
    gap = metrics.logprob_gap
    before = agreement.delta
    bounds = ALARMS["delta_logprob"].further_limits
    precision = f"model.dtype is {config.model.dtype}, look at rollout.engine_args"
    if agreement.step and delta >= bounds["jump"] * before:
        return (
            f"weights: until step {agreement.step} both agreed ({before:.2g}), so the engines do "
            "not serve the weights of their version: an update was confirmed and not loaded (they "
            "serve old weights), or it arrived damaged or in part; restart the engines"
        )
    if agreement.step:
        return (
            f"it grew from {before:.2g} in step {agreement.step}: numbers that drift apart as the "
            "weights change, as with a quantised engine or one of lower precision "
            f"({precision}), or engines that no longer load new weights"
        )
    if delta < bounds["most that a filter leaves out"] and gap > bounds["one-sided share"] * delta:
        return (
            f"the engine's log-probabilities are higher, by {gap:.2g} on average: it truncates "
            f"{OWN_DEFAULTS}"
        )
    return (
        f"another precision or a quantised engine ({precision}), a sampling filter in the engine "
        "that the trainer does not know, or weights that did not arrive whole"
    )


def other_reference(kl_reference: float, config: Config) -> Texts:
    """Returns the alarm about a `model.reference` that is not the model that training starts from.

    `kl_reference`: of the first step of a run, in nats per token.
    """
    # Without the setting, the reference is that model. Dropout, or several updates on a batch,
    # differ from it in the first step, too.
    row = ALARMS["reference"]
    if not config.model.reference or kl_reference <= row.limit:
        return {}
    return {"reference": row.text(config, kl=kl_reference)}


def same_prompts(groups: Sequence[Group], config: Config) -> Texts:
    """Returns the alarm about different problems that the model sees as one prompt."""
    # Templates may trim white space.
    texts = {" ".join(group.prompt.split()) for group in groups}
    tokens = {group.prompt_token_ids.tobytes() for group in groups}
    row = ALARMS["same_prompts"]
    if len(texts) < row.limit or len(tokens) > 1:
        return {}
    return {"same_prompts": row.text(config, problems=len(texts))}


def refused_calls(calls: int, refusal: str, rewards: Collection[float], config: Config) -> Texts:
    """Returns the alarm about calls of the model that the environment-server refused to episodes.

    Args:
        calls: refused since the last step.
        refusal: why the newest of them was refused.
        rewards: of all answers of the batch.
        config: the settings of the run.
    """
    row = ALARMS["refused_calls"]
    if calls < row.limit:
        return {}
    outcome = "" if any(rewards) else "all rewards are 0, and "
    return {"refused_calls": row.text(config, outcome=outcome, calls=calls, refusal=refusal)}


def _age(staleness: float, config: Config) -> str:
    """Explains why old experience is far from the policy, and which setting to change."""
    settings = []
    if config.replay.reuse_ratio:
        settings.append(f"replay.max_reuse_staleness ({config.replay.max_reuse_staleness})")
    if config.trainer.max_staleness:
        settings.append(f"trainer.max_staleness ({config.trainer.max_staleness})")
    settings.append("optimizer.learning_rate")
    text = (
        f"the experience is {staleness:.1f} weight versions old on average and the policy moved; "
        f"lower {' or '.join(settings)}"
    )
    if config.algorithm.rollout_correction == "none":
        text += ", or bound the weights of such tokens with algorithm.rollout_correction truncate"
    return text
