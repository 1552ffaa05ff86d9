"""The settings of the algorithm, and the recipes: sparse presets of them under the names the field knows."""

from collections.abc import Callable
from typing import Any, Literal

from pydantic import Field, model_validator

from common.sections import Main, Section

RECIPES: dict[str, dict[str, Any]] = {
    "grpo": {},
    "dr_grpo": {"advantage": "group_centred", "aggregation": "constant"},
    "dapo": {"clip_high": 0.28, "dynamic_sampling": True},
    "gspo": {
        "importance_level": "sequence",
        "clip_low": 3e-4,
        "clip_high": 4e-4,
        "aggregation": "sequence_mean_token_mean",
    },
    "cispo": {"policy_loss": "cispo", "clip_low": 1.0, "clip_high": 4.0},
    "rloo": {"advantage": "leave_one_out"},
    "reinforce_pp": {"advantage": "batch_normalised"},
    "opo": {"advantage": "length_weighted"},
    "ppo": {"advantage": "gae", "update_epochs": 2, "mini_batches": 2},
}
"""The settings of each named algorithm, where they differ from the defaults of `AlgorithmSection`."""

RECIPES_HELP = "; ".join(
    name + (" (" + ", ".join(f"{key} {value}" for key, value in preset.items()) + ")" if preset else " (the defaults)")
    for name, preset in RECIPES.items()
)


class AlgorithmSection(Section):
    """The update that a batch makes. A recipe sets the rest; explicit settings win; a setting that nothing reads is refused."""

    name: Main[Literal["grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "reinforce_pp", "opo", "ppo"]] = Field(
        "grpo", description=f"The recipe: {RECIPES_HELP}."
    )
    advantage: Literal["group_normalised", "group_centred", "leave_one_out", "batch_normalised", "length_weighted", "gae"] = (
        "group_normalised"
    )
    """Advantages from rewards: compared within the group or batch, or (`gae`) with a critic's values."""
    advantage_eps: float = Field(1e-6, gt=0)
    """Added to the standard deviation (group_normalised)."""
    gamma: float = Field(1.0, gt=0, le=1)
    """Discount per token (`gae`), above 0 to 1."""
    gae_lambda: float = Field(1.0, ge=0, le=1)
    """λ of `gae`, 0 to 1: 1 trusts the rewards (no bias), 0 the critic (little variance)."""
    policy_loss: Literal["clip", "cispo"] = "clip"
    """PPO's clipped surrogate, or CISPO, whose clipped tokens keep their gradient."""
    importance_level: Literal["token", "sequence"] = "token"
    """Probability ratio of each token, or one for the whole completion (GSPO)."""
    clip_low: Main[float] = Field(0.2, gt=0, le=1)
    """Lower clip range: the probability ratio is clipped to [1 - clip_low, 1 + clip_high]."""
    clip_high: Main[float] = Field(0.2, gt=0)
    """Upper clip range of the probability ratio."""
    dual_clip: float | None = Field(None, gt=1)
    """Bound c above 1 on the loss of tokens with negative advantage, -c·A; usually 3. Unset: no bound."""
    aggregation: Literal["token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "constant"] = "token_mean"
    """Reduction of the losses of the batch's tokens to one number."""
    update_epochs: Main[int] = Field(1, gt=0)
    """Passes of policy and critic over each batch."""
    mini_batches: Main[int] = Field(1, gt=0)
    """Optimiser updates per pass, each on a share of the batch's completions."""
    early_stop_kl: float | None = Field(None, gt=0)
    """KL per token from the policy before the update, above which the rest of the batch is skipped. Unset: no limit."""
    kl_coef: Main[float] = Field(0.0, ge=0)
    """Weight of the KL divergence to the reference model (`model.reference`). 0: no reference model is loaded."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Schulman's estimator of the KL divergence (http://joschu.net/blog/kl-approx.html). In the loss `k2`, whose gradient is
    that of KL(policy ‖ reference), or `k3`: KL(reference ‖ policy). In the reward always `k1`, which is the default there."""
    kl_in: Literal["loss", "reward"] = "loss"
    """The KL is a term of the `loss`, or is subtracted from the `reward` before the advantages."""
    kl_target: float | None = Field(None, gt=0)
    """KL per token near which kl_coef is adapted to stay (Ziegler et al. 2019). Unset: kl_coef is fixed."""
    reference_refresh: int = Field(0, ge=0)
    """Steps after which the policy becomes its own reference. 0: the reference stays as it was loaded."""
    entropy_coef: float = Field(0.0, ge=0)
    """Weight of the entropy bonus, which keeps the policy from becoming certain too early."""
    dynamic_sampling: Main[bool] = False
    """Replace groups of equal rewards, which carry no gradient, until the batch is full."""
    dynamic_sampling_rounds: int = Field(10, gt=0)
    """Rounds of replacing without a full batch after which the run ends."""
    overlong_buffer: int = Field(0, ge=0)
    """Tokens before sampling.max_new_tokens over which a length penalty rises from 0 to 1 (DAPO); 0: no penalty."""
    mask_truncated: bool = False
    """Leave completions cut at sampling.max_new_tokens out of the loss. They still count in their group's statistics."""
    rollout_correction: Literal["auto", "none", "truncate", "mask"] = "auto"
    """Importance weights of the policy loss, between the rollout engine's policy and the trainer's before the update. `auto`:
    `truncate` with trainer.max_staleness above 0, else `none`; the saved configuration has what it came to."""
    correction_level: Literal["token", "sequence"] = "token"
    """Importance weight of each token, or one for the whole completion."""
    correction_cap: float = Field(2.0, gt=1)
    """Bound above 1: `truncate` cuts weights at it, `mask` drops those above it or below its inverse."""
    off_policy_delta: float | None = Field(None, gt=0)
    """Mean log ratio behaviour/policy above which completions with negative advantage are dropped (OPSM). Unset: none."""

    @model_validator(mode="wrap")
    @classmethod
    def _recipe(cls, data: Any, handler: Callable[[Any], "AlgorithmSection"]) -> "AlgorithmSection":
        if not isinstance(data, dict):
            return handler(data)
        name = data.get("name", "grpo")
        preset = RECIPES.get(name, {}) if isinstance(name, str) else {}
        if data.get("kl_in") == "reward":
            preset = preset | {"kl_estimator": "k1"}
        section = handler({**preset, **data})
        defaults = {name: field.default for name, field in cls.model_fields.items()} | preset
        for name, reason in section._unread().items():
            if name in data and getattr(section, name) != defaults[name]:
                raise ValueError(f"algorithm.{name} is set but not read, since {reason}: leave it out")
        if section.kl_coef and section.kl_in == "reward" and section.kl_estimator != "k1":
            raise ValueError(
                f"algorithm.kl_estimator {section.kl_estimator} with algorithm.kl_in reward, where only k1, the log ratio, has "
                "the gradient of the KL divergence, and others can push away from the reference: take k1, or "
                "algorithm.kl_in loss"
            )
        if section.kl_coef and section.kl_in == "loss" and section.kl_estimator == "k1":
            raise ValueError(
                "algorithm.kl_estimator k1 with algorithm.kl_in loss has an expected gradient of 0: take k2 (the gradient of "
                "KL(policy ‖ reference)) or k3 (of KL(reference ‖ policy)), or algorithm.kl_in reward"
            )
        return section

    @property
    def caution(self) -> str | None:
        """Returns what a user of these settings has to know, None for nothing."""
        if self.kl_coef and self.kl_in == "reward" and self.advantage == "group_normalised":
            return (
                "algorithm.kl_in reward with algorithm.advantage group_normalised: in a group of equal rewards only the KL "
                "differs, and its noise is scaled to a standard deviation of 1, whatever algorithm.kl_coef is. Take "
                "algorithm.advantage group_centred or leave_one_out, which do not scale, or algorithm.kl_in loss"
            )
        return None

    @property
    def needs_critic(self) -> bool:
        return self.advantage == "gae"

    @property
    def correction(self) -> Literal["truncate", "mask"] | None:
        """`rollout_correction` of a whole configuration, which has resolved `auto`; None where there is none."""
        assert self.rollout_correction != "auto", "common.config resolves it"
        return None if self.rollout_correction == "none" else self.rollout_correction

    @property
    def updates_per_batch(self) -> int:
        return self.update_epochs * self.mini_batches

    def _unread(self) -> dict[str, str]:
        """Settings that the others make pointless, and why."""
        unread: dict[str, str] = {}
        if self.advantage != "group_normalised":
            unread["advantage_eps"] = f"advantage is {self.advantage}, not group_normalised"
        if self.advantage != "gae":
            unread |= dict.fromkeys(("gamma", "gae_lambda"), f"advantage is {self.advantage}, not gae")
        if self.policy_loss == "cispo":
            unread["dual_clip"] = "policy_loss is cispo"
        if self.updates_per_batch == 1:
            unread["early_stop_kl"] = "update_epochs and mini_batches are 1"
        if self.kl_coef == 0:
            without = ("kl_estimator", "kl_in", "kl_target", "reference_refresh")
            unread |= dict.fromkeys(without, "kl_coef is 0, so there is no reference model")
        if not self.dynamic_sampling:
            unread["dynamic_sampling_rounds"] = "dynamic_sampling is off"
        if self.rollout_correction == "none":
            unread["correction_level"] = unread["correction_cap"] = "rollout_correction is none"
        return unread
