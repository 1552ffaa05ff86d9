"""The settings of the algorithm, and the recipes: partial presets under the algorithms' usual
names.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from common import Json
from common.settings.section import InHelp, Section, among

RECIPES: dict[str, Json] = {
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
    "dppo": {"policy_loss": "dppo", "rollout_correction": "none"},
    "icepop": {"rollout_correction": "mask", "correction_floor": 0.5, "correction_cap": 5.0},
    "geo_rs": {"geometric_low": 0.999, "geometric_high": 1.001},
    "gdpo": {"advantage": "reward_normalised"},
    "maxrl": {"advantage": "mean_normalised"},
    "sapo": {"policy_loss": "sapo", "aggregation": "sequence_mean_token_mean"},
    "alp": {"length_penalty": 0.1},
    "opd": {"advantage": "none"},
}
"""The settings of each named algorithm, where they differ from the defaults of
`AlgorithmSection`."""


def preset(given: Mapping[str, Any]) -> Json:
    """Returns what the recipe of these settings sets, and what `kl_in` reward does."""
    name = given.get("name", "grpo")
    estimator = {"kl_estimator": "k1"} if given.get("kl_in") == "reward" else {}
    return (RECIPES.get(name, {}) if isinstance(name, str) else {}) | estimator


_Published = Literal[
    "grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "reinforce_pp", "opo", "ppo"
]
_Recent = Literal["dppo", "icepop", "geo_rs", "gdpo", "maxrl", "sapo", "alp", "opd"]
Recipe = Literal[_Published, _Recent]
ADVANTAGES = (
    "group_normalised",
    "group_centred",
    "leave_one_out",
    "batch_normalised",
    "length_weighted",
    "mean_normalised",
    "reward_normalised",
    "gae",
    "none",
)
"""The built-in advantages (`trainer/algorithms/advantages.py`)."""
LOSSES = ("clip", "cispo", "dppo", "sapo")
"""The built-in losses (`trainer/algorithms/losses.py`)."""


def _recipe_help(name: str) -> str:
    settings = [f"{key} {value}" for key, value in RECIPES[name].items()]
    return f"{name} ({', '.join(settings) or 'the defaults'})"


RECIPES_HELP = "; ".join(map(_recipe_help, RECIPES))
"""Every recipe and what it sets, for `--help`."""


TURN_ADVANTAGES = ("group_normalised", "group_centred", "batch_normalised")
"""Values of `advantage` that can compare single turns of episodes (`environment.turn_discount`)."""


class AlgorithmSection(Section):
    """How a batch updates the policy.

    A recipe sets defaults; explicit settings win; settings nothing reads are refused.
    """

    name: InHelp[Recipe] = Field("grpo", description=f"The recipe: {RECIPES_HELP}.")
    advantage: Annotated[str, among(*ADVANTAGES)] = "group_normalised"
    """Advantages from rewards: compared within the group or batch, or (`gae`) with a critic's
    values. `reward_normalised` (GDPO) normalises the scores of each reward function separately.
    `none`: learn only from the teacher (`teacher.url`). `package.module:name`: a function of yours
    (docs/how-to/add-an-algorithm.md)."""
    advantage_eps: PositiveFloat = 1e-6
    """Added to the standard deviation (group_normalised, reward_normalised)."""
    gamma: float = Field(1.0, gt=0, le=1)
    """Discount per token (`gae`), above 0 and at most 1."""
    gae_lambda: float = Field(1.0, ge=0, le=1)
    """λ of `gae`, 0 to 1: 1 trusts the rewards (no bias), 0 the critic (little variance)."""
    policy_loss: Annotated[str, among(*LOSSES)] = "clip"
    """PPO's clipped surrogate; CISPO, where clipped tokens keep their gradient; DPPO, which leaves
    out tokens whose probability moved by more than clip_low or clip_high; SAPO's sigmoid of the
    ratio; or `package.module:name`, a function of yours (docs/how-to/add-an-algorithm.md)."""
    importance_level: Literal["token", "sequence"] = "token"
    """Probability ratio of each token, or one for the whole completion (GSPO)."""
    clip_low: float = Field(0.2, gt=0, le=1)
    """Lower clip range: the probability ratio is clipped to [1 - clip_low, 1 + clip_high]."""
    clip_high: InHelp[PositiveFloat] = 0.2
    """Upper clip range of the probability ratio."""
    sapo_tau_positive: PositiveFloat = 1.0
    """Steepness of SAPO's sigmoid for tokens with a positive advantage."""
    sapo_tau_negative: PositiveFloat = 1.05
    """Steepness of SAPO's sigmoid for the other tokens."""
    dual_clip: float | None = Field(None, gt=1)
    """Bound c above 1 on the loss of tokens with negative advantage, -c·A; usually 3. Unset: no
    bound."""
    aggregation: Literal[
        "token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "constant"
    ] = "token_mean"
    """Reduction of the losses of the batch's tokens to one number."""
    update_epochs: InHelp[PositiveInt] = 1
    """Passes of policy and critic over each batch."""
    mini_batches: PositiveInt = 1
    """Optimiser updates per pass, each on a share of the batch's completions."""
    early_stop_kl: float | None = Field(None, gt=0)
    """KL per token to the policy before the update above which the rest of the batch is skipped.
    Unset: no limit."""
    kl_coef: InHelp[NonNegativeFloat] = 0.0
    """Weight of the KL divergence to the reference model (`model.reference`). 0: no reference model
    is loaded."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Schulman's estimator of the KL divergence (http://joschu.net/blog/kl-approx.html). In the
    loss: `k2`, which has the gradient of KL(policy ‖ reference), or `k3`, which has that of
    KL(reference ‖ policy). In the reward: `k1` only, the default there."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Add the KL to the `loss`, or subtract it from the `reward` before the advantages are
    computed."""
    kl_target: float | None = Field(None, gt=0)
    """Target KL per token, to which kl_coef is adapted (Ziegler et al. 2019). Unset: kl_coef is
    fixed."""
    reference_refresh: NonNegativeInt = 0
    """Steps after which the current policy becomes the reference. 0: the reference stays as it was
    loaded."""
    entropy_coef: NonNegativeFloat = 0.0
    """Weight of the entropy bonus, which keeps the policy from becoming deterministic too early."""
    dynamic_sampling: InHelp[bool] = False
    """Replace groups of equal rewards, which carry no gradient, until the batch is full."""
    dynamic_sampling_rounds: PositiveInt = 10
    """Rounds of replacement without a full batch after which the run ends."""
    overlong_buffer: NonNegativeInt = 0
    """Tokens before sampling.max_new_tokens over which a length penalty rises from 0 to 1 (DAPO);
    0: no penalty."""
    length_penalty: NonNegativeFloat = 0.0
    """Length penalty of a completion of sampling.max_new_tokens in a group with pass rate 1. The
    penalty is proportional to length and pass rate (ALP)."""
    mask_truncated: bool = False
    """Leave completions cut at sampling.max_new_tokens out of the loss. They still count in their
    group's statistics."""
    rollout_correction: Literal["auto", "none", "truncate", "mask"] = "auto"
    """Importance weights of the policy loss, between the rollout engine's policy and the trainer's
    before the update. `auto`: `truncate` with trainer.max_staleness above 0 or engines on GPUs,
    else `none`; the saved configuration has the outcome."""
    old_logprobs: Literal["auto", "engine", "trainer"] = "auto"
    """Old log-probabilities of the ratio and its clipping: the `engine`'s, or the `trainer`'s own
    before the update. `auto`: the trainer's with a rollout_correction, and in bfloat16 with
    importance_level sequence."""
    correction_cap: float = Field(2.0, gt=1)
    """Bound above 1: `truncate` cuts weights at it, `mask` drops those above it."""
    correction_floor: float | None = Field(None, gt=0, lt=1)
    """Bound below 1, under which `mask` drops weights. Unset: the inverse of correction_cap."""
    geometric_low: float | None = Field(None, gt=0, lt=1)
    """Geometric mean of the trainer's probabilities / the rollout engine's, under which a whole
    completion is dropped."""
    geometric_high: float | None = Field(None, gt=1)
    """Upper bound of that mean; a completion above it is dropped. Unset: no bound."""
    off_policy_delta: float | None = Field(None, gt=0)
    """Mean log ratio behaviour/policy above which completions with negative advantage are dropped
    (OPSM). Unset: none."""

    @model_validator(mode="before")
    @classmethod
    def _recipe(cls, given: Any) -> Any:
        """Adds the recipe's settings to those that are given."""
        return {**preset(given), **given} if isinstance(given, dict) else given

    @property
    def caution(self) -> str | None:
        """Returns a warning about these settings, or None."""
        if self.kl_coef and self.kl_in == "reward" and self.advantage == "group_normalised":
            return (
                "algorithm.kl_in reward with algorithm.advantage group_normalised: in a group of "
                "equal rewards only the KL differs, and its noise is scaled to a standard "
                "deviation of 1, whatever algorithm.kl_coef is. Use algorithm.advantage "
                "group_centred or leave_one_out, which do not scale, or algorithm.kl_in loss"
            )
        return None

    @property
    def needs_critic(self) -> bool:
        return self.advantage == "gae"

    @property
    def correction(self) -> Literal["truncate", "mask"] | None:
        """`rollout_correction` once the configuration has resolved `auto`; None for `none`."""
        assert self.rollout_correction != "auto", "common.settings.config resolves it"
        return None if self.rollout_correction == "none" else self.rollout_correction

    @property
    def rejects(self) -> bool:
        """Whether whole completions are dropped by their geometric mean."""
        return self.geometric_low is not None or self.geometric_high is not None

    def own_old_logprobs(self, low_precision: bool) -> bool:
        """Whether the old log-probabilities are the trainer's own.

        `low_precision`: the trainer computes in bfloat16.
        """
        if self.old_logprobs == "auto":
            compares = self.correction is not None or self.rejects
            return compares or (low_precision and self.importance_level == "sequence")
        return self.old_logprobs == "trainer"

    @property
    def updates_per_batch(self) -> int:
        return self.update_epochs * self.mini_batches
