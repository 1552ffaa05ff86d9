"""Records what `rlhf audit` needs to re-execute a step: `audit.jsonl`, with `trainer.audit`.

The groups of a step are in `groups/` already, in batch order with tokens, log-probabilities,
rewards and advantages, and its numbers in `metrics.jsonl`. A line here has what they lack:

| line | when | content |
|---|---|---|
| `AuditedStart` | an attempt begins | settings, packages, ranks, checksum of the weights |
| `AuditedStep` | after every step | seeds, and checksums of gradients, weights and other results |

Nothing is pickled: a reader needs JSON and, for `groups/`, msgpack.
"""

import platform
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
import torch
from msgspec import ValidationError
from torch import Tensor

from common import VERSION, Json
from common.weights.checksums import Hasher
from common.wire.schemas import Float32
from learning.digest import digest
from learning.ranks import Ranks
from learning.sharding import named_tensors
from trainer.algorithms.batch import Batch
from trainer.observe.run_dir import (
    AUDIT,
    append_line,
    audited_steps,
    damaged,
    not_audited,
    read_lines,
)
from trainer.policy.critic import ValueFunction
from trainer.policy.policy import Policy, PolicyUpdate
from trainer.rollouts.requests import sampling_seed

# The packages that compute what is compared.
_PACKAGES = ("torch", "transformers", "tokenizers", "numpy", "safetensors", "peft")
Given = Literal["prompts", "rewards", "environment"]
"""What a caller of the Python API may give in the place of settings."""


class Setup(msgspec.Struct, kw_only=True):
    """What the bits of a result depend on, besides its inputs."""

    packages: dict[str, str]
    world_size: int
    threads: int
    """Threads of torch in a rank."""
    device: str
    """`cpu`, or the name of the GPU."""
    instructions: str
    """The vector instructions that torch uses on this processor."""

    @classmethod
    def here(cls, ranks: Ranks) -> "Setup":
        """Returns the setup of this process."""
        device = torch.cuda.get_device_name(ranks.device) if ranks.on_gpu else "cpu"
        return cls(
            packages={name: _version(name) for name in _PACKAGES} | {"rlhf-math": VERSION},
            world_size=ranks.world_size,
            threads=torch.get_num_threads(),
            device=device,
            instructions=f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
        )


class AuditedStart(msgspec.Struct, kw_only=True, tag_field="kind", tag="start"):
    """The line of an attempt in `audit.jsonl`: it begins or continues a run."""

    step: int
    """The step that it continues after; 0 for a new run."""
    run_id: str
    config: Json
    setup: Setup
    weights: str
    """Checksum of the trained weights at `step`."""
    engine: str
    """`embedded` or `sglang`."""
    given: list[Given]
    """What the caller of the Python API gave in the place of settings. The prompts are kept
    (`trainer.observe.problems`); rewards and environment, which are objects, are not."""


class AuditedStep(msgspec.Struct, kw_only=True, tag_field="kind", tag="step"):
    """The line of a trained step in `audit.jsonl`."""

    step: int
    run_id: str
    total_steps: int | None
    """Steps of the run, which a falling learning rate depends on."""
    groups: list[str]
    """Ids in batch order; `groups/` has their content."""
    seeds: list[int]
    """The sampling seed of each group; a completion's is `sample_seed(seed, its index)`."""
    reference_logprobs: str | None
    """Checksum of the reference's log-probabilities of the batch; None without one."""
    values: str | None
    """Checksum of the critic's values before the update; None without one."""
    norms: list[float]
    """Norm of the gradient of each optimiser update, before clipping."""
    gradients: list[str]
    """Checksum of each of these gradients."""
    weights: str
    """Checksum of the trained weights after the step."""
    critic: str | None = None
    """Checksum of the critic's weights after the step; None without one."""
    seconds: float = 0.0
    """What the audit of the step took, its checksums included."""


class Audit:
    """Records a run with `trainer.audit`; `directory` is None on ranks above 0, which only compute
    their part of the checksums.
    """

    def __init__(self, directory: Path | None, run_id: str) -> None:
        self._path = None if directory is None else directory / AUDIT
        self._run_id = run_id

    def begin(self, policy: Policy, engine: str, given: Sequence[Given]) -> None:
        """Records the start of an attempt. A collective."""
        start = AuditedStart(
            step=policy.step,
            run_id=self._run_id,
            config=policy.config.model_dump(mode="json"),
            setup=Setup.here(policy.ranks),
            weights=policy.digest(),
            engine=engine,
            given=list(given),
        )
        self._write(start)

    def step(
        self, policy: Policy, critic: ValueFunction, batch: Batch, update: PolicyUpdate
    ) -> None:
        """Records a step that was just trained. A collective."""
        began = time.perf_counter()
        line = audited_step(policy, critic, batch, update, run_id=self._run_id)
        line.seconds = round(time.perf_counter() - began + update.digest_seconds, 6)
        self._write(line)

    def _write(self, line: AuditedStart | AuditedStep) -> None:
        if self._path is not None:
            append_line(self._path, msgspec.to_builtins(line))


def audited_step(
    policy: Policy,
    critic: ValueFunction,
    batch: Batch,
    update: PolicyUpdate,
    *,
    run_id: str = "",
) -> AuditedStep:
    """Returns the line of a step that was just trained. A collective."""
    config = policy.config
    groups = [item.group for item in batch.groups]
    columns = [
        column and batch.gathered(column, policy.ranks)
        for column in (batch.ref_logprobs, batch.values)
    ]
    tensors: list[tuple[str, Tensor]] = []
    for model in critic.resident()[0]:
        tensors += named_tensors(model).items()
    return AuditedStep(
        step=policy.step,
        run_id=run_id,
        total_steps=policy.total_steps,
        groups=[group.id for group in groups],
        seeds=[sampling_seed(config.seed, group.position) for group in groups],
        reference_logprobs=_column_digest(columns[0]),
        values=_column_digest(columns[1]),
        norms=list(update.norms),
        gradients=list(update.gradients),
        weights=policy.digest(),
        critic=digest(tensors, policy.ranks) if tensors else None,
    )


def _column_digest(column: Sequence[Float32] | None) -> str | None:
    """Returns the checksum of a column of a batch; None for one that was not computed."""
    if column is None:
        return None
    flat = np.concatenate(column) if len(column) else np.zeros(0, np.float32)
    return Hasher(np.ascontiguousarray(flat, np.float32).data).hexdigest()


class AuditRecord:
    """The lines of `audit.jsonl` of a run. Raises ConfigError when there are none, or one is
    damaged.
    """

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / AUDIT
        audited_steps(run_dir)
        self._starts: dict[str, AuditedStart] = {}
        self._steps: dict[int, AuditedStep] = {}
        for line in read_lines(self.path):
            try:
                found: AuditedStart | AuditedStep = msgspec.convert(
                    line, AuditedStart | AuditedStep
                )
            except ValidationError as error:
                raise damaged(
                    f"a line of the audit record is damaged: {error}", self.path
                ) from None
            if isinstance(found, AuditedStart):
                self._starts[found.run_id] = found
            else:
                self._steps[found.step] = found

    @property
    def last_step(self) -> int:
        """The newest recorded step; 0 without one."""
        return max(self._steps, default=0)

    def step(self, step: int) -> AuditedStep:
        """Returns the line of a step. Raises ConfigError when there is none."""
        if step not in self._steps:
            raise not_audited(step, self._steps)
        return self._steps[step]

    def start(self, step: AuditedStep) -> AuditedStart:
        """Returns the attempt that made a step. Raises ConfigError when its line is missing."""
        if step.run_id not in self._starts:
            raise damaged(
                f"the audit record lacks the start of {step.run_id}, which made step {step.step}",
                self.path,
            )
        return self._starts[step.run_id]

    def weights_at(self, step: int) -> str | None:
        """Returns the checksum of the weights after `step` steps; None when it is not known."""
        if step in self._steps:
            return self._steps[step].weights
        for start in self._starts.values():
            if start.step == step:
                return start.weights
        return None


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"
