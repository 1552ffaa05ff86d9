"""Executes steps again that the caller's seed draws, and writes a record of it, which anyone can
check against the published weights.
"""

import json
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from common import Json
from common.errors import ConfigError
from common.process.storage import storing
from common.weights.checksums import checksum
from trainer.audit.history import models_after
from trainer.audit.recorded import config_of
from trainer.observe.audit import AuditRecord
from trainer.observe.run_dir import AUDIT, damaged
from trainer.policy.checkpoint import newest

_FORMAT = 1
_WEIGHTS = ("*.safetensors", "config.json")
_FAILED = ("differs", "missing")


def drawn_steps(seed: str, count: int, last: int) -> list[int]:
    """Returns `count` of the steps 1 to `last`, which depend on the seed alone."""
    steps = range(1, last + 1)
    return sorted(random.Random(f"certify {seed}").sample(steps, min(count, last)))


def certify(run_dir: Path, seed: str, count: int, output: Path, more: Sequence[str]) -> int:
    """Executes `count` drawn steps again, one after the other, writes the certificate, and returns
    the exit status of `rlhf audit`.

    Args:
        run_dir: directory of the run, whose newest checkpoint is what is published.
        seed: from whoever wants to know: to a seed that was known before, a run could be fitted.
        count: number of steps.
        output: the file to write.
        more: further arguments of `rlhf audit`.

    Raises ConfigError for a record or a checkpoint that is missing.
    """
    record = AuditRecord(run_dir)
    steps = drawn_steps(seed, count, record.last_step)
    published = newest(run_dir / "checkpoints")
    if published is None:
        raise damaged("the run has no complete checkpoint, so nothing is published", run_dir)

    executed = [_executed(run_dir, step, more) for step in steps]
    executed.append(_published(run_dir, record, published))
    differs = any(stage["state"] in _FAILED for each in executed for stage in each["stages"])
    certificate: Json = {
        "format": _FORMAT,
        "seed": seed,
        "steps": record.last_step,
        "executed": executed,
        "differs": differs,
        "record": checksum(run_dir / AUDIT),
        "published": weight_files(published),
    }
    with storing(output.name, output, "--certify", "make room, or write elsewhere"):
        output.write_text(json.dumps(certificate, indent=1) + "\n", encoding="utf-8")
    said = "a step differs" if differs else "nothing differs"
    print(f"{said}; steps {steps} of {record.last_step}, checkpoint {published.name}: {output}")
    return int(differs)


def _published(run_dir: Path, record: AuditRecord, checkpoint: Path) -> Json:
    """Compares the weights of a checkpoint with the checksum that the run recorded after its step;
    returns the step with its only outcome.
    """
    step = int(checkpoint.name.removeprefix("step_"))
    start = record.start(record.step(step))
    config = config_of(start, run_dir)
    stage: Json = {"stage": "checkpoint", "detail": f"the weights in {checkpoint.name}"}
    if start.setup.world_size > 1 and config.parallel.shard_size != 1:
        stage["state"] = "not compared"
        stage["detail"] = "the checksums are of the shares of several ranks"
    else:
        stage["found"] = models_after(record, run_dir, config, step).policy.digest()
        stage["expected"] = record.weights_at(step)
        stage["state"] = "equal" if stage["found"] == stage["expected"] else "differs"
    return {"step": step, "stages": [stage]}


def _executed(run_dir: Path, step: int, more: Sequence[str]) -> Json:
    """Returns a step with its outcomes; processes of their own execute it again."""
    with TemporaryDirectory(prefix="rlhf-certify-") as folder:
        path = Path(folder) / "outcomes.json"
        words = [str(run_dir), "--step", str(step), "--json", str(path), *more]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, "-m", "trainer.audit", *words]
        done = subprocess.run(command, env=environment, check=False, stderr=subprocess.PIPE)
        if path.exists():
            return {"step": step, "stages": json.loads(path.read_bytes())}
    reason = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
    return {"step": step, "stages": [{"stage": "all", "state": "missing", "detail": reason}]}


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
        content = json.loads(path.read_bytes())
        *executed, _ = content["executed"]
        steps = [each["step"] for each in executed]
        drawn = drawn_steps(content["seed"], len(steps), content["steps"])
        published = dict(content["published"])
        differs = content["differs"]
        stages = [(each["step"], stage) for each in content["executed"] for stage in each["stages"]]
        left_out = [
            f"step {step}, {stage['stage']}: {stage['detail']}"
            for step, stage in stages
            if stage["state"] == "not compared"
        ]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(
            f"this is no certificate: {error}",
            field="--check",
            value=str(path),
            remedy="name a file that rlhf audit --certify wrote",
        ) from None

    found = weight_files(weights)
    problems = [
        f"{name} has the checksum {found.get(name)}, not {expected}"
        for name, expected in published.items()
        if found.get(name) != expected
    ]
    if differs:
        problems.append("a step differs, or could not be executed again")
    if steps != drawn:
        problems.append(f"its steps are {steps}, but the seed draws {drawn}")
    print(f"{len(stages)} stages of the steps {steps} were executed again for {content['seed']!r}")
    for stage in left_out:
        print(f"not compared: {stage}")
    for problem in problems:
        print(f"does not hold: {problem}")
    if not problems:
        print("the certificate holds for these weights")
    return int(bool(problems))
