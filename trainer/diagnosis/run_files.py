"""What the files of a run say: directory, lock, logs. Any process can read them."""

import fcntl
import json
import os
import platform
import time
from contextlib import suppress
from importlib import metadata
from pathlib import Path

from pydantic import ValidationError

from common import VERSION, Json
from common.errors import ConfigError
from common.process.run_lock import LOCK
from common.process.topology import Topology
from trainer.diagnosis.facts import Facts, LogLine, State
from trainer.diagnosis.logs import last_start, log_files, read_log
from trainer.diagnosis.report import JSON_FILE
from trainer.observe.group_files import LINES
from trainer.observe.jsonl import last_steps
from trainer.observe.run_dir import ATTEMPTS, has_step, known_settings, no_run

TOPOLOGY = "topology.json"
API_TOKEN_FILE = "api_token"  # noqa: S105
_STEPS = 24
"""Lines of `metrics.jsonl` and `groups.jsonl` that are read, the newest."""
_BEFORE_S = 120.0
"""Services may start this long before the trainer."""
_BEAT_S = 45.0
"""A lock on another machine counts as held if its file changed within this time."""
_PACKAGES = ("torch", "transformers", "sglang", "smg", "sglang-router", "numpy")


def write_topology(run_dir: Path, topology: Topology | None, world_size: int) -> None:
    """Writes the addresses and versions of a run, without secrets, for who diagnoses it.

    `topology` is None for a run without services.
    """
    content = {
        "time": time.time(),
        "world_size": world_size,
        "topology": topology.saved() if topology else None,
        "versions": versions(),
    }
    with suppress(OSError):  # a full disk is reported when something that counts is written
        (run_dir / TOPOLOGY).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def versions() -> dict[str, str]:
    """Returns the versions of this system, of Python and of the packages that compute."""
    found = {"rlhf-math": VERSION, "python": platform.python_version()}
    for name in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def read_topology(run_dir: Path) -> Topology | None:
    """Returns where the tasks of the newest attempt are; None when that is not known."""
    try:
        return Topology.from_saved(_json(run_dir / TOPOLOGY)["topology"])
    except (LookupError, TypeError, ConfigError):
        return None


def read_facts(run_dir: Path, logs: Path | None = None) -> Facts:
    """Returns what the files of a run say. Raises ConfigError when there is no such directory."""
    if not run_dir.is_dir():
        raise no_run(run_dir)
    config = known_settings(run_dir)
    known = _json(run_dir / TOPOLOGY)
    folders = log_folders(run_dir, config, logs)
    files = log_files(folders)

    of_rank_zero = [path for path in files if path.stem in ("ppo-trainer-rank0", "sft-rank0")]
    starts = [last_start(path) or 0.0 for path in of_rank_zero]
    started = max([*starts, known.get("time") or 0.0]) or None
    lines = _lines(files, (started or 0.0) - _BEFORE_S)
    holder, held = holder_of(run_dir / LOCK)
    attempt = next(iter(last_steps(run_dir / ATTEMPTS, 1)), {})
    begin = max(started or 0.0, attempt.get("time", 0.0))
    facts = Facts(
        directory=str(run_dir),
        now=time.time(),
        state="empty",
        started=started,
        config=config,
        steps=last_steps(run_dir / "metrics.jsonl", _STEPS),
        groups=[_prompts(line) for line in last_steps(run_dir / LINES, _STEPS)],
        lines=lines,
        end=_exit_reason(lines, started) or _own_report(run_dir, begin),
        holder=holder,
        versions=known.get("versions") or {},
    )
    if not facts.steps and has_step(run_dir):
        facts.unread = "no line of metrics.jsonl can be read; restore it from a copy"
    groups = [holder_of(folder / LOCK)[1] for folder in folders if (folder / LOCK).exists()]
    group_lives = any(groups)
    facts.restarts = group_lives if groups else None
    facts.state = _state(facts, held, group_lives, attempt)
    lock = run_dir / LOCK
    if facts.state == "finished" and lock.exists():
        # Giving back the lock empties its file. Services are ended after that, and say that they
        # no longer reach the trainer.
        released = lock.stat().st_mtime
        facts.lines = [line for line in lines if (line.time or 0.0) <= released]
    return facts


def log_folders(run_dir: Path, config: Json, logs: Path | None = None) -> list[Path]:
    """Returns the folders with the logs of a run: of its services and ranks, and of the nodes that
    `jobgroup.local` started last.
    """
    state_dir = config.get("state_dir") or run_dir / "state"
    found = [Path(state_dir) / "logs", run_dir / "state" / "logs"]
    if logs is not None:
        return [*found, logs]
    of_groups = [run_dir / "logs", *(run_dir / "logs").glob("*/")]
    of_groups = [folder for folder in of_groups if any(folder.glob("*-[0-9]*.log"))]
    if of_groups:
        found.append(max(of_groups, key=lambda folder: folder.stat().st_mtime))
    return found


def token_file(folders: list[Path]) -> Path | None:
    """Returns the file with the token that `jobgroup.local` made for a run, if there is one."""
    for folder in reversed(folders):
        if (folder / API_TOKEN_FILE).is_file():
            return folder / API_TOKEN_FILE
    return None


def _json(path: Path) -> Json:
    try:
        content = json.loads(path.read_bytes().strip(b"\0 \n") or b"{}")
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _prompts(line: Json) -> Json:
    """Returns the part of a line of `groups.jsonl` that says which prompts a step trained on."""
    kept = ("position", "prompt_id", "reused")
    groups = [{name: group.get(name) for name in kept} for group in line.get("groups") or ()]
    return {"step": line.get("step"), "groups": groups}


def _lines(files: list[Path], since: float) -> list[LogLine]:
    """Returns the lines that matter of all logs in order; a line that two files have, once."""
    known: set[tuple[float | None, str]] = set()
    found: list[LogLine] = []
    for path in files:
        for line in read_log(path, since):
            # What a process also printed has neither its time nor its code in the node's log.
            key = (line.time if line.logger else None, line.message)
            if key not in known:
                known |= {key, (None, line.message)}
                found.append(line)
    return sorted(found, key=lambda line: line.time or 0.0)


def _exit_reason(lines: list[LogLine], started: float | None) -> LogLine | None:
    """Returns the line in which rank 0 says why it ended."""
    for line in reversed(lines):
        is_last_word = line.logger in ("end", "uncaught") and line.level == "CRITICAL"
        is_of_attempt = (line.time or 0.0) >= (started or 0.0)
        if line.is_of_trainer and is_of_attempt and (is_last_word or not line.logger):
            return line
    return None


def _own_report(run_dir: Path, since: float) -> LogLine | None:
    """Returns why the run ended, from its own report of that; a run in one process has no log."""
    with suppress(ValidationError):
        end = LogLine.model_validate(_json(run_dir / JSON_FILE).get("end"))
        return end if (end.time or 0.0) >= since else None
    return None


def holder_of(path: Path) -> tuple[Json, bool]:
    """Returns who is named in a lock file (`common.process.run_lock`), and whether that process
    still has it: whether its run lives.
    """
    try:
        file = path.open("rb")
    except OSError:
        return {}, False
    locked = False
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            locked = True
        except OSError:  # a file system without locks
            pass
        age = time.time() - os.fstat(file.fileno()).st_mtime
    holder = _json(path)
    # The kernel's lock of another machine may not be seen here, but its heartbeat is.
    is_elsewhere = bool(holder) and holder.get("host") != platform.node()
    return holder, locked or (is_elsewhere and age < _BEAT_S)


def _state(facts: Facts, held: bool, group_lives: bool, attempt: Json) -> State:
    if held:
        # A new attempt has the lock before its line: until then, the newest line is of another one.
        has_begun = attempt.get("time", 0.0) >= (facts.started or 0.0)
        return "running" if has_begun else "starting"
    if facts.end:  # also of a run that failed after its last step
        return "ended"
    if facts.total_steps is not None and facts.step >= facts.total_steps:
        return "finished"
    if facts.holder:  # an end that is written leaves nobody in the lock
        return "killed"
    if group_lives:
        return "starting"
    # It gave back its lock and said nothing: an end by the caller of a run in one process.
    return "ended" if facts.steps or facts.started else "empty"
