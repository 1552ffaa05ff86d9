"""Answers of a group that are the same, token for token. Pure.

Equal answers are no fault by themselves: a policy that is certain repeats itself. They are one when
the policy itself says that such a coincidence is impossible: all were sampled with one seed, or one
answer was returned several times.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from common.settings.config import Config
from common.wire.schemas import Group
from trainer.observe.catalogue import ALARMS, Texts


@dataclass(frozen=True)
class DuplicateAnswers:
    """The equal answers of a batch."""

    share: float
    """Answers that equal an earlier one of their group, as a share of those that could: from 0 to
    1, where every group has one answer only."""
    surprise: float
    """−log of the probability that this is a coincidence, in nats; a lower bound."""
    example: float
    """Probability of one of the copied answers, the least likely."""


def duplicate_answers(groups: Sequence[Group]) -> DuplicateAnswers:
    """Counts the equal answers of groups, without those of episodes, whose turns are not one
    sample.
    """
    compared = [
        group
        for group in groups
        if len(group.completions) > 1 and group.completions[0].episode is None
    ]
    copied = 0
    possible = 0
    surprise = 0.0
    rarest = 0.0
    for group in compared:
        seen: set[bytes] = set()
        logprobs: list[float] = []
        for completion in group.completions:
            tokens = completion.token_ids.tobytes()
            if tokens in seen:
                logprobs.append(float(completion.logprobs.sum()))
            seen.add(tokens)

        size = len(group.completions)
        copied += len(logprobs)
        possible += size - 1
        # An extra answer equals one of the others with at most (size) × its probability; if all are
        # equal, with its probability. Looking at the strangest groups costs log(groups) each.
        tries = 0.0 if len(logprobs) == size - 1 else math.log(size)
        strange = sum(-logprob - tries for logprob in logprobs) - math.log(len(compared))
        surprise += max(0.0, strange)
        rarest = min([rarest, *logprobs])
    return DuplicateAnswers(copied / max(1, possible), surprise, math.exp(rarest))


def copied_answers(found: DuplicateAnswers, config: Config) -> Texts:
    """Returns the alarm about equal answers that are no coincidence."""
    row = ALARMS["copied_answers"]
    if found.surprise < row.limit:
        return {}
    return {"copied_answers": row.text(config, share=found.share, example=found.example)}
