"""Verified successes of the past in groups that failed entirely, as pure functions.

A group without a right answer has equal rewards, no advantage and so no gradient: its prompt teaches nothing until the
policy happens to solve it. RLEP (Zhang et al. 2025, arXiv:2507.07451) adds verified successes to every group. Here they
replace answers of the groups that have none, so that groups keep their size and those that do learn are left alone.

A completion that is mixed in keeps its behaviour log-probabilities and weight versions, and that corrects it: its ratio is
taken to the policy that sampled it, as for every other token.
"""

from collections.abc import Sequence

import numpy as np
from msgspec.structs import replace

from common.schemas import Completion, Group


def failed_prompts(groups: Sequence[Group]) -> list[str]:
    """Ids of the prompts of groups without a right answer, each once, in order."""
    return list(dict.fromkeys(group.prompt_id for group in groups if _failed(group)))


def mix_successes(groups: Sequence[Group], successes: Sequence[Group], count: int) -> list[Group]:
    """Puts right answers of `successes` in place of the last answers of groups that have none.

    Args:
        groups: of a batch; they are not changed.
        successes: groups of which only the right completions are used, the preferred ones first.
        count: completions that one group may get. One of its own always stays: nothing but successes has no advantage.

    Returns the groups in their order, new objects where something was mixed in (see `mixed_in`). A success with other
    prompt tokens (of another tokenizer or system prompt) is passed over: its log-probabilities are those of another question.
    """
    by_prompt: dict[str, list[Group]] = {}
    for success in successes:
        by_prompt.setdefault(success.prompt_id, []).append(success)
    mixed = []
    for group in groups:
        room = min(count, len(group.completions) - 1) if _failed(group) else 0
        answers = _right_answers(group, by_prompt.get(group.prompt_id, []))[:room] if room > 0 else []
        mixed.append(_with(group, answers) if answers else group)
    return mixed


def mixed_in(group: Group) -> int:
    """How many of the group's last completions are not its own."""
    return int(group.metadata.get("mixed", 0))


def _failed(group: Group) -> bool:
    return not any(completion.correct for completion in group.completions)


def _right_answers(group: Group, successes: Sequence[Group]) -> list[Completion]:
    same = (success for success in successes if np.array_equal(success.prompt_token_ids, group.prompt_token_ids))
    return [completion for success in same for completion in success.completions if completion.correct]


def _with(group: Group, answers: list[Completion]) -> Group:
    own = group.completions[: len(group.completions) - len(answers)]
    return replace(group, completions=[*own, *answers], metadata={**group.metadata, "mixed": len(answers)})
