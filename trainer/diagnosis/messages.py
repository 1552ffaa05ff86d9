"""Findings from what the processes of a run said: the codes and fields of their last words and of
the lines of their logs. Pure.
"""

import re
from collections.abc import Iterable, Iterator

from trainer.diagnosis.facts import Facts, Finding, Level, LogLine, finding
from trainer.diagnosis.processes import stalled_for
from trainer.observe import catalogue
from trainer.observe.catalogue import Fault, fault_of_service

_SETTING = re.compile(r"[a-z_]+\.[a-z_]+\b|--[a-z]|[A-Z][A-Z_]+\b|seed\b|state_dir\b")
"""The field of an error that is about a setting."""
_FRAME = re.compile(r"line \d+, in (\w+)")
"""A line of one of Python's stacks."""
_BEFORE_THE_END_S = 90.0
"""A line may name the reason of the end if it was written at most this long before it."""
_MANY_DROPS = 3
_PROBLEMS = {
    "unreachable": "",
    "waiting": "",
    "service_lost": "lost",
    "disk_full": "disk_full",
}
"""Codes of a call that failed, and its problem; empty: its fields have it."""


def from_messages(facts: Facts) -> Iterator[Finding]:
    """Yields the findings of the last words of rank 0, then those of the logs, the causes first."""
    recent = list(_recent(facts))
    lost = list(_lost_ranks(facts, recent))
    yield from lost
    if lost:
        return
    if facts.end and not facts.lives:
        yield from _of_exit(facts, facts.end, recent)
    elif facts.state == "killed":
        yield _killed(facts, recent)
    elif facts.state in ("empty", "starting"):
        yield from _failed_tasks(facts, recent)
    if facts.state == "finished":
        return
    level: Level = "stalled" if facts.lives else "stopped"
    yield from _of_waits(facts, recent, level)
    yield from _of_graders(facts, recent, level)
    yield from _of_drops(facts, recent)
    yield from _of_nodes(recent, level)


def fault_of(line: LogLine) -> Fault:
    """Returns the row of the table that an error is about; `catalogue.ENDED` without one."""
    fields = dict(line.fields)
    cause = fields.pop("cause", "")
    if cause:
        found = fault_of(line.model_copy(update={"code": cause, "fields": fields}))
        if found != catalogue.ENDED:
            return found
    known = (
        _of_place(line) or catalogue.BY_CODE.get(line.code) or catalogue.fault_in_text(line.text)
    )
    reason = fields.get("reason", "")  # why groups were dropped
    if known is None and reason:
        return catalogue.NOT_GRADED if reason == "reward" else catalogue.NOT_GENERATED
    return known or catalogue.ENDED


def _of_place(line: LogLine) -> Fault | None:
    """Returns the fault of an error whose meaning depends on where it happened, such as a full
    disk; None for other errors.
    """
    code = line.code
    fields = line.fields
    full = (
        "disk_full" in (code, fields.get("problem"))
        or catalogue.fault_in_text(line.text) == catalogue.DISK_OF_RUN
    )
    if code in catalogue.OLD_WEIGHTS.codes and full:
        return catalogue.DISK_OF_NODE
    if "service" in fields and code in _PROBLEMS:
        return fault_of_service(fields["service"], _PROBLEMS[code] or fields.get("problem", ""))
    if code == "disk_full" and fields.get("field") == "state_dir":
        return fault_of_service(line.source, code)
    return None


def _recent(facts: Facts) -> Iterator[LogLine]:
    """Yields the lines since the last step: a fault before it did not keep the run from going on.
    Of a run that has ended, at least those of the last minutes.
    """
    begin = max(facts.last or 0.0, facts.started or 0.0) if facts.steps else 0.0
    if not facts.lives and facts.exited is not None:
        begin = min(begin, facts.exited - _BEFORE_THE_END_S)
    for line in facts.lines:
        if line.time is None or line.time >= begin:
            yield line


def _lost_ranks(facts: Facts, lines: list[LogLine]) -> Iterator[Finding]:
    """Yields why the ranks of an ended run gave up on one of them."""
    if facts.lives:
        return
    for line in _with_code(lines, "rank_lost"):
        how = line.fields.get("how")
        is_rank_zero = line.fields.get("number") == "0"
        if how == "stopped" or (how == "failed" and is_rank_zero and facts.end):
            continue  # the end of rank 0 is told by its own last word
        fault = catalogue.RANK_DIES if how == "died" else catalogue.RANK_STUCK
        if how == "failed":
            fault = fault_of(line)
        remedy = ""
        if fault == catalogue.RANK_DIES and facts.restarts is False:  # nobody starts it again
            remedy = catalogue.KILLED.remedy
        if fault == catalogue.ENDED:
            remedy = line.fields.get("remedy", "")
        evidence = [each.message for each in _with_code(lines, "rank_killed")][-1:]
        evidence.append(line.said)
        for place in _with_code(lines, "rank_place"):  # where those were that waited for it
            calls = _FRAME.findall(place.text)
            at = calls[-1] if calls else "no Python code"
            evidence.append(f"{place.fields.get('rank')} was in {at}")
        yield finding(
            fault, line.message, line.time, level="stopped", evidence=evidence, remedy=remedy
        )
        return


def _of_exit(facts: Facts, end: LogLine, lines: list[LogLine]) -> Iterator[Finding]:
    fault = fault_of(end)
    if fault == catalogue.INTERRUPTED:
        yield from _failed_tasks(facts, lines)
        yield finding(fault, "by SIGTERM or Ctrl-C", facts.exited, level="stopped")
        return
    if fault == catalogue.KILLED:
        yield _killed(facts, lines)
        return

    if fault == catalogue.ENDED and not facts.steps and _SETTING.match(end.fields.get("field", "")):
        fault = catalogue.WRONG_SETTING
    began = None if facts.steps else facts.started
    # A call's remedy is written by the caller, who does not know what ails the service.
    remedy = "" if end.code == "unreachable" else end.fields.get("remedy", "")
    waits = [
        line.time - line.seconds
        for line in _with_code(lines, "waiting")
        if line.time is not None and fault_of(line) == fault
    ]
    yield finding(
        fault,
        end.message,
        min(waits, default=began or facts.exited),
        level="stopped",
        evidence=[*_field(end), *_last_error(lines, end.fields.get("service", ""))],
        remedy=remedy,
    )


def _field(line: LogLine) -> list[str]:
    """Returns the field of an error with its value, if it has one."""
    field = line.fields.get("field")
    if not field:
        return []
    return [f"{field} is {line.fields['value']}" if "value" in line.fields else field]


def _killed(facts: Facts, lines: list[LogLine]) -> Finding:
    holder = facts.holder
    who = f"process {holder.get('pid')} on {holder.get('host')}" if holder else "its process"
    since = facts.last or facts.started
    evidence = (
        f"{who} still has the lock, without a last word: SIGKILL, power was lost, or, for a script "
        "of yours, SIGTERM or SIGHUP (its terminal closed)"
    )
    for line in _with_code(lines, "rank_killed"):
        evidence = line.message
        since = line.time or since
    what = f"{who} is gone"
    return finding(catalogue.KILLED, what, since, level="stopped", evidence=[evidence])


def _failed_tasks(facts: Facts, lines: list[LogLine]) -> Iterator[Finding]:
    """Yields the task that had failed for good when the group ended its trainer."""
    for line in reversed(lines):
        is_last_word = not line.logger or (line.logger == "end" and line.level == "CRITICAL")
        is_late = (
            not line.time
            or not facts.exited
            or (abs(facts.exited - line.time) <= _BEFORE_THE_END_S)
        )
        if line.is_of_trainer or not is_last_word or not is_late:
            continue
        fault = fault_of(line)
        if fault == catalogue.ENDED:
            is_setting = _SETTING.match(line.fields.get("field", ""))
            fault = catalogue.WRONG_SETTING if is_setting else catalogue.TASK_FAILED
        yield finding(
            fault,
            f"{line.source}: {line.message}",
            line.time,
            level="stopped",
            evidence=[f"the last line of {line.source}", *_field(line)],
            remedy=line.fields.get("remedy", ""),
        )
        return


def _of_waits(facts: Facts, lines: list[LogLine], level: Level) -> Iterator[Finding]:
    """Yields a finding for every service that the trainer has waited for since the last step."""
    newest = {
        line.fields.get("service", ""): line
        for line in _with_code(lines, "waiting")
        if line.is_of_trainer
    }
    for line in newest.values():
        fault = fault_of(line)
        if fault != catalogue.ENDED:
            since = (line.time or facts.now) - line.seconds
            yield finding(fault, line.message, since, level=level, evidence=[line.said])


def _of_graders(facts: Facts, lines: list[LogLine], level: Level) -> Iterator[Finding]:
    """Yields the reward functions that failed or hung since the last step of a run that stalls or
    has ended. While steps go on, their answers are dropped, and that is counted.
    """
    if facts.lives and not stalled_for(facts):
        return
    # The reward-server logs a reason once, which may have been before the last step.
    is_awaited = any(
        call.service == "reward-server" for rank in facts.ranks for call in rank.awaited
    )
    code = "reward_function_failed"
    known = _with_code(lines, code) or (_with_code(facts.lines, code) if is_awaited else [])
    newest = {line.fields.get("function", ""): line for line in known}
    since = facts.last or facts.started
    for line in newest.values():
        yield finding(catalogue.NOT_GRADED, line.message, since, level=level, evidence=[line.said])


def _of_drops(facts: Facts, lines: list[LogLine]) -> Iterator[Finding]:
    found: dict[str, list[LogLine]] = {}
    for line in _with_code(lines, "group_dropped"):
        found.setdefault(line.fields.get("reason", ""), []).append(line)
    level: Level = "harm" if facts.lives else "stopped"
    for reason, dropped in found.items():
        last = dropped[-1]
        what = f"{len(dropped)} groups were dropped ({reason}), such as: {last.message}"
        if len(dropped) >= _MANY_DROPS:
            yield finding(fault_of(last), what, dropped[0].time, level=level, evidence=[last.said])


def _of_nodes(lines: list[LogLine], level: Level) -> Iterator[Finding]:
    """Yields what the agents of the rollout nodes report."""
    for line in reversed(lines):
        if line.code not in catalogue.OLD_WEIGHTS.codes:
            continue
        fault = fault_of(line)
        if fault == catalogue.DISK_OF_NODE or line.code == "node_stale":
            what = f"{line.source}: {line.message}"
            yield finding(fault, what, line.time, level=level, evidence=[line.said])
            return


def _last_error(lines: list[LogLine], service: str) -> Iterator[str]:
    """Yields the last error in the log of this service, or of any service if it is empty; nothing
    if there is none.
    """
    for line in reversed(lines):
        concerns = line.source.startswith(service) if service else not line.is_of_trainer
        if concerns and line.level in ("ERROR", "CRITICAL", ""):
            yield line.said
            return


def _with_code(lines: Iterable[LogLine], code: str) -> list[LogLine]:
    return [line for line in lines if line.code == code]
