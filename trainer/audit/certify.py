"""Re-executes steps that the caller's seed draws, and writes a record of it, which anyone can check
against the published weights.
"""

import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from common.errors import ConfigError
from common.process.storage import storing
from common.weights.checksums import checksum
from trainer.audit.comparison import StageOutcome
from trainer.observe.run_dir import AUDIT, damaged

_WEIGHTS = ("*.safetensors", "config.json")


class ExecutedStep(msgspec.Struct):
    """A step that was re-executed."""

    step: int
    stages: list[StageOutcome]


class Certificate(msgspec.Struct, kw_only=True):
    """What `certify` writes."""

    seed: str
    steps: int
    """Steps of the run."""
    drawn: list[ExecutedStep]
    checkpoint: ExecutedStep
    """The weights of the newest checkpoint against the record of its step."""
    record: str
    """Checksum of `audit.jsonl`."""
    published: dict[str, str]
    """Checksums of the files of the checkpoint that are published, by name."""

    def problems(self) -> Iterator[str]:
        """Yields the reasons why it proves nothing about the run."""
        steps = [each.step for each in self.drawn]
        expected = drawn_steps(self.seed, max(1, len(steps)), self.steps)
        if steps != expected:
            yield f"its steps are {steps}, but the seed draws {expected}"
        for each in (*self.drawn, self.checkpoint):
            if not each.stages:
                yield f"no stage of step {each.step} was re-executed"
            for stage in each.stages:
                if stage.state == "differs":
                    yield f"step {each.step}, {stage.stage} differs: {stage.detail}"


def drawn_steps(seed: str, count: int, last: int) -> list[int]:
    """Returns `count` of the steps 1 to `last`, which depend on the seed alone."""
    steps = range(1, last + 1)
    return sorted(random.Random(f"certify {seed}").sample(steps, min(count, last)))


def certify(run_dir: Path, seed: str, count: int, output: Path, more: Sequence[str]) -> int:
    """Re-executes `count` drawn steps one after the other, writes the certificate, and returns the
    exit status of `rlhf audit`.

    Args:
        run_dir: directory of the run, whose newest checkpoint is what is published.
        seed: chosen by whoever checks the run, after it has ended: whoever knows the seed before
            could falsify the other steps.
        count: number of steps.
        output: the file to write.
        more: further arguments of `rlhf audit`.

    Raises ConfigError for a checkpoint that is missing, and for a step that cannot be executed.
    """
    # torch: slow to import, and whoever checks a certificate need not have it.
    from trainer.observe.audit import AuditRecord
    from trainer.policy.checkpoint import newest

    record = AuditRecord(run_dir)
    steps = drawn_steps(seed, count, record.last_step)
    published = newest(run_dir / "checkpoints")
    if published is None:
        raise damaged("the run has no complete checkpoint, so nothing is published", run_dir)

    newest_step = int(published.name.removeprefix("step_"))
    certificate = Certificate(
        seed=seed,
        steps=record.last_step,
        drawn=[_executed(run_dir, step, more) for step in steps],
        checkpoint=_executed(run_dir, newest_step, ["--stages", "checkpoint"]),
        record=checksum(run_dir / AUDIT),
        published=weight_files(published),
    )
    with storing(output.name, output, "--certify", "make room, or write elsewhere"):
        output.write_bytes(msgspec.json.format(msgspec.json.encode(certificate), indent=1))
    problems = list(certificate.problems())
    said = "\n".join(problems) or "nothing differs"
    print(f"{said}; steps {steps} of {record.last_step}, checkpoint {published.name}: {output}")
    return int(bool(problems))


def _executed(run_dir: Path, step: int, more: Sequence[str]) -> ExecutedStep:
    """Returns a step with its outcomes; separate processes re-execute it."""
    with TemporaryDirectory(prefix="rlhf-certify-") as folder:
        path = Path(folder) / "outcomes.json"
        words = [str(run_dir), "--step", str(step), "--json", str(path), *more]
        # Each step begins without what the one before left in memory, as another machine would.
        # Its status says no more than the outcomes do.
        subprocess.run([sys.executable, "-m", "trainer.audit", *words], check=False)
        if not path.exists():
            raise ConfigError(
                f"step {step} cannot be re-executed, for the reason above",
                field="RUN_DIR",
                value=str(run_dir),
                remedy="restore what is missing; without every drawn step there is no certificate",
            )
        return ExecutedStep(step, msgspec.json.decode(path.read_bytes(), type=list[StageOutcome]))


def weight_files(directory: Path) -> dict[str, str]:
    """Returns the checksums of the files that hold the published weights. Raises ConfigError when
    there are none.
    """
    found = {
        path.name: checksum(path)
        for pattern in _WEIGHTS
        for path in sorted(directory.glob(pattern))
    }
    if not any(name.endswith(".safetensors") for name in found):
        raise ConfigError(
            "there are no weights here",
            field="WEIGHTS",
            value=str(directory),
            remedy="name the published directory, with its *.safetensors",
        )
    return found


def check_certificate(path: Path, weights: Path) -> int:
    """Prints what a certificate shows of published weights in a directory, and what not; returns
    1 where it does not hold. Raises ConfigError for a file that is no certificate.
    """
    try:
        certificate = msgspec.json.decode(path.read_bytes(), type=Certificate)
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(
            f"this is not a certificate: {error}",
            field="--check",
            value=str(path),
            remedy="name a file that rlhf audit --certify wrote",
        ) from None

    files = weight_files(weights)
    published = certificate.published
    # A file too many would be loaded beside those that were published.
    problems = [
        f"{name} has the checksum {files.get(name)}, not {published.get(name)}"
        for name in published | files
        if files.get(name) != published.get(name)
    ]
    problems += certificate.problems()
    steps = [each.step for each in certificate.drawn]
    print(f"the steps {steps} of {certificate.steps} were drawn by {certificate.seed!r}")
    for each in certificate.drawn:
        for stage in each.stages:
            if stage.state == "not compared":
                print(f"not compared: step {each.step}, {stage.stage}: {stage.detail}")
    for problem in problems:
        print(f"does not hold: {problem}")
    if not problems:
        print("the certificate holds for these weights")
    return int(bool(problems))
