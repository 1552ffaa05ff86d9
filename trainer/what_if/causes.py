"""The causes that `rlhf why` can name. Each looks for its own trace in the record of a run; those
from outside the policy come first, since they explain the others. No torch.
"""

import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from statistics import fmean, median, quantiles

from common.errors import ServiceError
from services.reward.answers.exact import same_answer
from services.reward.answers.extract import extract_answer, gold_answer
from trainer.dashboard.tokens import TokenTexts
from trainer.observe.group_files import GroupTexts
from trainer.what_if.run_facts import RunFacts, first_above

_BROKEN_LOGPROBS = 0.02
"""Nats that trainer and engine differ by when their weights differ; rounding is far below."""
_FACTOR = 3.0
"""A learning rate that grows by so much in a step was changed; a warm-up doubles it at most."""
_OLD = 1.5
_NO_CLIP = 10.0
_MOST = 0.5
"""Share of groups that makes a trace one of the run rather than of some problems."""
_CUT = 0.3
_PAID = 0.8
"""How much more often a phrase is in answers above their group's mean than in the others."""
_FEWEST = 8
_ODD = 0.1
"""Share of answers that are right and not paid, or paid and not right."""
_STEPS_OF_PHRASE = 4
_SHOWN = 3
_STATED = re.compile(r"####|\\boxed|answer\s*(is|:|=)", re.IGNORECASE)


@dataclass(frozen=True)
class Cause:
    """A cause that the record shows."""

    name: str
    first: int
    """The first step that shows it."""
    what: str
    remedy: str
    groups: list[tuple[int, str]] = field(default_factory=list)
    """Steps and ids of some groups that show it."""


def engine(facts: RunFacts) -> Cause | None:
    """Engine and trainer disagree on the same weights."""
    series = facts.series("update.delta_logprob_current")
    if len(series) < 4:
        return None
    usual = quantiles([value for _, value in series], n=4)[0]
    bad = [step for step, value in series if value > max(_BROKEN_LOGPROBS, 10 * usual)]
    if not bad:
        return None
    worst = max(dict(series)[step] for step in bad)
    until = f" to {bad[-1]}" if bad[-1] > bad[0] else ""
    return Cause(
        "engine",
        bad[0],
        f"the engine's log-probabilities are {worst:.2g} nats off the trainer's in step {bad[0]}"
        f"{until} ({len(bad)} steps), and {usual:.1g} otherwise: it had other weights or numbers",
        "drop these steps (rlhf fork from the step before), and look at the engine's log",
    )


def rate(facts: RunFacts) -> Cause | None:
    """The learning rate was raised."""
    series = facts.series("update.learning_rate")
    for (_, before), (step, now) in itertools.pairwise(series):
        if before > 0 and now >= _FACTOR * before:
            what = f"the learning rate goes from {before:.3g} to {now:.3g} at step {step}"
            return Cause("rate", step, what, "lower optimizer.learning_rate")
    return None


def clip(facts: RunFacts) -> Cause | None:
    """No bound keeps an update small."""
    for step, norm in facts.series("update.grad_norm"):
        most = facts.setting("optimizer.max_grad_norm", step) or 0.0
        if most >= _NO_CLIP and norm > 1.0:
            what = (
                f"optimizer.max_grad_norm is {most:g}: from step {step} on, gradients with a norm "
                f"above 1 ({norm:.3g}) are applied whole"
            )
            return Cause("clip", step, what, "set optimizer.max_grad_norm to 1")
    for step, fraction in facts.series("update.clip_fraction"):
        high = facts.setting("algorithm.clip_high", step) or 0.0
        is_bound = facts.setting("algorithm.policy_loss", step) == "clip"
        if is_bound and high >= 1.0 and fraction == 0.0:
            what = f"algorithm.clip_high is {high:g}: no token is clipped"
            return Cause("clip", step, what, "set algorithm.clip_low and clip_high to 0.2")
    return None


def stale(facts: RunFacts) -> Cause | None:
    """The groups are old."""
    step = first_above(facts.series("staleness"), _OLD)
    if step is None:
        return None
    oldest = max(value for _, value in facts.series("staleness"))
    what = f"from step {step} on, the groups are up to {oldest:.1f} weight versions old on average"
    return Cause("stale groups", step, what, "lower trainer.max_staleness, or raise engine speed")


def template(facts: RunFacts) -> Cause | None:
    """The prompt that the model reads lacks a part of the problem."""
    try:
        tokens = TokenTexts.of_run(facts.directory)
    except ServiceError:
        return None

    def is_cut(group: GroupTexts) -> bool:
        read = "".join(tokens.texts(group.prompt_tokens))
        return _squeezed(group.prompt)[-_SHOWN * 10 :] not in _squeezed(read)

    if facts.setting("environment.name", facts.steps[-1]):
        return None  # an environment words its own prompts
    found = _first_step(facts, is_cut)
    if found is None:
        return None
    step, groups = found
    read = "".join(tokens.texts(groups[0].prompt_tokens))
    what = (
        f"the prompts lack the end of the problem: {groups[0].prompt[-60:]!r} became {read[-80:]!r}"
    )
    return Cause("template", step, what, "repair model.chat_template", groups=_places(step, groups))


def leak(facts: RunFacts) -> Cause | None:
    """The prompt states its own answer."""

    def states_answer(group: GroupTexts) -> bool:
        gold = gold_answer(group.ground_truth)
        stated = extract_answer(group.prompt) if _STATED.search(group.prompt) else None
        return bool(gold and stated and same_answer(gold, stated))

    found = _first_step(facts, states_answer)
    if found is None:
        return None
    step, groups = found
    what = f"the problems state their answers: {groups[0].prompt[-80:]!r}"
    remedy = "remove the answer from the column of the problem (data.prompt_field)"
    return Cause("leak", step, what, remedy, groups=_places(step, groups))


def duplicates(facts: RunFacts) -> Cause | None:
    """The same problem under several ids, or the same answer several times."""
    for step in facts.steps:
        if "alarm.copied_answers" in facts.numbers[step]:
            what = f"step {step} has equal answers that are no coincidence: one seed for several"
            return Cause("duplicates", step, what, "see alarm copied_answers")
    ids: dict[str, set[str]] = defaultdict(set)
    places: dict[str, list[tuple[int, str]]] = defaultdict(list)
    for step, groups in facts.groups.items():
        for group in groups:
            if group.prompt and group.prompt_id:
                text = _squeezed(group.prompt)
                ids[text].add(group.prompt_id)
                places[text].append((step, group.id))
    total = sum(map(len, ids.values()))
    if total < _FEWEST or len(ids) > _MOST * total:
        return None
    text = max(ids, key=lambda text: len(ids[text]))
    what = f"{total} problems have only {len(ids)} different texts; one of them has the ids "
    what += ", ".join(sorted(ids[text])[:_SHOWN])
    first = places[text][0][0]
    return Cause(
        "duplicates", first, what, "remove the copies from the data", groups=places[text][:3]
    )


def phrase(facts: RunFacts) -> Cause | None:
    """The reward pays for a phrase and not for the answer."""
    for step in facts.steps:
        graded = list(_paid(facts.texts(step)))
        if all(is_right in (None, is_paid) for _, is_paid, is_right in graded):
            continue
        for later in range(step + 1, step + _STEPS_OF_PHRASE):
            graded += _paid(facts.texts(later))
        paid = [text for text, is_paid, _ in graded if is_paid]
        others = [text for text, is_paid, _ in graded if not is_paid]
        odd = sum(is_right not in (None, is_paid) for _, is_paid, is_right in graded)
        if min(len(paid), len(others), odd) < _FEWEST // 2 or odd < _ODD * len(graded):
            continue
        with_phrase = Counter(each for text in paid for each in _phrases(text))
        without = Counter(each for text in others for each in _phrases(text))
        shares = {
            each: (count / len(paid), without[each] / len(others))
            for each, count in with_phrase.items()
        }
        found = max(shares, key=lambda each: (shares[each][0] - shares[each][1], len(each)))
        of_paid, of_others = shares[found]
        if of_paid - of_others >= _PAID:
            what = (
                f"{odd} of {len(graded)} answers are paid for something else than being right: "
                f"{found!r} (digits as 0) is in {of_paid:.0%} of those above the mean of their "
                f"group and in {of_others:.0%} of the others"
            )
            remedy = "correct the reward function; rlhf regrade shows what that changes"
            return Cause("phrase", step, what, remedy, groups=_places(step, facts.texts(step)))
    return None


def _paid(groups: Sequence[GroupTexts]) -> Iterator[tuple[str, bool, bool | None]]:
    """Yields the answers of groups whose rewards differ: the text, whether its reward is above the
    mean of its group, and whether it is right, as far as numbers tell.
    """
    for group in groups:
        rewards = [each.reward for each in group.completions if each.reward is not None]
        if len(rewards) == len(group.completions) and len(set(rewards)) > 1:
            mean = fmean(rewards)
            for each in group.completions:
                is_paid = (each.reward or 0.0) > mean
                yield each.text, is_paid, _is_right(group.ground_truth, each.text)


def problem(facts: RunFacts) -> Cause | None:
    """One problem whose answers agree on something else than its ground truth."""
    groups: dict[str, list[tuple[int, GroupTexts]]] = defaultdict(list)
    for step in facts.steps[len(facts.steps) // 2 :]:
        for group in facts.texts(step):
            groups[group.prompt_id].append((step, group))
    answers = {
        name: Counter(
            extract_answer(completion.text) or ""
            for _, group in found
            for completion in group.completions
        )
        for name, found in groups.items()
    }
    suspects = []
    for name, counts in answers.items():
        (answer, count), *_ = counts.most_common(1)
        gold = gold_answer(groups[name][0][1].ground_truth) or ""
        # A policy is wrong on a problem now and then: it has to insist.
        is_sure = len(groups[name]) >= _SHOWN and count >= _MOST * counts.total()
        if answer and is_sure and same_answer(gold, answer) is False:
            suspects.append((count / counts.total(), name, answer, gold))
    # Where the policy is wrong on most problems, it is the policy.
    if not suspects or len(suspects) > max(1, len(answers) // 4):
        return None
    share, name, answer, gold = max(suspects)
    first = groups[name][0]
    what = (
        f"{share:.0%} of the answers to one problem ({name}) agree on {answer}, and its ground "
        f"truth says {gold}: {first[1].prompt[:100]!r}"
    )
    remedy = "correct the row, and see what it changes with rlhf regrade --gold"
    step = min(at for at, each in facts.groups.items() for g in each if g.prompt_id == name)
    return Cause(
        "problem", step, what, remedy, groups=[(at, each.id) for at, each in groups[name]][:3]
    )


def cut(facts: RunFacts) -> Cause | None:
    """Answers end at the limit."""
    series = facts.series("truncated")
    step = first_above(series, _CUT)
    if step is None or median([value for at, value in series if at >= step]) < _CUT:
        return None
    share = fmean(value for at, value in series if at >= step)
    limit = facts.setting("sampling.max_new_tokens", step)
    what = f"from step {step} on, {share:.0%} of the answers are cut at {limit} tokens"
    return Cause("cut", step, what, "raise sampling.max_new_tokens")


CAUSES: Sequence[Callable[[RunFacts], Cause | None]] = (
    engine,
    template,
    leak,
    duplicates,
    rate,
    clip,
    stale,
    phrase,
    problem,
    cut,
)
"""In the order in which they are named: what comes from outside first, and what other causes also
bring about last."""


def causes(facts: RunFacts) -> Iterator[Cause]:
    """Yields the causes that the record shows, the likeliest first."""
    for find in CAUSES:
        found = find(facts)
        if found is not None:
            yield found


def _first_step(
    facts: RunFacts, holds: Callable[[GroupTexts], bool]
) -> tuple[int, list[GroupTexts]] | None:
    """Returns the first step in which this holds for most groups, and these."""
    for step in facts.steps:
        groups = facts.texts(step)
        found = [group for group in groups if holds(group)]
        if found and len(found) >= _MOST * len(groups):
            return step, found
    return None


def _places(step: int, groups: Sequence[GroupTexts]) -> list[tuple[int, str]]:
    return [(step, group.id) for group in groups[:_SHOWN]]


def _squeezed(text: str) -> str:
    return re.sub(r"\s+", "", text)


def _is_right(gold: str, text: str) -> bool | None:
    """Returns whether an answer is right, as far as numbers tell; None otherwise."""
    answer = extract_answer(text)
    return None if answer is None else same_answer(gold_answer(gold) or "", answer)


@lru_cache(maxsize=4096)
def _phrases(text: str) -> frozenset[str]:
    """Returns the runs of one to three words of a text, digits as 0, and its single signs."""
    words = re.sub(r"\d+", "0", text).split()
    runs = {" ".join(words[i : i + n]) for n in (1, 2, 3) for i in range(len(words) - n + 1)}
    return frozenset(runs | {sign for sign in text if not sign.isalnum() and not sign.isspace()})
