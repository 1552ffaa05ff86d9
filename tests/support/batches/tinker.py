"""Tinker runs on a tiny base model, and the same numbers by plain torch."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.func import functional_call
from transformers import AutoModelForCausalLM

from common.errors import InvalidInput
from common.settings.config import Config, from_mapping
from learning.ranks import Ranks
from tests.support.batches.groups import VOCABULARY
from tests.support.errors import raises
from trainer.tinker.interface import AdamParams, Datum, LoraSpec, Outputs
from trainer.tinker.learner import RunLearner

ALPHA = 32.0
LENGTHS = (7, 12, 3, 20)


def settings(base: Path, **more: Any) -> Config:
    """Returns the settings of a learner; names in `more` have a double underscore instead of the
    dot."""
    named = {name.replace("__", "."): value for name, value in more.items()}
    return from_mapping({"model.name": str(base), **named})


def learner(base: Path, **more: Any) -> RunLearner:
    config = settings(base, **more)
    return RunLearner(config, Ranks.alone(config))


def random_data(seed: int = 0, several: int = 0) -> list[Datum]:
    """Returns data with inputs for every loss; with `several`, that many targets for each token."""
    random = np.random.default_rng(seed)
    data: list[Datum] = []
    for length in LENGTHS:
        shape = (length, several) if several else (length,)
        mask = (np.arange(length) >= length // 2).astype(np.float32)
        data.append(
            Datum(
                tokens=random.integers(0, VOCABULARY, length).tolist(),
                inputs={
                    "target_tokens": random.integers(0, VOCABULARY, shape),
                    "weights": random.normal(size=shape).astype(np.float32),
                    "logprobs": random.normal(-5, 0.5, shape).astype(np.float32),
                    "advantages": random.normal(size=shape).astype(np.float32),
                    "sequence_ratio_mask": mask,
                },
            )
        )
    return data


def only(data: Sequence[Datum], *names: str) -> list[Datum]:
    """Returns the data with their targets and these inputs."""
    kept = ("target_tokens", *names)
    return [Datum(each.tokens, {name: each.inputs[name] for name in kept}) for each in data]


def _layer(name: str) -> str:
    return name.removeprefix("base_model.model.").rpartition(".lora_")[0]


@dataclass
class PlainRun:
    """A saved run, in plain torch: the base by transformers, W + alpha / rank × B A, autograd."""

    factors: dict[str, Tensor]
    """By PEFT's names, in the order of the run's vectors."""
    gradient: Tensor | None
    """[N] of the saved run, if it had one."""
    model: Any
    rank: int

    @classmethod
    def of(cls, base: Path, folder: Path) -> "PlainRun":
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
        content = json.loads((folder / "run.json").read_text())
        stored = load_file(folder / "adapter_model.safetensors")
        # The vectors have the model's order, which those of modules here is too.
        names = [name for name, _ in model.named_modules()]
        order = sorted(stored, key=lambda name: (names.index(_layer(name)), name))
        factors = {name: stored[name].requires_grad_() for name in order}
        state: Mapping[str, Tensor] = {}
        if (folder / "optimizer.safetensors").exists():
            state = load_file(folder / "optimizer.safetensors")
        return cls(factors, state.get("gradient"), model, content["lora"]["rank"])

    def logprobs(self, datum: Datum) -> Tensor:
        """Returns the log-probabilities of the targets, in their shape."""
        weights: dict[str, Tensor] = dict(self.model.named_parameters(remove_duplicate=False))
        weights["lm_head.weight"] = self.model.lm_head.weight  # also if it is the embedding
        for name in list(weights):
            key = f"base_model.model.{name.removesuffix('.weight')}"
            lora_a = self.factors.get(f"{key}.lora_A.weight")
            if lora_a is not None:
                lora_b = self.factors[f"{key}.lora_B.weight"]
                weights[name] = weights[name].detach() + ALPHA / self.rank * lora_b @ lora_a
        head = weights.pop("lm_head.weight")
        inside = {
            name.removeprefix("model."): tensor
            for name, tensor in weights.items()
            if name.startswith("model.")
        }
        states = functional_call(
            self.model.model, inside, (), {"input_ids": torch.tensor([datum.tokens])}
        ).last_hidden_state[0]
        all_logprobs = (states @ head.t()).log_softmax(-1)
        targets = torch.from_numpy(datum.inputs["target_tokens"])
        found = all_logprobs.gather(1, targets.reshape(len(datum.tokens), -1))
        return found.reshape(targets.shape)

    def gradient_of(self, loss: Tensor) -> Tensor:
        """Returns [N] the gradient of a loss by all factors."""
        parts = torch.autograd.grad(loss, self.all_factors, retain_graph=True)
        return torch.cat([part.flatten() for part in parts])

    def as_gradient_of(self, factors: Sequence[Tensor]) -> None:
        """Gives these factors the gradient that was saved with this run."""
        assert self.gradient is not None
        parts = self.gradient.split([factor.numel() for factor in factors])
        for factor, part in zip(factors, parts, strict=True):
            factor.grad = part.view_as(factor).clone()

    @property
    def all_factors(self) -> list[Tensor]:
        return list(self.factors.values())


def story(runs: RunLearner, folder: Path) -> list[float]:
    """Lets two runs learn in turn, one of which leaves memory and comes back, between requests that
    fail; returns the numbers that they report, and leaves both in `folder`."""
    folder.mkdir()
    numbers: list[float] = []
    data = only(random_data(), "weights")
    sampled = only(random_data(1), "logprobs", "advantages", "sequence_ratio_mask")
    unmasked = only(sampled, "logprobs", "advantages")
    far = np.full(LENGTHS[0], -300, np.float32)
    # Its ratio is infinite, which only the pass shows.
    hopeless = Datum(unmasked[0].tokens, {**unmasked[0].inputs, "logprobs": far})
    runs.create("a", LoraSpec(rank=3, seed=1))
    runs.create("b", LoraSpec(rank=4, seed=2, train_unembed=False))
    for turn in range(3):
        # The first has fewer data than there are ranks.
        for run, some in (("a", data[:1]), ("b", data)):
            outputs = [
                runs.forward_backward(run, some, "cross_entropy", {}),
                runs.forward_backward(run, sampled, "gspo", {"clip_high_threshold": 30.0}),
                runs.forward(run, unmasked[:3], "cispo", {}) if turn else Outputs([], {}),
            ]
            for output in outputs:
                numbers += output.metrics.values()
                numbers += [number for each in output.logprobs for number in each]
            with raises(InvalidInput, value="not finite"):
                runs.forward_backward(run, [hopeless], "importance_sampling", {})
            if turn == 1 and run == "b":
                runs.save(run, folder / "left")
                runs.unload(run)
                runs.load(run, folder / "left", optimizer=True)
            adam = AdamParams(learning_rate=1e-3, weight_decay=0.1, grad_clip_norm=3.0)
            numbers += runs.optim_step(run, adam).values()
    for run in ("a", "b"):
        runs.save(run, folder / run)
    return numbers
