"""`rlhf_math.rewards` gives what `trl.rewards` gives; the values were taken from TRL 1.16."""

from rlhf_math import rewards


def chats(*texts: str) -> list[list[dict[str, str]]]:
    return [[{"role": "assistant", "content": text}] for text in texts]


def test_an_answer_in_latex_is_compared_with_the_solution() -> None:
    answers = chats(r"\boxed{1/2}", "$0.5$", "so 0.5", r"I think \boxed{7} m", "")
    assert rewards.accuracy_reward(answers, ["$1/2$"] * 5) == [1.0, 0.0, 0.0, 0.0, 0.0]
    assert rewards.accuracy_reward(answers[:1], ["not a number"]) == [None]


def test_only_what_follows_the_reasoning_counts() -> None:
    answers = chats(
        r"<think> \boxed{1} </think> \boxed{7}", r"<think> \boxed{7}", r"\boxed{1} END \boxed{7}"
    )
    solutions = [r"\boxed{7}"] * 3
    assert rewards.reasoning_accuracy_reward(answers, solutions) == [1.0, 0.0, 0.0]
    assert rewards.reasoning_accuracy_reward(answers, solutions, ["END"]) == [0.0, 0.0, 1.0]


def test_the_format_of_thinking() -> None:
    right = ("<think>a</think>b", "<think>a\nb</think>x</think>")
    wrong = (" <think>a</think>b", "<think>a<think></think>b", "no", "<think>", "x<think>a</think>")
    assert rewards.think_format_reward(chats(*right, *wrong)) == [1.0] * 2 + [0.0] * 5


def test_the_punishment_of_long_answers() -> None:
    ids = [[1] * length for length in (0, 80, 90, 100, 500)]
    punish = rewards.get_soft_overlong_punishment(100, 20)
    assert punish(ids) == [0.0, 0.0, -0.5, -1.0, -1.0]
    assert rewards.get_soft_overlong_punishment(100, 0)(ids) == [0.0, 0.0, 0.0, 0.0, -1.0]
