"""Alarms: measurements of an update that are out of bounds, with the likely cause. Pure."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from common.settings.config import Config
from common.wire.schemas import Group

if TYPE_CHECKING:  # the dashboard reads the limits without torch
    from trainer.policy.update_metrics import UpdateMetrics

MAX_DELTA_LOGPROB = 0.02
"""Mean |Δ logprob| of tokens that the trainer's own weights sampled. SkyRL's tests allow 0.0104
(synchronous) and 0.0193 (asynchronous) between bfloat16 engines and trainers."""
MAX_KL = 1e-2
"""Nats per token. NeMo-RL calls 1e-3 between engine and trainer a problem; stale experience exceeds
it by design."""
MAX_KL_CURRENT_POLICY = 1e-3
MIN_EFFECTIVE_SAMPLE_SIZE = 0.5
MAX_FIRST_KL_REFERENCE = 0.05
"""Nats per token in the first step, in which the policy still is, or is close to, the model that it
started from."""
_ONE_SIDED = 0.5
"""Share of |Δ logprob| that has one sign, above which the engine samples from another
distribution; rounding has both signs."""
_MAX_FILTERED = 1.0
"""Nats: filters leave out less. Other weights give an engine's own samples far higher ones, too."""
_LIKELIER = 0.15
"""Share of the entropy by which sampled tokens may be likelier than the policy makes them: only
groups of differing rewards are measured, and which those are depends on what was sampled."""
_SURE = 8.0
"""Standard errors of independent tokens; those of one answer are not independent."""
_JUMP = 5.0
"""Ratio to the step before above which |Δ logprob| did not grow but jump."""


_OWN_DEFAULTS = (
    "the distribution or samples at another temperature than it was asked to, as with a filter "
    "(top_k, top_p, min_p) or temperature among its own defaults (rollout.engine_args, "
    "generation_config.json of the model)"
)


@dataclass(frozen=True)
class Limit:
    """Bound of an alarm."""

    metric: str
    """Field of `UpdateMetrics`."""
    value: float
    above: bool = True
    """Whether the alarm is raised above the value; False: below it."""

    def passed(self, metrics: "UpdateMetrics") -> bool:
        measured: float = getattr(metrics, self.metric)
        return measured > self.value if self.above else measured < self.value


def limits(old: bool) -> dict[str, Limit]:
    """Returns the limits by alarm name. `old`: an earlier policy sampled some of the experience."""
    return {
        "delta_logprob": Limit("delta_logprob_current", MAX_DELTA_LOGPROB),
        "kl_rollout": Limit("kl_rollout", MAX_KL if old else MAX_KL_CURRENT_POLICY),
        "effective_sample_size": Limit(
            "effective_sample_size", MIN_EFFECTIVE_SAMPLE_SIZE, above=False
        ),
    }


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
) -> dict[str, str]:
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
    old = staleness > 0
    bounds = limits(old)
    mismatch = _dropout(dropout) if dropout else _mismatch(metrics, config, agreement)
    if old:
        cause = _age(staleness, config)
    elif dropout:
        cause = _dropout(dropout)
    else:
        cause = mismatch
    texts = {
        "delta_logprob": (
            "mean |Δ logprob| between rollout engine and trainer is "
            f"{metrics.delta_logprob_current:.3g} on the same weights (alarm above "
            f"{MAX_DELTA_LOGPROB}): the two do not compute the same policy. Likely: {mismatch}"
        ),
        "kl_rollout": (
            f"KL(rollout ‖ trainer) is {metrics.kl_rollout:.3g} nats per token (alarm above "
            f"{bounds['kl_rollout'].value}). Likely: {cause}"
        ),
        "effective_sample_size": (
            f"the effective sample size is {metrics.effective_sample_size:.2f} of the tokens "
            f"(alarm below {MIN_EFFECTIVE_SAMPLE_SIZE}): few tokens carry the update. Likely: "
            f"{cause}"
        ),
    }
    raised = {name: texts[name] for name, limit in bounds.items() if limit.passed(metrics)}
    if metrics.trained_tokens and not config.sampling.truncation():
        raised |= _likelier(metrics)
    return raised


def _likelier(metrics: "UpdateMetrics") -> dict[str, str]:
    """Returns the alarm about tokens that were not sampled from the policy, although their
    log-probabilities are right.
    """
    gap = metrics.likelihood_gap
    if gap < _LIKELIER * metrics.entropy or gap < _SURE * metrics.likelihood_error or gap <= 0:
        return {}
    return {
        "likelihood": (
            f"the sampled tokens are likelier than sampling from the policy makes them, by "
            f"{gap:.2g} nats per token (entropy is {metrics.entropy:.2g}): the engine truncates "
            f"{_OWN_DEFAULTS}"
        )
    }


def _mismatch(metrics: "UpdateMetrics", config: Config, agreement: Agreement) -> str:
    """Returns the likely cause of a difference between engine and trainer on the same weights."""
    delta = metrics.delta_logprob_current
    if not agreement.step:
        is_one_sided = metrics.logprob_gap > _ONE_SIDED * delta
        if is_one_sided and delta < _MAX_FILTERED:
            return (
                f"the engine's log-probabilities are higher, by {metrics.logprob_gap:.2g} on "
                f"average: it truncates {_OWN_DEFAULTS}"
            )
        return (
            f"another precision or a quantised engine (model.dtype is {config.model.dtype}, look "
            "at rollout.engine_args), a sampling filter in the engine that the trainer does not "
            "know, or weights that did not arrive whole"
        )
    if delta < _JUMP * agreement.delta:
        return (
            f"it grew from {agreement.delta:.2g} in step {agreement.step}: numbers that drift "
            "apart as the weights change, as with a quantised engine or one of lower precision "
            f"(model.dtype is {config.model.dtype}, look at rollout.engine_args), or engines that "
            "no longer load new weights"
        )
    return (
        f"weights: until step {agreement.step} both agreed ({agreement.delta:.2g}), so the engines "
        "do not serve the weights of their version: an update was confirmed and not loaded (they "
        "serve old weights), or it arrived damaged or in part; restart the engines"
    )


def other_reference(kl_reference: float, config: Config) -> dict[str, str]:
    """Returns the alarm about a `model.reference` that is not the model that training starts from.

    `kl_reference`: of the first step of a run, in nats per token.
    """
    # Without the setting, the reference is that model. Dropout, or several updates on a batch,
    # differ from it in the first step, too.
    if not config.model.reference or kl_reference <= MAX_FIRST_KL_REFERENCE:
        return {}
    return {
        "reference": (
            f"KL to the reference is {kl_reference:.2g} nats per token in the first step already: "
            "model.reference is not the model that training starts from "
            f"({config.model.reference}), and algorithm.kl_coef pulls the policy to another model; "
            "leave model.reference empty unless you want that"
        )
    }


def same_prompts(groups: Sequence[Group]) -> dict[str, str]:
    """Returns the alarm about different problems that the model sees as one prompt."""
    # Templates may trim white space.
    texts = {" ".join(group.prompt.split()) for group in groups}
    tokens = {group.prompt_token_ids.tobytes() for group in groups}
    if len(texts) < 2 or len(tokens) > 1:
        return {}
    return {
        "same_prompts": (
            f"the prompts of {len(texts)} different problems are the same, token for token: the "
            "model does not see the problem. Likely: the chat template leaves out the user's "
            "message; correct model.chat_template or data.prompt_template, and see the prompt of a "
            "group in the tab Rollouts"
        )
    }


def refused_calls(calls: int, refusal: str, rewards: Collection[float]) -> dict[str, str]:
    """Returns the alarm about calls of the model that the environment-server refused to episodes.

    Args:
        calls: refused since the last step.
        refusal: why the newest of them was refused.
        rewards: of all answers of the batch.
    """
    if not calls:
        return {}
    outcome = "" if any(rewards) else "all rewards are 0, and "
    return {"refused_calls": f"{outcome}{calls} calls of the model were refused: {refusal}"}


def _dropout(settings: Collection[str]) -> str:
    """Explains that dropout makes the updated policy differ from the one that samples."""
    names = ", ".join(settings)
    return (
        f"dropout ({names}), which applies in updates and not in the engine. Set it to 0: "
        "`lora.dropout` in the settings, the others in the model's config.json"
    )


def _age(staleness: float, config: Config) -> str:
    """Explains why old experience is far from the policy, and which setting to change."""
    settings = []
    if config.replay.reuse_ratio:
        settings.append(f"replay.max_reuse_staleness ({config.replay.max_reuse_staleness})")
    if config.trainer.max_staleness:
        settings.append(f"trainer.max_staleness ({config.trainer.max_staleness})")
    settings.append("trainer.learning_rate")
    text = (
        f"the experience is {staleness:.1f} weight versions old on average and the policy moved; "
        f"lower {' or '.join(settings)}"
    )
    if config.algorithm.rollout_correction == "none":
        text += ", or bound the weights of such tokens with algorithm.rollout_correction truncate"
    return text
