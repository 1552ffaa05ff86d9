"""What the files of a run say: directory, lock, logs. Any process can read them."""

import fcntl
import json
import math
import os
import platform
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from common import VERSION
from common.errors import ConfigError
from common.process.run_lock import LOCK
from common.process.topology import Topology
from trainer.diagnosis.facts import Facts, LogLine, ProcessFacts, State
from trainer.diagnosis.logs import last_start, log_files, read_log
from trainer.diagnosis.report import JSON_FILE
from trainer.observe.group_files import LINES
from trainer.observe.jsonl import parsed
from trainer.observe.run_dir import ATTEMPTS, no_run
from trainer.trackers.base import flatten

TOPOLOGY = "topology.json"
API_TOKEN_FILE = "api_token"  # noqa: S105
_STEPS = 24
"""Lines of `metrics.jsonl` and `groups.jsonl` that are read, the newest."""
_TAIL_BYTES = 4 << 20
"""Read of the end of a file of lines."""
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
    config = _json(run_dir / "config.json")
    known = _json(run_dir / TOPOLOGY)
    folders = log_folders(run_dir, config, logs)
    files = log_files(folders)

    starts = [each for each in map(last_start, _of_rank_zero(files)) if each]
    started = max([*starts, known.get("time") or 0.0]) or None
    lines = list(_lines(files, (started or 0.0) - _BEFORE_S))
    holder, held = _holder(run_dir / LOCK)
    attempt = _newest(run_dir / ATTEMPTS)
    begin = max(started or 0.0, attempt.get("time", 0.0))
    reason = _exit_reason(lines, started) or _own_report(run_dir, begin)
    facts = Facts(
        directory=str(run_dir),
        now=time.time(),
        state="empty",
        started=started,
        config=flatten(config),
        steps=list(_last_lines(run_dir / "metrics.jsonl", _STEPS)),
        groups=list(map(_places, _last_lines(run_dir / LINES, _STEPS))),
        lines=lines,
        exit_reason=reason.text.partition("\ndiagnosis: ")[0] if reason else "",
        exited=reason.time if reason else None,
        holder=holder,
        versions=known.get("versions") or {},
    )
    groups = [_holder(folder / LOCK)[1] for folder in folders if (folder / LOCK).exists()]
    group_lives = any(groups)
    facts.restarts = group_lives if groups else None
    facts.state = _state(facts, held, group_lives, attempt)
    if facts.state == "finished":
        facts.lines = _until(_released(run_dir / LOCK), facts.lines)
    facts.processes = list(_processes(holder)) if held else []
    return facts


def log_folders(run_dir: Path, config: dict[str, Any], logs: Path | None = None) -> list[Path]:
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


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _last_lines(path: Path, count: int) -> Iterator[dict[str, Any]]:
    """Yields the last whole lines of a JSONL file; damaged ones are left out."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL_BYTES))
            data = file.read()
    except OSError:
        return
    lines = data.split(b"\n")[:-1]
    if size > _TAIL_BYTES:
        del lines[0]
    for line in lines[-count:]:
        yield from _parsed(line)


def _parsed(line: bytes) -> Iterator[dict[str, Any]]:
    """Yields the object of a line; nothing for a damaged line, and for one without a number."""
    with suppress(ValueError, RecursionError):
        content = parsed(line)
        if isinstance(content.get("step"), int):
            yield content


def _places(line: dict[str, Any]) -> dict[str, Any]:
    """Returns the part of a line of `groups.jsonl` that says which prompts a step trained on."""
    kept = ("position", "prompt_id", "reused")
    groups = [{name: group.get(name) for name in kept} for group in line.get("groups") or ()]
    return {"step": line.get("step"), "groups": groups}


def _newest(path: Path) -> dict[str, Any]:
    lines = list(_last_lines(path, 1))
    return lines[0] if lines else {}


def _of_rank_zero(files: list[Path]) -> list[Path]:
    return [path for path in files if path.stem in ("ppo-trainer-rank0", "sft-rank0")]


def _lines(files: list[Path], since: float) -> Iterator[LogLine]:
    """Yields the lines that matter of all logs in order; a line that two files have, once."""
    known: set[tuple[float | None, str]] = set()
    found: list[LogLine] = []
    for path in files:
        for line in read_log(path, since):
            key = (line.time, line.text.partition("\n")[0])
            if key not in known:
                known.add(key)
                found.append(line)
    yield from sorted(found, key=lambda line: line.time or 0.0)


def _exit_reason(lines: list[LogLine], started: float | None) -> LogLine | None:
    """Returns the line in which rank 0 says why it ended."""
    for line in reversed(lines):
        if (line.time or 0.0) < (started or 0.0):
            continue
        is_last_word = line.logger in ("end", "uncaught") and line.level == "CRITICAL"
        is_output = not line.logger and line.level == ""
        if line.source.startswith(("ppo-trainer", "sft")) and (is_last_word or is_output):
            return line
    return None


def _own_report(run_dir: Path, since: float) -> LogLine | None:
    """Returns why the run ended, from its own report of that; a run in one process has no log."""
    report = _json(run_dir / JSON_FILE)
    exited = report.get("exited")
    if not report.get("exit_reason") or not isinstance(exited, float) or exited < since:
        return None
    return LogLine(source="ppo-trainer", time=exited, text=str(report["exit_reason"]))


def _holder(path: Path) -> tuple[dict[str, Any], bool]:
    """Returns who is named in a lock file, and whether that process still has it."""
    try:
        file = os.open(path, os.O_RDONLY)
    except OSError:
        return {}, False
    try:
        content = os.read(file, 4096)
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            locked = False
        except BlockingIOError:
            locked = True
        except OSError:
            locked = False
        age = time.time() - os.fstat(file).st_mtime
    finally:
        os.close(file)
    holder: dict[str, Any] = {}
    with suppress(ValueError):
        found = json.loads(content.strip(b"\0 \n") or b"{}")
        holder = found if isinstance(found, dict) else {}
    is_elsewhere = bool(holder) and holder.get("host") != platform.node()
    return holder, locked or (is_elsewhere and age < _BEAT_S)


def _released(path: Path) -> float:
    """Returns when the run gave back its lock, which empties the file; infinity without one."""
    return path.stat().st_mtime if path.exists() else math.inf


def _until(end: float, lines: list[LogLine]) -> list[LogLine]:
    """Returns the lines before the end of a run that is finished: its services are ended after it,
    and say that they no longer reach the trainer.
    """
    return [line for line in lines if (line.time or 0.0) <= end]


def _state(facts: Facts, held: bool, group_lives: bool, attempt: dict[str, Any]) -> State:
    total = facts.total_steps
    is_done = total is not None and facts.step >= total
    if held:
        has_begun = attempt.get("time", 0.0) >= (facts.started or 0.0)
        return "running" if has_begun else "starting"
    if is_done and not facts.exit_reason:
        return "finished"
    if facts.exit_reason:
        return "ended"
    if facts.holder:
        return "killed"
    if group_lives:
        return "starting"
    return "ended" if facts.steps or facts.started else "empty"


def _processes(holder: dict[str, Any]) -> Iterator[ProcessFacts]:
    """Yields the processes of the holder's job group on this machine: those with its
    `JOBGROUP_HOSTS` and their children, or, outside of one, the holder and its descendants.
    """
    if holder.get("host") != platform.node() or not sys.platform.startswith("linux"):
        return
    with suppress(psutil.Error):
        own = psutil.Process(int(holder["pid"]))
        hosts = own.environ().get("JOBGROUP_HOSTS")
        if not hosts:
            for each in [own, *own.children(recursive=True)]:
                yield _process(each, "ppo-trainer-0")
            return
        for each in psutil.process_iter():
            with suppress(psutil.Error):
                env = _environ(each)
                if env.get("JOBGROUP_HOSTS") == hosts:
                    task = env.get("SKYPILOT_TASK_ID", "").rpartition("_")[2]
                    yield _process(each, f"{task}-{env.get('SKYPILOT_NODE_RANK', '0')}")


def _environ(process: psutil.Process) -> dict[str, str]:
    """Returns the environment of a process, or of its parent: one that has given itself a title,
    such as the router, has written over its own.
    """
    env = process.environ()
    if "JOBGROUP_HOSTS" in env:
        return env
    parent = process.parent()
    return {} if parent is None else parent.environ()


def _process(process: psutil.Process, name: str) -> ProcessFacts:
    # A title that a process has given itself is one word, with zeros up to the old length.
    words = list(filter(None, process.cmdline()))
    shown = [word for word in words[1:6] if word != "-P"] or words
    return ProcessFacts(
        name=name, pid=process.pid, state=process.status(), command=" ".join(shown)[:120]
    )
