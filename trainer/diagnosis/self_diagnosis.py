"""A run diagnoses itself: when it stops with an error, and when it stalls."""

import asyncio
import logging
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from common.errors import ServiceError
from common.process import watchdog
from common.process.topology import Topology
from common.settings.config import Config
from trainer.diagnosis.facts import LogLine
from trainer.diagnosis.find import find
from trainer.diagnosis.live import ask
from trainer.diagnosis.report import JSON_FILE, TEXT_FILE, first_line, write
from trainer.diagnosis.run_files import read_facts
from trainer.observe.catalogue import INTERRUPTED

log = logging.getLogger(__name__)
_PATIENCE_S = 8.0


@contextmanager
def diagnosed(run_dir: Path, config: Config, topology: Topology | None = None) -> Iterator[None]:
    """Writes the diagnosis of this run when an error or an end by the caller (Ctrl-C, `sys.exit`)
    leaves the block, and when the run stalls.

    The error gets a note that names what was found and the file. A run that ends well has no
    report: one of an earlier attempt is removed. `topology` finds the services; None: they are in
    this process, and are not asked.
    """

    def stalled(reason: str) -> None:
        said = diagnose(run_dir, config, topology)
        if said:
            log.error("%s", said)

    watchdog.after_report(stalled)
    try:
        yield
    except Exception as error:
        said = diagnose(run_dir, config, topology, error=error)
        if said:
            error.add_note(said)
        raise
    except (KeyboardInterrupt, SystemExit) as ending:
        # A trainer of a job group says by itself that it was interrupted.
        if topology is None:
            diagnose(run_dir, config, error=ending)
        raise
    else:
        for name in (TEXT_FILE, JSON_FILE):
            with suppress(OSError):
                (run_dir / name).unlink(missing_ok=True)
    finally:
        watchdog.after_report(None)


def diagnose(
    run_dir: Path,
    config: Config,
    topology: Topology | None = None,
    *,
    error: BaseException | None = None,
) -> str:
    """Writes the diagnosis of this process's run and returns the line that names it; empty if that
    is impossible. Never raises: the run has its own reason to end.

    Args:
        run_dir: directory of the run.
        config: its settings.
        topology: finds the services; None: they are not asked.
        error: with which the run ends; None when it goes on.
    """
    try:
        facts = read_facts(run_dir)
        facts.state = "running"
        if topology is not None:
            with suppress(TimeoutError, ServiceError):
                asking = ask(facts, config, topology, own=error is not None)
                asyncio.run(asyncio.wait_for(asking, _PATIENCE_S))
        if error is not None:
            facts.state = "ended"
            facts.end = _last_word(error)
        findings = find(facts)
        said = f"diagnosis: {first_line(facts, findings)}"
        try:
            return f"{said} ({write(run_dir, facts, findings)})"
        except ServiceError as error:  # the disk is full, which may be what was found
            return f"{said} ({error})"
    except Exception as error:
        log.warning("the run could not be diagnosed: %r", error)
        return ""


def _last_word(error: BaseException) -> LogLine:
    code = INTERRUPTED.codes[0] if isinstance(error, KeyboardInterrupt) else ""
    known = error.event() if isinstance(error, ServiceError) else {"code": code}
    fields = {name: str(value) for name, value in known.items()}
    return LogLine(
        source="ppo-trainer",
        time=time.time(),
        text=_words(error),
        code=fields.pop("code"),
        fields=fields,
    )


def _words(error: BaseException) -> str:
    if isinstance(error, ServiceError):
        return f"error: {error}"
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    words = f"{type(error).__name__}: {error}"
    if not isinstance(error, SystemExit):
        return words
    *_, frame = traceback.extract_tb(error.__traceback__)
    return f"{words} in {frame.name} ({frame.filename}, line {frame.lineno})"
