"""The invariants of episodes under faults, checked in what was stored and in two independent logs: of the
engine, whose every answer is unique, and of the programs, which number their episodes.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from common.wire.schemas import Completion, Group
from tests.chaos.episodes.swallows import UNIT


@dataclass
class Evidence:
    """What a run left behind."""

    kind: str
    group_size: int
    wanted: int
    drawn: int
    """Positions of the prompt stream that were drawn."""
    left_out: set[int]
    """Positions that were given up after too many tries."""
    groups: list[Group]
    engine: list[dict[str, Any]]
    """The engine's answers: `text`, `tokens`, `fault`."""
    programs: list[dict[str, Any]]
    """What the programs saw: `number`, and `calls` with `text` and `error`."""
    left_in_disk: list[str] = field(default_factory=list)
    """Files in the folders of temporary files after the end."""

    def episodes(self) -> dict[tuple[str, int], list[Completion]]:
        """Returns the sequences of every stored episode, by group and number."""
        found: dict[tuple[str, int], list[Completion]] = {}
        for group in self.groups:
            for each in group.completions:
                found.setdefault((group.id, each.episode or 0), []).append(each)
        return found

    def noted(self) -> dict[int, dict[str, Any]]:
        return {line["number"]: line for line in self.programs if line["calls"] or self.is_class}

    @property
    def is_class(self) -> bool:
        return self.kind == "class"


def _met_fault(line: dict[str, Any]) -> bool:
    return any(call["text"] is None for call in line["calls"])


def violations(run: Evidence) -> list[str]:
    """Describes every violated invariant; empty if all hold."""
    checks = (_groups, _no_reward_of_a_fault, _tokens, _whole, _tidy)
    return [f"{check.__name__[1:]}: {problem}" for check in checks for problem in check(run)]


def _groups(run: Evidence) -> list[str]:
    """No group and no position twice, and none is lost: it is stored or counted as left out."""
    found = []
    positions = Counter(group.position for group in run.groups)
    twice = [position for position, times in positions.items() if times > 1]
    if twice:
        found.append(f"stored twice: positions {twice}")
    missing = set(range(run.drawn)) - set(positions) - run.left_out
    if missing:
        found.append(f"neither stored nor left out: positions {sorted(missing)}")
    if len(run.groups) != run.wanted:
        found.append(f"{len(run.groups)} groups are stored instead of {run.wanted}")
    for group in run.groups:
        numbers = {each.episode for each in group.completions}
        if numbers != set(range(run.group_size)):
            found.append(f"group {group.id} has the episodes {sorted(map(str, numbers))}")
    return found


def _number(each: Completion) -> int:
    """Returns the number that the program put into the reward."""
    parts = each.components
    value = parts.get("number", parts.get("reward")) or 0.0
    return round(value / UNIT)


def _no_reward_of_a_fault(run: Evidence) -> list[str]:
    """A stored reward is that of an episode whose every call was answered."""
    found = []
    noted = run.noted()
    seen = Counter[int]()
    for name, sequences in run.episodes().items():
        number = _number(sequences[0])
        seen[number] += 1
        line = noted.get(number)
        if line is None:
            found.append(f"episode {name} has a reward of a program that did not reach its end")
        elif _met_fault(line):
            found.append(f"episode {name} has the reward of a fault: {line['calls']}")
    found += [f"the reward of program {n} is stored {k} times" for n, k in seen.items() if k > 1]
    return found


def _tokens(run: Evidence) -> list[str]:
    """Every sampled token that is trained is an answer of the engine, exactly, and only once."""
    found = []
    answers = {tuple(line["tokens"]) for line in run.engine}
    times = Counter[tuple[int, ...]]()
    for name, sequences in run.episodes().items():
        for each in sequences:
            assert each.mask is not None
            spans = [(turn.start, turn.end) for turn in each.turns]
            if int(each.mask.sum()) != sum(end - start for start, end in spans):
                found.append(f"the mask of episode {name} is not its turns")
            for start, end in spans:
                sampled = tuple(each.token_ids[start:end].tolist())
                times[sampled] += 1
                if sampled not in answers:
                    found.append(f"episode {name} has tokens that no engine sampled")
    found += [f"an answer is trained {k} times" for k in times.values() if k > 1]
    return found


def _whole(run: Evidence) -> list[str]:
    """A stored episode has every answer that its program got, and no other."""
    found = []
    noted = run.noted()
    for name, sequences in run.episodes().items():
        line = noted.get(_number(sequences[0]))
        if line is None or run.is_class:
            continue
        turns = sum(len(each.turns) for each in sequences)
        got = [call["text"] for call in line["calls"] if call["text"] is not None]
        text = "\n".join(each.text for each in sequences)
        if turns != len(got) or not all(answer in text for answer in got):
            found.append(f"episode {name} has {turns} turns, and its program got {len(got)}")
    return found


def _tidy(run: Evidence) -> list[str]:
    """No file of an episode is left."""
    return [f"left: {run.left_in_disk}"] if run.left_in_disk else []
