"""The report of a diagnosis: five lines, the whole text, and JSON for programs."""

import json
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from common import Json
from common.errors import ServiceError, shorten
from common.process.security import SecretRedactor
from common.process.storage import storing
from common.process.watchdog import Awaited
from trainer.diagnosis.facts import Facts, Finding, RankFacts

TEXT_FILE = "diagnosis.txt"
JSON_FILE = "diagnosis.json"
_AT_LEAST_S = 5.0
_STEPS = 2.0
"""Nothing is wrong with a run whose newest step ended at most this many usual steps ago, or
`_AT_LEAST_S` seconds."""
_SHOWN_LINES = 12
_MAX_CHARS = 240
"""Longest text of one line."""
_WIDTH = 9
_OPERATIONS = "docs/how-to/operations.md"
_TROUBLESHOOTING = "docs/how-to/operations.md#a-run-that-does-not-learn-or-is-slow"


def first_line(facts: Facts, findings: Sequence[Finding]) -> str:
    """Returns the line that says what is wrong, or that nothing is."""
    if findings:
        return f"{findings[0].name}: {shorten(findings[0].what, _MAX_CHARS)}"
    steps = f"step {facts.step} of {facts.total_steps}" if facts.total_steps else "no step yet"
    ago = f"{facts.silent_s:.0f} s"
    running = f"nothing is wrong: running, {steps}, {ago} ago"
    if not facts.steps:
        running = f"running for {ago}, no step yet; no fault is known"
    elif facts.silent_s > max(_AT_LEAST_S, _STEPS * facts.usual_step_s):
        usual = f"one usually takes {facts.usual_step_s:.2g} s"
        running = f"running, {steps}, {ago} ago, and {usual}; no fault is known yet"
    return {
        "finished": f"finished: {steps}; nothing is wrong",
        "running": running,
        "starting": f"starting for {ago}, {steps}; no fault is known",
        "ended": f"ended: {steps}; nothing says why",
        "killed": f"killed: {steps}",
        "empty": f"empty: {facts.unread or 'no run has started here'}",
    }[facts.state]


def lines(facts: Facts, findings: Sequence[Finding]) -> list[str]:
    """Returns the five lines; fewer when nothing is wrong, and one more when a living run could not
    be asked.
    """
    found = [first_line(facts, findings)]
    asked = [_row("asked", _asked(facts))] if facts.lives else []
    if not findings:
        return found + asked
    main = findings[0]
    others = [finding.name for finding in findings[1:]]
    also = f"also: {'; '.join(others)}" if others else "nothing else is wrong"
    evidence = "; ".join(shorten(each, _MAX_CHARS) for each in main.evidence)
    return [
        *found,
        _row("since", "not known" if main.since is None else _since(main.since, facts)),
        _row("evidence", evidence or "as above"),
        _row("remedy", main.remedy),
        _row("more", f"{also}; {page(main.name)}"),
        *(asked if facts.not_asked else []),
    ]


def as_json(facts: Facts, findings: Sequence[Finding]) -> Json:
    """Returns the report for programs."""
    known = {"state", "end", "asked", "not_asked", "ranks", "services", "versions"}
    return {
        **facts.model_dump(include=known),
        "run": facts.directory,
        "time": facts.now,
        "step": facts.step,
        "total_steps": facts.total_steps,
        "first_line": first_line(facts, findings),
        "findings": [finding.model_dump() | {"page": page(finding.name)} for finding in findings],
        "lines": last_lines(facts),
    }


def text(facts: Facts, findings: Sequence[Finding]) -> str:
    """Returns the whole report: the five lines, then every finding, service, rank and line."""
    return SecretRedactor().redact("\n".join(_all_lines(facts, findings)) + "\n")


def write(run_dir: Path, facts: Facts, findings: Sequence[Finding]) -> Path:
    """Writes the report to the run directory and returns the file. Raises StorageFailed."""
    path = run_dir / TEXT_FILE
    with storing(TEXT_FILE, path, "trainer.run_dir"):
        path.write_text(text(facts, findings), encoding="utf-8")
        content = json.dumps(as_json(facts, findings), indent=1, ensure_ascii=False)
        (run_dir / JSON_FILE).write_text(SecretRedactor().redact(content) + "\n", encoding="utf-8")
    return path


def page(name: str) -> str:
    """Returns the place in the documentation that is about a finding."""
    if " " not in name:  # a hint or an alarm
        return _TROUBLESHOOTING
    anchor = re.sub(r"[^\w\- ]", "", name.lower()).replace(" ", "-")
    return f"{_OPERATIONS}#{anchor}"


def last_lines(facts: Facts) -> list[str]:
    """Returns the last lines of the logs that matter, those of the trainer among them."""
    of_trainer = [line for line in facts.lines if line.is_of_trainer]
    chosen = {id(line) for line in (*of_trainer[-_SHOWN_LINES:], *facts.lines[-_SHOWN_LINES:])}
    found = []
    for line in facts.lines:
        if id(line) in chosen:
            at = "" if line.time is None else time.strftime("%H:%M:%S ", time.localtime(line.time))
            text = line.text.partition("\n")[0]
            found.append(f"{at}{line.source} {line.level} {text}"[:400])
    return found


def _all_lines(facts: Facts, findings: Sequence[Finding]) -> Iterator[str]:
    yield from lines(facts, findings)
    at = time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(facts.now))
    yield f"\n{facts.directory}, {facts.state}, step {facts.step} of {facts.total_steps}, {at}"
    yield ", ".join(f"{name} {version}" for name, version in facts.versions.items())
    for finding in findings[1:]:
        yield f"\n{finding.name}: {finding.what}"
        yield _row("evidence", "; ".join(finding.evidence))
        yield _row("remedy", finding.remedy)
    if facts.services:
        yield "\nservices"
        for service in facts.services:
            yield f"  {service.name}: {service.state}: {service.text}{_waits(service.awaited)}"
    if facts.ranks:
        yield "\nranks"
        for rank in facts.ranks:
            yield f"  {where(rank)}{_waits(rank.awaited)}"
    if facts.lines:
        yield "\nlast lines that matter"
        yield from (f"  {line}" for line in last_lines(facts))
    for rank in facts.ranks:
        if rank.stacks:
            yield f"\nstacks of {rank.name}\n{rank.stacks}"


def where(rank: RankFacts) -> str:
    """Returns where a rank is, in words."""
    if not rank.answered:
        return f"{rank.name} does not answer"
    collective = f", in {rank.collective}" if rank.collective else ""
    return f"{rank.name} is at: {rank.place or 'no place'}{collective}, for {rank.since_s:.0f} s"


def _waits(awaited: Sequence[Awaited]) -> str:
    calls = [f"{each.call} from {each.service} for {each.seconds:.0f} s" for each in awaited]
    return f"; waits for {', '.join(calls[:3])}" if calls else ""


def _asked(facts: Facts) -> str:
    if facts.not_asked:
        return f"the files alone: {ServiceError(**facts.not_asked)}"
    if not facts.asked:
        return "the files alone: the run has no topology.json"
    waits = [_waits(rank.awaited) for rank in facts.ranks if rank.rank == 0]
    count = f"{len(facts.services)} services and {len(facts.ranks)} ranks"
    return f"{count}, which answer{''.join(waits)}"


def _row(name: str, said: str) -> str:
    return f"{name:<{_WIDTH}}{' '.join(said.split())}"


def _since(since: float, facts: Facts) -> str:
    seconds = max(0.0, facts.now - since)
    ago = f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(since))
    done = [line["step"] for line in facts.steps if line.get("time", 0) <= since]
    total = f" of {facts.total_steps}" if facts.total_steps else ""
    return f"{at} ({ago} before this report), after step {max(done, default=0)}{total}"
