"""The causes that `rlhf why` can name. Each looks for its own trace in the record of a run; those
from outside the policy come first, since they explain the others. No torch.
"""

import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from statistics import fmean, median
from typing import NamedTuple

from common.errors import ServiceError
from services.reward.answers.exact import same_answer
from services.reward.answers.extract import extract_answer, gold_answer
from trainer.dashboard.tokens import TokenTexts
from trainer.diagnosis.report import TEXT_FILE
from trainer.observe.group_files import CompletionText, GroupTexts
from trainer.what_if.run_facts import RunFacts

_NO_CLIP = 10.0
_FACTOR = 3.0
"""A learning rate that grows by this factor in a step was changed; a warm-up doubles it at most."""
_MOST = 0.5
"""Share of groups that makes a trace one of the run rather than of some problems."""
_PAID = 0.8
"""How much more often a phrase is in answers above their group's mean than in the others."""
_FEWEST = 8
_ODD = 0.1
"""Share of answers that are right and not paid, or paid and not right."""
_STEPS_OF_PHRASE = 4
_TURNED = 0.25
"""Share of groups in which wrong answers are paid more than right ones. A reward that ignores what
is right has a half of them."""
_FEW_CUT = 0.05
_MANY_CUT = 0.3
_ALL_CUT = 0.9
"""Shares of cut answers: from few to all in one step, a policy is broken."""
_OTHERS_SAY = re.compile(
    r"trainer\.|evaluation\.|checkpoint\.|limits\.|trackers\.|optimizer\.learning_rate"
    r"|sampling\.max_new_tokens|state_dir"
)
"""Settings that change no answer, or whose effects have causes of their own."""
_SHOWN = 3
_END = 30
"""Characters of the end of a problem that a prompt must have."""
_BEFORE = 6
"""Characters before a number by which it is known."""
_NUMBER = re.compile(r"-?\d+(?:[.,]\d+)*")


Place = tuple[int, str]
"""A step and the id of one of its groups."""


@dataclass(frozen=True)
class Cause:
    """A cause that the record shows."""

    name: str
    first: int
    """The first step that shows it."""
    what: str
    remedy: str
    groups: Sequence[Place]
    """Some groups that show it."""


class Trace(NamedTuple):
    """What a cause left in the record."""

    first: int
    evidence: tuple[object, ...] = ()
    """What the sentence of the cause says, in its order."""
    groups: Sequence[Place] = ()


def high(facts: RunFacts, *, metric: str, bound: float, least: float = 0.0) -> Trace | None:
    """Finds a number that stays at `bound` or above from some step on, in the median of the steps
    that have it. At least a share of `least` of the steps since then must have it: an alarm, which
    is 1 in the steps that raised it, is missing from the others.
    """
    since = list(itertools.dropwhile(lambda pair: pair[1] < bound, facts.series(metric)))
    values = [value for _, value in since]
    if not values or median(values) < bound:
        return None
    if len(values) < least * sum(step >= since[0][0] for step in facts.steps):
        return None
    return Trace(since[0][0], (len(values), fmean(values), max(values)))


def template(facts: RunFacts) -> Trace | None:
    """The prompt that the model reads lacks a part of the problem."""
    if facts.settings[-1][1].get("environment.name"):
        return None  # an environment words its own prompts
    try:
        tokens = TokenTexts.of_run(facts.directory)
    except ServiceError:
        return None

    for step in facts.steps:
        groups = facts.texts(step)
        found = []
        for group in groups:
            read = "".join(tokens.texts(group.prompt_tokens))
            if _squeezed(group.prompt)[-_END:] not in _squeezed(read):
                found.append((group, read))
        if found and len(found) >= _MOST * len(groups):
            evidence = (found[0][0].prompt[-60:], found[0][1][-80:])
            return Trace(step, evidence, _places(step, [group for group, _ in found]))
    return None


def leak(facts: RunFacts) -> Trace | None:
    """The number that follows certain words of the prompts is always the ground truth."""
    # The first group of each problem.
    problems = {
        group.prompt_id: (step, group)
        for step in reversed(facts.steps)
        for group in facts.texts(step)
    }
    found: dict[str, list[Place]] = defaultdict(list)
    others = Counter[str]()
    for step, group in reversed(problems.values()):
        gold = gold_answer(group.ground_truth) or ""
        for number in _NUMBER.finditer(group.prompt):
            slot = group.prompt[max(0, number.start() - _BEFORE) : number.start()]
            if same_answer(gold, number[0]):
                found[slot].append((step, group.id))
            else:
                others[slot] += 1
    slot, places = max(
        found.items(), key=lambda each: len(each[1]) - 9 * others[each[0]], default=("", [])
    )
    if len(places) < max(_FEWEST, _ODD * len(problems), 9 * others[slot]):
        return None
    return Trace(places[0][0], (len(places), len(problems), slot), places[:_SHOWN])


def duplicates(facts: RunFacts) -> Trace | None:
    """The same problem has several ids."""
    problems: dict[str, dict[str, Place]] = defaultdict(dict)
    for step, groups in facts.groups.items():
        for group in groups:
            if group.prompt and group.prompt_id:
                ids = problems[_squeezed(group.prompt)]
                ids.setdefault(group.prompt_id, (step, group.id))
    total = sum(map(len, problems.values()))
    most = max(problems.values(), key=len, default={})
    is_one_often = len(most) >= max(_FEWEST, _ODD * total)
    if not is_one_often and (total < _FEWEST or len(problems) > _MOST * total):
        return None
    names, places = zip(*list(most.items())[:_SHOWN], strict=True)
    evidence = (total, len(problems), len(most), ", ".join(names))
    return Trace(places[0][0], evidence, places)


def rate(facts: RunFacts) -> Trace | None:
    """The learning rate was raised."""
    for (_, before), (step, now) in itertools.pairwise(facts.series("update.learning_rate")):
        if before > 0 and now >= _FACTOR * before:
            return Trace(step, (before, now))
    return None


def norm_bound(facts: RunFacts) -> Trace | None:
    """No bound keeps a gradient small."""
    for step, norm in facts.series("update.grad_norm"):
        most = facts.setting("optimizer.max_grad_norm", step) or 0.0
        if most >= _NO_CLIP and norm > 1.0:
            return Trace(step, (most, norm))
    return None


def clip_bound(facts: RunFacts) -> Trace | None:
    """No bound clips a token."""
    for step, fraction in facts.series("update.clip_fraction"):
        high = facts.setting("algorithm.clip_high", step) or 0.0
        is_bound = facts.setting("algorithm.policy_loss", step) == "clip"
        if is_bound and high >= 1.0 and fraction == 0.0:
            return Trace(step, (high,))
    return None


def phrase(facts: RunFacts) -> Trace | None:
    """The reward pays for a phrase and not for the answer."""
    for step in facts.steps:
        graded = list(_graded(facts.texts(step)))
        if not any(is_odd for *_, is_odd in graded):
            continue
        for later in range(step + 1, step + _STEPS_OF_PHRASE):
            graded += _graded(facts.texts(later))
        odd = sum(is_odd for *_, is_odd in graded)
        paid = [_phrases(text) for text, is_paid, _ in graded if is_paid]
        others = [_phrases(text) for text, is_paid, _ in graded if not is_paid]
        if min(len(paid), len(others), odd) < _FEWEST // 2 or odd < _ODD * len(graded):
            continue
        of_paid = Counter(itertools.chain.from_iterable(paid))
        of_others = Counter(itertools.chain.from_iterable(others))
        lead = {
            each: count / len(paid) - of_others[each] / len(others)
            for each, count in of_paid.items()
        }
        found = max(lead, key=lambda each: (lead[each], len(each)), default="")
        if lead.get(found, 0.0) >= _PAID:
            evidence = (
                odd,
                len(graded),
                found,
                of_paid[found] / len(paid),
                of_others[found] / len(others),
            )
            return Trace(step, evidence, _places(step, facts.texts(step)))
    return None


def _graded(groups: Sequence[GroupTexts]) -> Iterator[tuple[str, bool, bool]]:
    """Yields the answers of groups whose rewards differ: the text, whether it is paid, with a
    reward above the mean of its group, and whether it is paid and wrong, or right and not paid, as
    far as numbers tell.
    """
    for group in groups:
        rewards = [each.reward for each in group.completions if each.reward is not None]
        if len(rewards) < len(group.completions) or len(set(rewards)) < 2:
            continue
        mean = fmean(rewards)
        for reward, (each, is_right) in zip(rewards, _judged(group), strict=True):
            is_paid = reward > mean
            yield each.text, is_paid, is_right not in (None, is_paid)


def _judged(group: GroupTexts) -> Iterator[tuple[CompletionText, bool | None]]:
    """Yields the answers of a group, and whether they are right, as far as numbers tell."""
    gold = gold_answer(group.ground_truth) or ""
    for each in group.completions:
        # An episode's text has the words of its environment, too.
        answer = extract_answer(each.text) if each.episode is None else None
        yield each, None if answer is None else same_answer(gold, answer)


def inverted(facts: RunFacts) -> Trace | None:
    """Wrong answers are paid more than the right ones beside them."""
    for step in facts.steps:
        groups = [
            (later, *_by_verdict(group))
            for later in range(step, step + _STEPS_OF_PHRASE)
            for group in facts.texts(later)
        ]
        both = [each for each in groups if all(each)]
        turned = [later for later, wrong, right in both if fmean(wrong) > fmean(right)]
        if len(turned) >= max(_SHOWN, _TURNED * len(both)):
            return Trace(turned[0], (len(turned), len(both)))
    return None


def _by_verdict(group: GroupTexts) -> tuple[list[float], list[float]]:
    """Returns the rewards of wrong and of right answers."""
    found: tuple[list[float], list[float]] = ([], [])
    for each, is_right in _judged(group):
        if is_right is not None and each.reward is not None:
            found[is_right].append(each.reward)
    return found


def sudden(facts: RunFacts) -> Trace | None:
    """All answers run to their limit, and in the step before hardly any did, with the same
    settings.
    """
    changed = {step for step, _ in facts.changes()}
    for (_, before), (step, now) in itertools.pairwise(facts.series("truncated")):
        if before <= _FEW_CUT and now >= _ALL_CUT and step not in changed:
            return Trace(step, (before, now))
    return None


def other_settings(facts: RunFacts) -> Trace | None:
    """The run went on with other settings."""
    changes = (each for each in facts.changes() if not _OTHERS_SAY.match(each[1]))
    return next((Trace(step, (change,)) for step, change in changes), None)


def fault(facts: RunFacts) -> Trace | None:
    """The run ended with a fault, and left its diagnosis."""
    path = facts.directory / TEXT_FILE
    if not path.is_file():
        return None
    first_line, *_ = path.read_text(encoding="utf-8").splitlines()
    return Trace(facts.steps[-1], (first_line,))


def problem(facts: RunFacts) -> Trace | None:
    """The answers to one problem agree on something else than its ground truth."""
    groups: dict[str, list[tuple[int, GroupTexts]]] = defaultdict(list)
    for step in facts.steps[len(facts.steps) // 2 :]:
        for group in facts.texts(step):
            groups[group.prompt_id].append((step, group))
    suspects = []
    for name, found in groups.items():
        answers = Counter(
            extract_answer(completion.text) or ""
            for _, group in found
            for completion in group.completions
        )
        (answer, count), *_ = answers.most_common(1)
        share = count / answers.total()
        gold = gold_answer(found[0][1].ground_truth) or ""
        # A policy is wrong on a problem now and then: it has to insist.
        is_sure = len(found) >= _SHOWN and share >= _MOST
        if answer and is_sure and same_answer(gold, answer) is False:
            suspects.append((share, name, answer, gold))
    # Where the policy is wrong on most problems, it is the policy.
    if not suspects or len(suspects) > max(1, len(groups) // 4):
        return None
    evidence = max(suspects)
    found = groups[evidence[1]]
    places = [(step, group.id) for step, group in found[:_SHOWN]]
    return Trace(places[0][0], (*evidence, found[0][1].prompt[:100]), places)


CAUSES: Sequence[tuple[str, Callable[[RunFacts], Trace | None], str, str]] = (
    (
        "engine",
        partial(high, metric="alarm.delta_logprob", bound=1.0),
        "from step {step} on, {0} steps have the alarm delta_logprob: the log-probabilities of the "
        "engine are not the trainer's, so it had other weights or numbers",
        "drop these steps (rlhf fork from the step before), and look at the engine's log",
    ),
    (
        "template",
        template,
        "the prompts lack the end of the problem: {0!r} became {1!r}",
        "repair model.chat_template",
    ),
    (
        "leak",
        leak,
        "{0} of {1} problems state their answers, after {2!r}",
        "remove the answer from the column of the problem (data.prompt_field)",
    ),
    (
        "duplicates",
        partial(high, metric="alarm.copied_answers", bound=1.0),
        "step {step} has equal answers that are no coincidence: one seed for several",
        "see alarm copied_answers",
    ),
    (
        "duplicates",
        duplicates,
        "{0} problems have only {1} different texts; one of them has {2} ids: {3}, …",
        "remove the copies from the data",
    ),
    (
        "rate",
        rate,
        "the learning rate goes from {0:.3g} to {1:.3g} at step {step}",
        "lower optimizer.learning_rate",
    ),
    (
        "clip",
        norm_bound,
        "optimizer.max_grad_norm is {0:g}: from step {step} on, gradients with a norm above 1 "
        "({1:.3g}) are applied whole",
        "set optimizer.max_grad_norm to 1",
    ),
    (
        "clip",
        clip_bound,
        "algorithm.clip_high is {0:g}: no token is clipped",
        "set algorithm.clip_low and clip_high to 0.2",
    ),
    (
        "stale groups",
        partial(high, metric="staleness", bound=1.5),
        "from step {step} on, the groups are up to {2:.1f} weight versions old on average",
        "lower trainer.max_staleness, or raise engine speed",
    ),
    (
        "phrase",
        phrase,
        "{0} of {1} answers are paid for something else than being right: {2!r} (digits as 0) is "
        "in {3:.0%} of those above the mean of their group and in {4:.0%} of the others",
        "correct the reward function; rlhf regrade shows what that changes",
    ),
    (
        "reward",
        inverted,
        "from step {step} on, wrong answers are paid more than right ones, in {0} of {1} groups "
        "that have both",
        "correct the reward function; rlhf regrade shows what that changes",
    ),
    (
        "problem",
        problem,
        "{0:.0%} of the answers to one problem ({1}) agree on {2}, and its ground truth says {3}: "
        "{4!r}",
        "correct the row, and see what it changes with rlhf regrade --gold",
    ),
    (
        "dropped",
        partial(high, metric="dropped.reward", bound=1.0, least=_MOST),
        "from step {step} on, {0} steps lack {1:.1f} groups on average whose answers could not be "
        "graded: what is left is a choice",
        "see the reasons of dropped groups in groups.jsonl, and correct the reward function",
    ),
    (
        "fault",
        fault,
        "the run ended after step {step}: {0}",
        "see rlhf diagnose",
    ),
    (
        "settings",
        other_settings,
        "from step {step} on the run has other settings: {0}",
        "set them back: rlhf fork from the step before",
    ),
    (
        "rate",
        sudden,
        "{0:.0%} of the answers were cut, and at step {step} {1:.0%} are: the update before it was "
        "too large",
        "lower optimizer.learning_rate",
    ),
    (
        "cut",
        partial(high, metric="truncated", bound=_MANY_CUT),
        "from step {step} on, {1:.0%} of the answers are cut at sampling.max_new_tokens",
        "raise sampling.max_new_tokens",
    ),
)
"""Name, search, sentence of the evidence, and remedy, in the order in which they are named: what
comes from outside first, and what other causes also bring about last."""


def causes(facts: RunFacts) -> Iterator[Cause]:
    """Yields the causes that the record shows, the likeliest first."""
    for name, find, sentence, remedy in CAUSES:
        found = find(facts)
        if found is not None:
            what = sentence.format(*found.evidence, step=found.first)
            yield Cause(name, found.first, what, remedy=remedy, groups=found.groups)


def _places(step: int, groups: Sequence[GroupTexts]) -> list[Place]:
    return [(step, group.id) for group in groups[:_SHOWN]]


def _squeezed(text: str) -> str:
    return re.sub(r"\s+", "", text)


@lru_cache(maxsize=4096)
def _phrases(text: str) -> frozenset[str]:
    """Returns the runs of one to three words of a text, digits as 0, and its single signs."""
    words = re.sub(r"\d+", "0", text).split()
    runs = {" ".join(words[i : i + n]) for n in (1, 2, 3) for i in range(len(words) - n + 1)}
    return frozenset(runs | {sign for sign in text if not sign.isalnum() and not sign.isspace()})
