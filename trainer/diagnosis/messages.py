"""Findings from what the processes of a run said: their last words and their logs. Pure."""

import re
from collections.abc import Iterable, Iterator

from trainer.diagnosis import names
from trainer.diagnosis.facts import Facts, Finding, Level, LogLine
from trainer.diagnosis.processes import stalled_for
from trainer.diagnosis.unreachable import problem_of

_UNANSWERED = re.compile(r"(\S+) did not answer ([A-Z]+ \S+)(?: in time)?: (.*)", re.DOTALL)
_NOT_HEALTHY = re.compile(
    r"not healthy after \S+ s(?: without progress)?: (\S+) at \S+ \((.*)", re.DOTALL
)
_WAITED = re.compile(r"waited (\d+) s so far for (\S+) to answer (.*)", re.DOTALL)
_LOST_RANK = re.compile(
    r"(rank \d+ on \S+ \([^)]*\)|rank \d+ on \S+) "
    r"(is lost: its process was killed|is lost: silent|has failed: (?P<reason>.*?)\. rank)",
    re.DOTALL,
)
_ENDED_BY_SIGNAL = re.compile(r"rank \d+ was killed by SIG")
_PATTERNS = (
    (names.SECOND_RUN, r"is using this directory|took over its directory"),
    (names.CHECKPOINT_DAMAGED, r"has changed since it was written"),
    (
        names.SQLITE_DAMAGED,
        r"acknowledged changes are gone|disk image is malformed|file is not a database"
        r"|btreeInitPage",
    ),
    (names.ENGINE_CANNOT, r"the embedded engine cannot run this model"),
    (names.ENGINE_OF_PROCESS, r"the engine has died"),
    (names.ENGINE_DIES_AGAIN, r"engine (?:crashed|failed to start) \d+ times in a row"),
    (names.EQUAL_REWARDS, r"rounds of dynamic sampling left groups of equal rewards"),
    (names.NOT_FINITE, r"not finite|NonFinite"),
    (
        names.RANK_MEMORY,
        r"OutOfMemory|out of (?:GPU )?memory|Cannot allocate memory|bad_alloc|MemoryError",
    ),
    (names.WRONG_TOKEN, r"token is wrong|a token is needed|API_TOKEN|HTTP 401"),
    (names.CERTIFICATE, r"certificate of \S+ is not trusted"),
    (names.WEIGHTS_DAMAGED, r"the weights in \S+ are damaged|the weights cannot be read"),
    (names.CANNOT_START, r"graders d(?:id|o) not start|status \d+\b.* before it answered"),
    (names.NOT_GRADED, r"an answer could not be graded"),
)
_GRADER = re.compile(
    r"the reward function (\S+) (?:failed for \d+ answers|has no score)[^:]*: (.*)", re.DOTALL
)
_DROPPED = re.compile(r"dropped the group of prompt \S+: (\w+): (.*)", re.DOTALL)
_SERVICE = re.compile(r"\b(?:data|rollout|reward|critic|environment)-server|\breplay-buffer")
_LAST_DROP = re.compile(r"groups in a row were dropped, the last one because of (\w+): (.*)", re.S)
_FULL = re.compile(r"No space left|disk_full|Disk quota exceeded|HTTP 507|File too large")
_PROBLEMS_OF_NODES = re.compile(r"rollout nodes serve weights (\d+)[;,:] (.*)", re.DOTALL)
_SETTING = re.compile(r"[a-z_]+\.[a-z_]+\b|--[a-z]|[A-Z][A-Z_]+\b|seed\b|state_dir\b")
_BEFORE_THE_END_S = 90.0


def from_messages(facts: Facts) -> Iterator[Finding]:
    """Yields the findings of the last words of rank 0, then those of the logs, the causes first."""
    recent = list(_recent(facts))
    lost = list(_lost_ranks(facts, recent))
    yield from lost
    if lost:
        return
    if facts.exit_reason and not facts.lives:
        yield from _of_exit(facts, recent)
    elif facts.state == "killed":
        yield from _killed(facts, recent)
    elif facts.state in ("empty", "starting"):
        yield from _failed_tasks(facts, recent)
    yield from _of_waits(facts, recent)
    yield from _of_graders(facts, recent)
    yield from _of_drops(facts, recent)
    yield from _of_nodes(facts, recent)


def classify(text: str) -> str:
    """Returns the name of the finding that an error's text is about; `names.ENDED` without one."""
    for name, pattern in _PATTERNS:
        if re.search(pattern, text):
            return name
    match = _UNANSWERED.search(text) or _NOT_HEALTHY.search(text)
    if match is not None:
        return names.of_service(match[1], problem_of(match[match.re.groups]))
    if _FULL.search(text):
        # The trainer publishes weights in its run directory; a node stores them in its own.
        is_node = "weights" in text and "field: trainer." not in text
        return names.DISK_OF_NODE if is_node else names.DISK_OF_RUN
    dropped = _LAST_DROP.search(text)
    if dropped is not None:
        inner = classify(dropped[2])
        return names.DROPS.get(dropped[1], names.NOT_GENERATED) if inner == names.ENDED else inner
    if _PROBLEMS_OF_NODES.search(text):
        return names.OLD_WEIGHTS
    if "no batch of" in text or re.search(r"no progress for \S+ s of waiting for", text):
        return names.NO_BATCH
    return names.ENDED


def parts(text: str) -> tuple[str, str, str]:
    """Splits an error of this system into message, the field with its value, and remedy."""
    text = re.sub(r"^(rank \d+: )?error: ", "", text)
    message, *rest = text.split(" · ")
    fields = dict(part.partition(": ")[::2] for part in rest)
    field = fields.get("field", "")
    if field and "value" in fields:
        field = f"{field} is {fields['value']}"
    return message.partition("\n")[0], field, fields.get("remedy", "")


def _recent(facts: Facts) -> Iterator[LogLine]:
    """Yields the lines since the last step: a fault before it did not keep the run from going on.
    Of a run that has ended, at least those of the last minutes.
    """
    last = facts.steps[-1].get("time", 0.0) if facts.steps else 0.0
    begin = max(last, facts.started or 0.0) if facts.steps else 0.0
    if not facts.lives and facts.exited is not None:
        begin = min(begin, facts.exited - _BEFORE_THE_END_S)
    for line in facts.lines:
        if line.time is None or line.time >= begin:
            yield line


def _lost_ranks(facts: Facts, lines: Iterable[LogLine]) -> Iterator[Finding]:
    """Yields why the ranks of an ended run gave up on one of them."""
    if facts.lives:
        return
    ends = [line.text.partition("\n")[0] for line in lines]
    signals = [text for text in ends if _ENDED_BY_SIGNAL.match(text)]
    for line in lines:
        if "no rank has made progress for" in line.text:
            what = line.text.partition(". ")[0]
            evidence = [_said(line), *_place(lines)]
            yield _finding(names.RANK_STUCK, what, line.time, level="stopped", evidence=evidence)
            return
        match = _LOST_RANK.search(line.text)
        if match is None:
            continue
        reason = match["reason"] or ""
        if reason and match[1].startswith("rank 0 ") and facts.exit_reason:
            continue  # it says more itself
        if reason:
            name = classify(reason)
        elif "silent" in match[2]:
            name = names.RANK_STUCK
        else:
            name = names.RANK_DIES
        what = line.text.partition(". ")[0]
        evidence = [*signals[-1:], _said(line), *_place(lines)]
        found = _finding(name, what, line.time, level="stopped", evidence=evidence)
        if name == names.RANK_DIES and facts.restarts is False:
            found.remedy = names.REMEDIES[names.KILLED]
        if name == names.ENDED:
            found.remedy = parts(reason)[2] or found.remedy
        yield found
        return


def _place(lines: Iterable[LogLine]) -> Iterator[str]:
    """Yields where the ranks were that waited for the lost one."""
    for line in lines:
        if " was here:" in line.text:
            who = line.text.partition(" was here:")[0]
            calls = re.findall(r"line \d+, in (\w+)", line.text)
            yield f"{who} was in {calls[-1] if calls else 'no Python code'}"


def _of_exit(facts: Facts, lines: list[LogLine]) -> Iterator[Finding]:
    reason = facts.exit_reason
    at = facts.exited
    if "interrupted" in reason.partition("\n")[0]:
        yield from _failed_tasks(facts, lines)
        yield _finding(names.INTERRUPTED, "by SIGTERM or Ctrl-C", at, level="stopped")
        return
    signal = _ENDED_BY_SIGNAL.search(reason)
    if signal is not None:
        yield from _killed(facts, lines)
        return

    message, field, remedy = parts(reason)
    name = classify(reason)
    if name == names.ENDED and not facts.steps and _SETTING.match(field):
        name = names.WRONG_SETTING
    began = None if facts.steps else facts.started
    since = _begin_of_wait(name, lines) or began or at
    evidence = [field] if field else []
    evidence += _last_error(lines, reason)
    if _UNANSWERED.search(reason) or _NOT_HEALTHY.search(reason):
        remedy = ""  # that of the caller, who cannot know what the service has
    yield _finding(name, message, since, level="stopped", evidence=evidence, remedy=remedy)


def _killed(facts: Facts, lines: list[LogLine]) -> Iterator[Finding]:
    holder = facts.holder
    who = f"process {holder.get('pid')} on {holder.get('host')}" if holder else "its process"
    since = facts.steps[-1].get("time") if facts.steps else facts.started
    evidence = [
        f"{who} still has the lock, without a last word: SIGKILL, power was lost, or, for a script "
        "of yours, SIGTERM or SIGHUP (its terminal closed)"
    ]
    for line in lines:
        signal = _ENDED_BY_SIGNAL.search(line.text)
        if signal is not None:
            evidence = [line.text.partition("\n")[0]]
            since = line.time or since
    yield _finding(names.KILLED, f"{who} is gone", since, level="stopped", evidence=evidence)


def _failed_tasks(facts: Facts, lines: list[LogLine]) -> Iterator[Finding]:
    """Yields the tasks that had failed for good when the group ended its trainer."""
    for line in reversed(lines):
        if line.source.startswith(("ppo-trainer", "sft")) or not _is_last_word(line):
            continue
        if line.time and facts.exited and abs(facts.exited - line.time) > _BEFORE_THE_END_S:
            continue
        message, field, remedy = parts(line.text)
        name = classify(line.text)
        if name == names.ENDED:
            name = names.WRONG_SETTING if _SETTING.match(field) else names.TASK_FAILED
        evidence = [f"the last line of {line.source}", *([field] if field else [])]
        what = f"{line.source}: {message}"
        yield _finding(name, what, line.time, level="stopped", evidence=evidence, remedy=remedy)
        return


def _is_last_word(line: LogLine) -> bool:
    is_logged = line.logger == "end" and line.level == "CRITICAL"
    return is_logged or not line.logger


def _of_waits(facts: Facts, lines: list[LogLine]) -> Iterator[Finding]:
    """Yields a finding for every service that the trainer has waited for since the last step."""
    if facts.state == "finished":
        return
    newest: dict[str, tuple[LogLine, re.Match[str]]] = {}
    for line in lines:
        match = _WAITED.search(line.text)
        if match is not None and line.source.startswith("ppo-trainer"):
            newest[match[2]] = (line, match)
    for service, (line, match) in newest.items():
        name = names.of_service(service, problem_of(match[3]))
        if name == names.ENDED:
            continue
        since = (line.time or facts.now) - float(match[1])
        level: Level = "stalled" if facts.lives else "stopped"
        what = f"{service} did not answer {match[3].partition(chr(10))[0]}"
        yield _finding(name, what, since, level=level, evidence=[_said(line)])


def _of_graders(facts: Facts, lines: list[LogLine]) -> Iterator[Finding]:
    """Yields the reward functions that failed or hung since the last step of a run that stalls or
    has ended. While steps go on, their answers are dropped, and that is counted.
    """
    if facts.state == "finished" or (facts.lives and not stalled_for(facts)):
        return
    # The reward-server logs a reason once, which may have been before the last step.
    newest = _grader_lines(lines) or (_grader_lines(facts.lines) if _awaits_rewards(facts) else {})
    level: Level = "stalled" if facts.lives else "stopped"
    since = facts.steps[-1].get("time") if facts.steps else facts.started
    for function, (line, reason) in newest.items():
        what = f"the reward function {function} gives no scores: {reason}"
        yield _finding(names.NOT_GRADED, what, since, level=level, evidence=[_said(line)])


def _grader_lines(lines: Iterable[LogLine]) -> dict[str, tuple[LogLine, str]]:
    """Returns the newest failure of every reward function, with its reason."""
    found = {}
    for line in lines:
        match = _GRADER.search(line.text)
        if match is not None and line.source.startswith("reward-server"):
            found[match[1]] = (line, match[2].partition("\n")[0])
    return found


def _awaits_rewards(facts: Facts) -> bool:
    return any(call.service == "reward-server" for rank in facts.ranks for call in rank.awaited)


def _of_drops(facts: Facts, lines: list[LogLine]) -> Iterator[Finding]:
    if facts.state == "finished":
        return
    found: dict[str, list[LogLine]] = {}
    for line in lines:
        match = _DROPPED.search(line.text)
        if match is not None and line.logger:
            found.setdefault(match[1], []).append(line)
    for reason, dropped in found.items():
        if len(dropped) < 3:
            continue
        detail = _DROPPED.search(dropped[-1].text)
        assert detail is not None
        inner = classify(detail[2])
        name = names.DROPS.get(reason, names.NOT_GENERATED) if inner == names.ENDED else inner
        level: Level = "harm" if facts.lives else "stopped"
        what = f"{len(dropped)} groups were dropped ({reason}): {parts(detail[2])[0]}"
        yield _finding(name, what, dropped[0].time, level=level, evidence=[_said(dropped[-1])])


def _of_nodes(facts: Facts, lines: list[LogLine]) -> Iterator[Finding]:
    """Yields what the agents of the rollout nodes report."""
    if facts.state == "finished":
        return
    level: Level = "stalled" if facts.lives else "stopped"
    for line in reversed(lines):
        text = line.text
        if _PROBLEMS_OF_NODES.search(text) and _FULL.search(text):
            yield _finding(names.DISK_OF_NODE, parts(text)[0], line.time, level=level)
            return
        if line.source.startswith("rollout-server") and "this node is stale" in text:
            full = _FULL.search(text) or "cannot be written" in text
            name = names.DISK_OF_NODE if full else names.OLD_WEIGHTS
            what = f"{line.source} {text.partition(chr(10))[0]}"
            yield _finding(name, what, line.time, level=level, evidence=[_said(line)])
            return


def _begin_of_wait(name: str, lines: Iterable[LogLine]) -> float | None:
    """Returns when the trainer began to wait for what it gave up on."""
    starts = []
    for line in lines:
        match = _WAITED.search(line.text)
        if match is None or line.time is None:
            continue
        if names.of_service(match[2], problem_of(match[3])) == name:
            starts.append(line.time - float(match[1]))
    return min(starts, default=None)


def _last_error(lines: Iterable[LogLine], reason: str) -> Iterator[str]:
    """Yields the last error in the log of a service that `reason` names, or of any service if it
    names none; nothing if there is none.
    """
    named = tuple(_SERVICE.findall(reason))
    for line in reversed(list(lines)):
        is_trainer = line.source.startswith(("ppo-trainer", "sft"))
        concerns = line.source.startswith(named) if named else not is_trainer
        if concerns and (line.level in ("ERROR", "CRITICAL") or not line.level):
            yield _said(line)
            return


def _said(line: LogLine) -> str:
    return f"{line.source}: {line.text.partition(chr(10))[0]}"[:400]


def _finding(
    name: str,
    what: str,
    since: float | None,
    *,
    level: Level,
    evidence: Iterable[str] = (),
    remedy: str = "",
) -> Finding:
    return Finding(
        name=name,
        what=what,
        since=since,
        evidence=list(evidence),
        remedy=remedy or names.REMEDIES[name],
        level=level,
    )
