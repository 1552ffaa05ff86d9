"""Verdicts on final answers in this process, as the reward-server and its workers give them
together."""

from services.reward.answers.equivalence import verdict
from services.reward.answers.exact import same_answer
from services.reward.answers.extract import extract_answer, gold_answer


def compared(gold: str, answer: str | None) -> str:
    """Returns the verdict on an extracted answer; "unparsable" without an answer or a gold one."""
    expected = gold_answer(gold)
    if expected is None or answer is None:
        return "unparsable"
    same = same_answer(expected, answer)
    if same is None:
        return verdict(expected, answer)
    return "right" if same else "wrong"


def graded(gold: str, response: str) -> str:
    """Returns the verdict on the final answer of a response."""
    return compared(gold, extract_answer(response))
