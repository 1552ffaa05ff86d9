"""A second implementation of the update, from the papers' formulas: plain torch, float64, full
logits, row by row.

Nothing here calls the trainer's own code. Sources: PPO (arXiv:1707.06347), dual clip (1912.09729),
GAE (1506.02438), GRPO (2402.03300), Dr. GRPO (2503.20783), RLOO (2402.14740), REINFORCE++
(2501.03262), OPO (2505.23585), GSPO (2507.18071), CISPO (2506.13585), DAPO (2503.14476), OPSM
(2512.02556), DPPO (Qi et al. 2026), IcePop (2510.18855), GDPO (2601.05242), MaxRL (2602.02710),
SAPO (2511.20347), ALP (2506.05256), decoupled PPO (2110.00641), adaptive KL (1909.08593), and
http://joschu.net/blog/kl-approx.html.
"""

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from common.settings.config import Config
from common.wire.schemas import Completion, Group


@dataclass
class Row:
    """A completion and the values used to train on it."""

    prompt: Tensor
    tokens: Tensor
    sampled: Tensor
    """[L] log-probabilities under the policy treated as the sampler."""
    start: Tensor
    """[L] log-probabilities under the policy before the update."""
    reference: Tensor | None
    advantage: Tensor
    returns: Tensor | None
    """[L] targets of the critic."""
    weight: float
    counts: bool
    current: bool


@dataclass
class Mini:
    """A mini-batch: its loss and gradient, and the columns [tokens] of the rows that contribute to
    the gradient."""

    loss: float
    gradient: Mapping[str, Tensor]
    columns: Mapping[str, Tensor]


class PaperUpdate:
    """Computes the update of `model` on `groups` under `config`.

    Args:
        model, reference: the policy before the update, and the reference model.
        weights: the importance weight of each group.
        values: the critic's values [L] for every completion.
        kl_coef: the KL coefficient, as adapted so far.
        step: the weight version of the policy.
    """

    def __init__(
        self,
        model: nn.Module,
        reference: nn.Module,
        config: Config,
        groups: Sequence[Group],
        weights: Sequence[float],
        values: Sequence[Tensor],
        kl_coef: float,
        step: int,
    ) -> None:
        self.model, self.config, self.kl_coef = copy.deepcopy(model).double(), config, kl_coef
        self.algorithm = config.algorithm
        reference = copy.deepcopy(reference).double()
        self.rows: list[Row] = []
        for group, weight in zip(groups, weights, strict=True):
            for completion in group.completions:
                prompt = torch.from_numpy(group.prompt_token_ids).long()
                tokens = torch.from_numpy(completion.token_ids).long()
                start = self.score(self.model, prompt, tokens)[0].detach()
                self.rows.append(
                    Row(
                        prompt,
                        tokens,
                        torch.from_numpy(completion.logprobs).double(),
                        start,
                        self.score(reference, prompt, tokens)[0].detach()
                        if self.algorithm.kl_coef
                        else None,
                        torch.zeros(0),
                        None,
                        weight,
                        not (
                            self.algorithm.mask_truncated and completion.finish_reason == "length"
                        ),
                        min(version for version, _, _ in completion.weight_versions) == step,
                    )
                )
        self._advantages(
            [completion for group in groups for completion in group.completions],
            len(groups),
            values,
        )

    def score(self, model: nn.Module, prompt: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the log-probabilities and entropies of the completion's tokens only."""
        logits = model(torch.cat([prompt, tokens])[None]).logits[0, len(prompt) - 1 : -1]
        logs = torch.log_softmax(logits / self.config.sampling.temperature, -1)
        return logs[torch.arange(len(tokens)), tokens], -(logs.exp() * logs).sum(-1)

    def _advantages(
        self, completions: Sequence[Completion], groups: int, values: Sequence[Tensor]
    ) -> None:
        settings, rows = self.algorithm, self.rows
        lengths = [len(row.tokens) for row in rows]
        penalised = settings.kl_coef > 0 and settings.kl_in == "reward"
        penalties = [
            self.kl_coef * (row.start - row.reference)
            if penalised and row.reference is not None
            else torch.zeros(length).double()
            for row, length in zip(rows, lengths, strict=True)
        ]
        rewards = [completion.reward for completion in completions]
        if settings.overlong_buffer:
            expected = self.config.sampling.max_new_tokens - settings.overlong_buffer
        shaped_by = (
            [[-max(0.0, n - expected) / settings.overlong_buffer for n in lengths]]
            if settings.overlong_buffer
            else []
        )
        if settings.length_penalty:
            size, longest = len(rows) // groups, self.config.sampling.max_new_tokens
            rates = [
                sum(c.correct for c in completions[i - i % size : i - i % size + size]) / size
                for i in range(len(rows))
            ]
            scaled = [settings.length_penalty * max(rate, 1 / size) for rate in rates]
            shaped_by.append([-each * n / longest for each, n in zip(scaled, lengths, strict=True)])
        rewards = [reward + sum(part[i] for part in shaped_by) for i, reward in enumerate(rewards)]
        if settings.advantage == "gae":
            for row, reward, penalty, value in zip(rows, rewards, penalties, values, strict=True):
                per_token = -penalty
                per_token[-1] += reward
                delta = per_token + settings.gamma * torch.cat([value[1:], torch.zeros(1)]) - value
                decay = settings.gamma * settings.gae_lambda
                row.advantage = torch.stack(
                    [
                        sum(decay ** (k - t) * delta[k] for k in range(t, len(delta)))
                        for t in range(len(delta))
                    ]
                )
                row.returns = row.advantage + value
        else:
            shaped = [
                r - float(penalty.sum()) for r, penalty in zip(rewards, penalties, strict=True)
            ]
            size = len(rows) // groups
            for first in range(0, len(rows), size):
                r = torch.tensor(shaped[first : first + size], dtype=torch.float64)
                n = torch.tensor(lengths[first : first + size], dtype=torch.float64)
                centred = r - r.mean()
                found = {
                    "group_normalised": centred / (r.std() + settings.advantage_eps),
                    "group_centred": centred,
                    "batch_normalised": centred,
                    "leave_one_out": torch.stack(
                        [r[i] - (r.sum() - r[i]) / (size - 1) for i in range(size)]
                    ),
                    "length_weighted": r - (n * r).sum() / n.sum(),
                    "mean_normalised": centred / (r.mean() if r.any() else 1),
                    "reward_normalised": self._gdpo(
                        completions[first : first + size], shaped_by, first
                    ),
                    "none": torch.zeros(size),
                }[settings.advantage]
                for row, advantage in zip(rows[first : first + size], found, strict=True):
                    row.advantage = advantage * torch.ones(len(row.tokens)).double()
        if settings.advantage == "reward_normalised":
            sums = torch.stack([row.advantage[0] for row in rows])
            for row in rows:
                row.advantage = (row.advantage - sums.mean()) / (
                    sums.std() + settings.advantage_eps
                )
        if settings.advantage in ("gae", "batch_normalised"):
            every = torch.cat([row.advantage for row in rows if row.counts])
            for row in rows:
                row.advantage = (row.advantage - every.mean()) / torch.sqrt(every.var() + 1e-8)
        if self.config.teacher.url:
            for row, completion in zip(rows, completions, strict=True):
                assert completion.teacher_logprobs is not None
                gap = row.start - torch.from_numpy(completion.teacher_logprobs).double()
                row.advantage = row.advantage - self.config.teacher.coef * gap

    def _gdpo(
        self, completions: Sequence[Completion], shaped_by: Sequence[Sequence[float]], first: int
    ) -> Tensor:
        """Returns the sum of the group's normalised rewards, not yet divided by the batch's
        standard deviation."""
        names = completions[0].components
        parts = [[float(c.components[name] or 0) for c in completions] for name in names]
        weights = [self.config.reward.weights.get(name, 1) for name in names] + [1] * len(shaped_by)
        total = torch.zeros(len(completions)).double()
        parts += [list(each[first : first + len(completions)]) for each in shaped_by]
        for weight, part in zip(weights, parts, strict=True):
            r = torch.tensor(part).double()
            total += weight * (r - r.mean()) / (r.std() + self.algorithm.advantage_eps)
        return total

    def load(self, parameters: Mapping[str, Tensor]) -> None:
        """Sets the policy's parameters."""
        self.model.load_state_dict(
            {name: tensor.double() for name, tensor in parameters.items()}, strict=False
        )

    def mini(self, indices: Sequence[int]) -> Mini:
        """Computes the loss on the rows at `indices` with the loaded parameters."""
        settings, total = (
            self.algorithm,
            sum(parameter.sum() * 0 for parameter in self.model.parameters()),
        )
        rows = [self.rows[i] for i in indices]
        tokens = sum(len(row.tokens) for row in rows)
        everyone = settings.entropy_coef > 0 or (settings.kl_coef > 0 and settings.kl_in == "loss")
        parts: list[dict[str, Tensor]] = []
        for row in rows:
            if not everyone and not row.advantage.any():
                continue
            loss, columns = self._row(row)
            parts.append(columns)
            length = len(row.tokens)
            total = (
                total
                + row.weight
                * {
                    "token_mean": loss.sum() / tokens,
                    "sequence_mean_token_mean": loss.sum() / length / len(rows),
                    "sequence_mean_token_sum": loss.sum() / len(rows),
                    "constant": loss.sum() / len(rows) / self.config.sampling.max_new_tokens,
                }[settings.aggregation]
            )
        names = parts[0] if parts else {}
        named = dict(self.model.named_parameters())
        gradient = dict(zip(named, torch.autograd.grad(total, list(named.values())), strict=True))
        return Mini(
            total.item(),
            gradient,
            {name: torch.cat([part[name] for part in parts]) for name in names},
        )

    def _row(self, row: Row) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the loss per token of a row, and its columns."""
        settings, advantage = self.algorithm, row.advantage
        logprobs, entropy = self.score(self.model, row.prompt, row.tokens)
        decoupled = settings.rollout_correction in ("truncate", "mask")
        rejects = (settings.geometric_low or 0) > 0 or (settings.geometric_high or 0) > 0
        old = row.start if decoupled or rejects else row.sampled
        if settings.importance_level == "sequence":
            ratio = torch.exp((logprobs - old).mean()).detach() * torch.exp(
                logprobs - logprobs.detach()
            )
        else:
            ratio = torch.exp(logprobs - old)
        bounded = torch.clamp(ratio, 1 - settings.clip_low, 1 + settings.clip_high)
        if settings.policy_loss == "cispo":
            objective, clipped = bounded.detach() * advantage * logprobs, bounded != ratio
        elif settings.policy_loss == "dppo":
            change = logprobs.exp() - row.sampled.exp()
            clipped = ((advantage > 0) & (change > settings.clip_high)) | (
                (advantage <= 0) & (-change > settings.clip_low)
            )
            objective = ratio * advantage * ~clipped
        elif settings.policy_loss == "sapo":
            tau = torch.tensor(
                [
                    settings.sapo_tau_positive if a > 0 else settings.sapo_tau_negative
                    for a in advantage
                ]
            )
            objective, clipped = (
                advantage * 4 / tau / (1 + torch.exp(-tau * (ratio - 1))),
                torch.zeros_like(ratio),
            )
        else:
            objective = torch.minimum(ratio * advantage, bounded * advantage)
            clipped = objective < ratio * advantage
            if settings.dual_clip is not None:
                least = settings.dual_clip * advantage
                clipped = clipped | ((advantage < 0) & (least > objective))
                objective = torch.where(advantage < 0, torch.maximum(objective, least), objective)
        if decoupled:
            log_weight = row.start - row.sampled
            weight, cap = torch.exp(log_weight), settings.correction_cap
            if settings.rollout_correction == "truncate":
                objective = objective * torch.clamp(weight, max=cap)
            else:
                floor = settings.correction_floor or 1 / cap
                objective = objective * ((weight <= cap) & (weight >= floor)) * weight
        if rejects:
            geometric = torch.exp((row.start - row.sampled).mean())
            inside = (
                (settings.geometric_low or 0) <= geometric <= (settings.geometric_high or math.inf)
            )
            objective = objective if inside else objective * 0
        if settings.off_policy_delta is not None:
            moved = (row.sampled - logprobs).mean() > settings.off_policy_delta
            objective = torch.where((advantage < 0) & moved, 0.0, objective)
        loss = -objective - settings.entropy_coef * entropy
        kl_reference = torch.zeros_like(logprobs)
        if row.reference is not None:
            difference = row.reference - logprobs
            kl_reference = torch.exp(difference) - 1 - difference
            if settings.kl_in == "loss":
                loss = (
                    loss
                    + self.kl_coef
                    * {"k2": difference**2 / 2, "k3": kl_reference}[settings.kl_estimator]
                )
        moved_on, apart = torch.exp(logprobs - old), torch.exp(logprobs - row.sampled)
        columns = {
            "ratio": ratio,
            "clip_fraction": clipped.double(),
            "entropy": entropy,
            "kl_reference": kl_reference,
            "kl_old": moved_on - 1 - (logprobs - old),
            "delta": (logprobs - row.sampled).abs(),
            "kl_rollout": apart - 1 - (logprobs - row.sampled),
            "apart": apart,
            "current": torch.full_like(logprobs, float(row.current)),
        }
        return loss, {name: column.detach() for name, column in columns.items()}

    def metrics(self, minis: Sequence[Mini], norms: Sequence[float]) -> dict[str, Any]:
        """Returns the metrics of an update that computed `minis` and applied gradients with these
        norms."""
        every = {
            name: torch.cat([mini.columns[name] for mini in minis if mini.columns])
            for name in minis[0].columns
        }
        first = minis[0].columns
        if not every:
            return {}
        apart, current = first["apart"], first["current"].bool()
        return {
            name: float(every[name].mean())
            for name in ("ratio", "clip_fraction", "entropy", "kl_reference")
        } | {
            "loss": sum(mini.loss for mini in minis) / len(minis),
            "grad_norm": sum(norms) / max(1, len(norms)),
            "trained_tokens": len(every["ratio"]),
            "kl_rollout": float(first["kl_rollout"].mean()),
            "delta_logprob": float(first["delta"].mean()),
            "delta_logprob_current": float(first["delta"][current].mean())
            if current.any()
            else 0.0,
            "effective_sample_size": float(apart.sum() ** 2 / apart.square().sum() / len(apart)),
            "kl_coef": self.kl_coef,
            "updates": len(norms),
        }

    def next_kl_coef(self, kl: float) -> float:
        """Returns the coefficient after a batch whose KL to the reference is `kl` per token."""
        if self.algorithm.kl_target is None:
            return self.kl_coef
        error = min(max(kl / self.algorithm.kl_target - 1, -0.2), 0.2)
        return self.kl_coef * (1 + error * len(self.rows) / 10_000)


def adamw(
    parameters: Mapping[str, Tensor],
    gradients: Sequence[Mapping[str, Tensor]],
    rate: float,
    config: Config,
) -> dict[str, Tensor]:
    """Returns the parameters after AdamW steps (arXiv:1711.05101) with gradients clipped by norm,
    in float64."""
    settings, now = config.optimizer, {name: tensor.double() for name, tensor in parameters.items()}
    (b1, b2), eps = settings.adam_betas, 1e-8
    mean, square = (
        {name: torch.zeros_like(tensor) for name, tensor in now.items()} for _ in range(2)
    )
    for step, found in enumerate(gradients, 1):
        norm = math.sqrt(
            sum(float(gradient.double().square().sum()) for gradient in found.values())
        )
        for name in now:
            gradient = found.get(
                name, torch.zeros_like(now[name])
            ).double()  # no gradient if no row has an advantage
            clipped = gradient * min(1.0, settings.max_grad_norm / (norm + 1e-6))
            mean[name] = b1 * mean[name] + (1 - b1) * clipped
            square[name] = b2 * square[name] + (1 - b2) * clipped**2
            now[name] = now[name] * (1 - rate * settings.weight_decay)
            now[name] = now[name] - rate * (mean[name] / (1 - b1**step)) / (
                (square[name] / (1 - b2**step)).sqrt() + eps
            )
    return now
