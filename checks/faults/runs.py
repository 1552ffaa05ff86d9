"""Faults of run directories, checkpoints, disks and clocks."""

import ctypes
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from checks.faults.fault import fault
from checks.faults.lab import Lab, replaced


def _trained(lab: Lab, steps: int = 4, **settings: Any) -> Path:
    """Trains a run, and returns its newest checkpoint; the fault strikes now."""
    lab.train(lab.settings(trainer__max_steps=steps, **settings))
    lab.strike()
    return lab.run_dir / "checkpoints" / f"step_{steps:06d}"


def _newest(lab: Lab) -> Path:
    found = [path for path in (lab.run_dir / "checkpoints").iterdir() if path.name != "best"]
    return sorted(found)[-1]


def _resume(lab: Lab, **settings: Any) -> None:
    lab.train(lab.settings(trainer__max_steps=6, **settings))


@fault(
    "one byte of the newest checkpoint has changed",
    r"model\.safetensors|checkpoint|step_",
    r"changed",
    reported="https://github.com/bghira/SimpleTuner/issues/2613",
)
def checkpoint_byte(lab: Lab) -> None:
    _trained(lab)
    path = _newest(lab) / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[lab.rng.randrange(len(content) // 2, len(content))] ^= 1
    path.write_bytes(content)
    _resume(lab)


@fault(
    "a file of the newest checkpoint is cut",
    r"model\.safetensors|checkpoint|step_",
    r"changed|cut|damaged|incomplete|shorter",
    reported="https://github.com/vllm-project/speculators/pull/739",
)
def checkpoint_cut(lab: Lab) -> None:
    _trained(lab)
    path = _newest(lab) / "model.safetensors"
    path.write_bytes(path.read_bytes()[: 1 << 16])
    _resume(lab)


@fault(
    "a file of the newest checkpoint is gone",
    r"checkpoint|step_",
    r"lacks|missing|gone|no |absent|incomplete",
)
def checkpoint_file_gone(lab: Lab) -> None:
    _trained(lab)
    (_newest(lab) / "model.safetensors").unlink()
    _resume(lab)


@fault(
    "the state file of the newest checkpoint is damaged",
    r"trainer_state\.json|checkpoint|step_",
    r"damaged|cannot|changed",
)
def checkpoint_state_damaged(lab: Lab) -> None:
    _trained(lab)
    path = _newest(lab) / "trainer_state.json"
    path.write_text(path.read_text()[:-9])
    _resume(lab)


def _own_model(lab: Lab) -> Path:
    model = lab.directory / "model"
    shutil.copytree(lab.model, model)
    return model


@fault(
    "the tokenizer was changed between two attempts of a run",
    r"tokenizer",
    r"changed|differ|another",
    reported="https://github.com/NVIDIA-NeMo/RL/issues/415",
)
def resume_other_tokenizer(lab: Lab) -> None:
    model = _own_model(lab)
    _trained(lab, model__name=model)
    path = model / "tokenizer.json"
    content = json.loads(path.read_text())
    del content["model"]["merges"][lab.rng.randrange(10) :: 10]
    path.write_text(json.dumps(content))
    _resume(lab, model__name=model)


@fault(
    "the model was replaced between two attempts of a run",
    r"model\.name|model",
    r"changed|differ|another",
    reported="https://github.com/NVIDIA-NeMo/RL/issues/415",
)
def resume_other_model(lab: Lab) -> None:
    model = _own_model(lab)
    _trained(lab, model__name=model)
    path = model / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-9] ^= 1
    path.write_bytes(content)
    _resume(lab, model__name=model)


@fault(
    "a setting that the checkpoint depends on was changed",
    r"group_size",
    r"4.*8|8.*4",
    reported="https://github.com/NVIDIA-NeMo/RL/issues/415",
)
def resume_other_setting(lab: Lab) -> None:
    _trained(lab)
    _resume(lab, sampling__group_size=4)


@fault(
    "lines of the metrics are lost",
    r"metrics\.jsonl",
    r"lacks|missing|cut|removed",
)
def run_lines_lost(lab: Lab) -> None:
    _trained(lab)
    path = lab.run_dir / "metrics.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:1]))
    _resume(lab)


@fault("a line of a run's file is damaged", r"metrics\.jsonl", r"line \d", r"damaged")
def run_line_damaged(lab: Lab) -> None:
    _trained(lab)
    path = lab.run_dir / "metrics.jsonl"
    lines = path.read_text().splitlines()
    lines[1] = lines[1][:30]
    path.write_text("\n".join(lines) + "\n")
    _resume(lab)


@fault(
    "two runs are started in one directory",
    r"using this directory|in use|another run",
    r"process|pid|run ",
)
def run_second_in_directory(lab: Lab) -> None:
    words = [sys.executable, "-c", _HOLDS_LOCK, str(lab.run_dir)]
    lab.run_dir.mkdir(parents=True)
    holder = subprocess.Popen(words, stdout=subprocess.PIPE)
    assert holder.stdout is not None
    holder.stdout.readline()
    lab.strike()
    lab.train()


_HOLDS_LOCK = """
import sys, time
from pathlib import Path
from common.process.run_lock import RunLock
with RunLock.of_new_run(Path(sys.argv[1]), "another"):
    print("held", flush=True)
    time.sleep(600)
"""


@fault(
    "a script trains into the directory of another run",
    r"output_dir",
    r"run|overwrite|resume",
    reported="https://github.com/NVIDIA-NeMo/RL/issues/415",
)
def run_directory_taken(lab: Lab) -> None:
    from checks.faults.rewards import correctness

    lab.script(correctness(lab, lambda scores: scores), max_steps=2)
    lab.strike()
    lab.script(correctness(lab, lambda scores: scores), max_steps=2)


@fault(
    "the run directory is a file",
    r"run_dir|directory",
    r"file|not a directory|cannot",
)
def run_directory_is_file(lab: Lab) -> None:
    lab.run_dir.write_text("")
    lab.strike()
    lab.train(lab.settings(state_dir=lab.directory / "state"))


# ------------------------------------------------------------ disks and clocks

_CLONE_NEWNS = 0x00020000


@contextmanager
def _small_disk(place: Path, megabytes: int) -> Iterator[Path]:
    """Mounts a small file system in memory, in a mount namespace of this process alone."""
    place.mkdir(parents=True)
    assert ctypes.CDLL(None).unshare(_CLONE_NEWNS) == 0
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    size = f"size={megabytes}m"
    subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", str(place)], check=True)
    yield place


def _fill(place: Path) -> None:
    with (place / "ballast").open("ab", buffering=0) as file:
        for size in (1 << 16, 1 << 12, 1):
            try:
                while True:
                    file.write(b"x" * size)
            except OSError:
                continue


@fault(
    "the disk of the run directory is full",
    r"disk|space",
    r"full|no space|free",
    reported="https://github.com/kohya-ss/musubi-tuner/issues/1041",
)
def disk_full_run(lab: Lab) -> None:
    with _small_disk(lab.run_dir, 64):
        config = lab.settings(state_dir=lab.directory / "state", trainer__max_steps=40)

        def change(number: int, body: Any, answers: Any) -> Any:
            if number == lab.first_call:
                lab.strike()
                _fill(lab.run_dir)
            return answers

        lab.train(config, change)


@fault(
    "the disk of the replay-buffer is full",
    r"disk|space",
    r"replay",
    r"full|no space|free",
    timeout="limits.service_timeout_s",
    timeout_s=8.0,
)
def disk_full_replay(lab: Lab) -> None:
    state = lab.directory / "state"
    with _small_disk(state, 64):

        def change(number: int, body: Any, answers: Any) -> Any:
            if number == lab.first_call:
                lab.strike()
                _fill(state)
            return answers

        config = lab.settings(state_dir=state, trainer__max_steps=40, limits__service_timeout_s=8.0)
        lab.train(config, change)


@fault(
    "the disk of the replay-buffer is slow",
    r"replay-buffer",
    r"disk",
    r"\d+ ?%",
    in_steps=True,
)
def disk_slow_replay(lab: Lab) -> None:
    from services.replay.buffer import ReplayBuffer

    add = ReplayBuffer.add

    def slow(buffer: ReplayBuffer, *arguments: Any, **options: Any) -> Any:
        lab.strike()
        time.sleep(0.5)
        return add(buffer, *arguments, **options)

    with replaced("services.replay.buffer.ReplayBuffer.add", slow):
        lab.train(lab.settings(trainer__max_steps=13))


@fault(
    "the file of the replay-buffer's store is cut",
    r"replay",
    r"damaged|malformed|cannot be read|corrupt",
)
def replay_store_cut(lab: Lab) -> None:
    from tests.support.runs.in_process import stored

    config = lab.settings(trainer__max_steps=4)
    lab.train(config)
    assert stored(config)
    lab.strike()
    path = config.state_dir / "replay" / "replay.db"
    path.write_bytes(path.read_bytes()[: 1 << 14])
    _resume(lab)


@fault(
    "the store of the replay-buffer was removed between two attempts of a run",
    r"replay",
    r"removed|replaced|lost|gone",
)
def replay_store_removed(lab: Lab) -> None:
    _trained(lab)
    shutil.rmtree(lab.state_dir / "replay")
    _resume(lab)


@fault("the clock of the machine jumps by an hour", harmless=True)
def clock_jumps(lab: Lab) -> None:
    real = time.time
    jump = 0.0

    def change(number: int, body: Any, answers: Any) -> Any:
        nonlocal jump
        if number == lab.first_call:
            lab.strike()
            jump = lab.rng.choice([-3600.0, 3600.0])
        return answers

    with replaced("time.time", lambda: real() + jump):
        lab.train(change=change)


@fault(
    "the experiment tracker fails",
    r"tracker",
    r"quota",
)
def tracker_fails(lab: Lab) -> None:
    lab.strike()
    lab.train(lab.settings(trackers__names=["checks.faults.trackers:Refusing"]))


@fault(
    "the experiment tracker hangs",
    r"tracker",
    r"hang|behind|not (answer|accept)|within|in time|too slow|gives? up|longer",
)
def tracker_hangs(lab: Lab) -> None:
    lab.strike()
    names = ["checks.faults.trackers:Sleeping"]
    lab.train(lab.settings(trackers__names=names, trainer__max_steps=200))
