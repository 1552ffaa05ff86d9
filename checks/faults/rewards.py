"""Faults of reward functions and graders."""

import ast
import re
import time
from collections.abc import Callable, Sequence
from typing import Any

from checks.faults.fault import fault
from checks.faults.lab import GROUP_SIZE, GROUPS, Chat, Lab, texts
from tests.support.processes.ports import free_port

_ANSWERS = GROUPS * GROUP_SIZE
_LIMIT_S = 2.0
_FUNCTION_LIMIT = {"reward.function_timeout_s": _LIMIT_S}
Scores = Sequence[Any]


def right(text: str, ground_truth: str, finish_reason: str = "stop") -> float:
    """Returns 1 if the last number of the text is the ground truth."""
    numbers = re.findall(r"-?\d+", text)
    return float(bool(numbers) and int(numbers[-1]) == int(ground_truth))


def length(text: str, ground_truth: str, finish_reason: str = "stop") -> float:
    """Returns the number of characters / 100."""
    return len(text) / 100


def correctness(
    lab: Lab, disturbed: Callable[[list[float]], Scores], lasts: bool = True
) -> Callable[..., Scores]:
    """Returns a reward function whose scores are `disturbed` once the fault has struck; for one
    call only, unless it `lasts`.
    """
    graded = 0
    struck = False

    def correctness(completions: list[Chat], ground_truth: list[str], **columns: Any) -> Scores:
        nonlocal graded, struck
        scores = [
            right(text, truth) for text, truth in zip(texts(completions), ground_truth, strict=True)
        ]
        graded += len(scores)
        if graded <= lab.strike_step * _ANSWERS or (struck and not lasts):
            return scores
        struck = True
        lab.strike()
        return disturbed(scores)

    return correctness


def _one_replaced(lab: Lab, value: Any) -> Callable[[list[float]], Scores]:
    def replace(scores: list[float]) -> Scores:
        changed: list[Any] = list(scores)
        changed[lab.rng.randrange(len(changed))] = value
        return changed

    return replace


# ------------------------------------------------------------ values that are no rewards


@fault(
    "the reward function returns None for an answer",
    r"correctness|reward function",
    r"\bnone\b|does not apply|inapplicable|no reward",
    reported="https://github.com/huggingface/trl/pull/5775",
    oracle=right,
)
def reward_none(lab: Lab) -> None:
    lab.script(correctness(lab, _one_replaced(lab, None)))


@fault(
    "the reward function returns NaN",
    r"correctness",
    r"\bnan\b|not a number|not finite|not a finite number",
    reported="https://github.com/huggingface/trl/issues/4501",
    oracle=right,
)
def reward_nan(lab: Lab) -> None:
    lab.script(correctness(lab, _one_replaced(lab, float("nan"))))


@fault(
    "the reward function returns infinity",
    r"correctness",
    r"\binf\b|infinit|not finite|not a finite number",
    oracle=right,
)
def reward_infinite(lab: Lab) -> None:
    lab.script(correctness(lab, _one_replaced(lab, float("inf"))))


@fault(
    "the reward function raises an error for some answers",
    r"correctness",
    r"ZeroDivisionError|division by zero",
    reported="https://github.com/modelscope/ms-swift/issues/8123",
    oracle=right,
)
def reward_raises(lab: Lab) -> None:
    def divide(scores: list[float]) -> Scores:
        return [score / 0 for score in scores]

    lab.script(correctness(lab, divide, lasts=False))


@fault(
    "the reward function raises an error for every answer",
    r"correctness",
    r"KeyError|answer_key",
    oracle=right,
)
def reward_always_raises(lab: Lab) -> None:
    def correctness(completions: list[Chat], **columns: Any) -> Scores:
        lab.strike()
        return [columns["answer_key"] for _ in completions]

    lab.script(correctness)


@fault(
    "the reward function returns too few scores",
    r"correctness",
    r"\d+ (scores|values|numbers|rewards)|(scores|values|numbers) for \d+|too few",
    oracle=right,
)
def reward_too_few(lab: Lab) -> None:
    lab.script(correctness(lab, lambda scores: scores[:-1]))


@fault(
    "the reward function returns text instead of numbers",
    r"correctness",
    r"number|text|\bstr\b|'1\.0'|'0\.0'",
    oracle=right,
)
def reward_text(lab: Lab) -> None:
    lab.script(correctness(lab, lambda scores: [str(score) for score in scores]))


@fault(
    "the reward function needs a column that the data set lacks",
    r"correctness",
    r"solution",
    r"column|argument",
    reported="https://github.com/huggingface/trl/pull/3459",
    oracle=right,
)
def reward_without_column(lab: Lab) -> None:
    def correctness(completions: list[Chat], solution: list[str]) -> Scores:
        return [
            right(text, truth) for text, truth in zip(texts(completions), solution, strict=True)
        ]

    lab.strike()
    lab.script(correctness)


# ------------------------------------------------------------ graders that hang, die, are slow


@fault(
    "a call of the reward function never returns",
    r"correctness",
    r"no answer within|time[- ]?out|timed out|takes? longer|did not (return|answer)|hang",
    reported="https://github.com/verl-project/verl/issues/7180",
    timeout="reward.function_timeout_s",
    timeout_s=_LIMIT_S,
    oracle=right,
)
def reward_hangs(lab: Lab) -> None:
    def hang(scores: list[float]) -> Scores:
        time.sleep(3600)
        return scores

    lab.script(correctness(lab, hang, lasts=False), settings=_FUNCTION_LIMIT)


@fault(
    "the reward function never returns for some answers",
    r"correctness",
    r"no answer within|time[- ]?out|timed out|takes? longer|did not (return|answer)|hang",
    reported="https://github.com/verl-project/verl/issues/7180",
    timeout="reward.function_timeout_s",
    timeout_s=_LIMIT_S,
    oracle=right,
)
def reward_hangs_for_some(lab: Lab) -> None:
    def correctness(completions: list[Chat], ground_truth: list[str], **columns: Any) -> Scores:
        scores = []
        for text, truth in zip(texts(completions), ground_truth, strict=True):
            if int(truth) % 5 == 0 and text != truth:
                lab.strike()
                time.sleep(3600)
            scores.append(right(text, truth))
        return scores

    settings = _FUNCTION_LIMIT | {"reward.workers": 8}
    lab.script(correctness, max_steps=3, settings=settings)


@fault(
    "the reward function is stuck in a regular expression and blocks the whole process",
    r"correctness|_backtrack",
    reported="https://github.com/PrimeIntellect-ai/prime-rl/issues/1713",
    timeout="reward.function_timeout_s",
    timeout_s=_LIMIT_S,
    oracle=right,
)
def reward_blocks_process(lab: Lab) -> None:
    def backtrack(scores: list[float]) -> Scores:
        re.match(r"(a+)+$", "a" * 60 + "!")
        return scores

    lab.script(correctness(lab, backtrack, lasts=False), settings=_FUNCTION_LIMIT)


@fault(
    "the reward function ends the interpreter",
    r"correctness",
    r"SystemExit|exit",
    oracle=right,
)
def reward_exits(lab: Lab) -> None:
    def leave(scores: list[float]) -> Scores:
        raise SystemExit(3)

    lab.script(correctness(lab, leave, lasts=False))


@fault(
    "the reward function takes longer than all the rest of a step",
    r"correctness|grader|reward function|grading",
    r"waits|slow|bottleneck",
    r"\d+ ?%|slow",
    in_steps=True,
    oracle=right,
)
def reward_slow(lab: Lab) -> None:
    def wait(scores: list[float]) -> Scores:
        time.sleep(1.0)
        return scores

    lab.strike_step = 0
    lab.script(correctness(lab, wait))


@fault(
    "the process of a grader dies",
    r"died|killed|exit",
    r"grader|worker|moody|answer",
    oracle=None,
)
def grader_dies(lab: Lab) -> None:
    _serve(lab, "Dies", steps=3)


@fault(
    "a grader in a process of its own never returns",
    r"stuck|sleeps",
    r"no answer within|time[- ]?out|timed out|takes? longer",
    reported="https://github.com/verl-project/verl/issues/7180",
    timeout="reward.function_timeout_s",
    timeout_s=_LIMIT_S,
)
def grader_hangs(lab: Lab) -> None:
    _serve(lab, "Sleeps", steps=3)


@fault(
    "a grader is stuck in a regular expression",
    r"backtracks",
    r"no answer within|time[- ]?out|timed out|takes? longer",
    timeout="reward.function_timeout_s",
    timeout_s=_LIMIT_S,
)
def grader_backtracks(lab: Lab) -> None:
    _serve(lab, "Backtracks", steps=3)


@fault(
    "a grader eats all memory",
    r"eats",
    r"memory",
)
def grader_eats_memory(lab: Lab) -> None:
    _serve(lab, "Eats", steps=3)


@fault(
    "the reward function's module cannot be imported",
    r"checks\.faults\.absent",
    r"import|no module|cannot",
)
def grader_not_importable(lab: Lab) -> None:
    lab.strike()
    lab.train(lab.settings(reward__functions=["checks.faults.absent:Reward"]))


def _serve(lab: Lab, name: str, steps: int) -> None:
    """Trains with a class of `graders.py`, which misbehaves for every seventh problem."""
    lab.strike()
    config = lab.settings(
        reward__functions=[f"checks.faults.graders:{name}"],
        reward__function_timeout_s=_LIMIT_S,
        trainer__max_steps=steps,
    )
    lab.train(config)


@fault(
    "the judge cannot be reached",
    r"judge",
    r"connect|reach|refused",
    reported="https://github.com/PrimeIntellect-ai/prime-rl/pull/1622",
)
def judge_unreachable(lab: Lab) -> None:
    lab.strike()
    judge = {"name": "judge", "url": f"http://127.0.0.1:{free_port()}/v1", "model": "judge"}
    lab.train(lab.settings(reward__functions=[judge], limits__max_failed_groups=8))


@fault(
    "the reward model does not exist",
    r"no-such-reward-model",
    r"no such|not found|does not exist|there is no|cannot be (found|loaded)",
)
def reward_model_missing(lab: Lab) -> None:
    lab.strike()
    lab.script(str(lab.directory / "no-such-reward-model"))


# ------------------------------------------------------------ rewards that teach nothing


@fault(
    "every answer gets the same reward",
    r"(equal|same|constant) (reward|score)|rewards? (is|are) (always )?(equal|the same)",
    reported="https://github.com/huggingface/trl/issues/3857",
    in_steps=True,
)
def reward_constant(lab: Lab) -> None:
    def present(completions: list[Chat], **columns: Any) -> Scores:
        lab.strike()
        return [0.5 for _ in completions]

    lab.script(present)


@fault(
    "the reward function turns its own errors or time-outs into zeros",
    r"\b(all|every|each)\b.*\b0\b|zero",
    r"time|error|exception|catch|fail",
    reported="https://github.com/verl-project/verl/pull/5635",
    in_steps=True,
)
def reward_swallows_errors(lab: Lab) -> None:
    def verified(completions: list[Chat], ground_truth: list[str], **columns: Any) -> Scores:
        lab.strike()
        scores = []
        for text, truth in zip(texts(completions), ground_truth, strict=True):
            try:
                scores.append(float(ast.literal_eval(f"<{text}>") == truth))
            except Exception:
                scores.append(0.0)
        return scores

    lab.script(verified)


@fault(
    "one of two reward functions always gives the same score",
    r"tagged",
    r"always|never|constant|same|every",
    reported="https://github.com/huggingface/open-r1/issues/255",
    in_steps=True,
)
def reward_function_dead(lab: Lab) -> None:
    def tagged(completions: list[Chat], **columns: Any) -> Scores:
        return [float("<answer>" in text) for text in texts(completions)]

    lab.strike()
    lab.script(correctness(lab, lambda scores: scores), tagged)


@fault(
    "the model learns the format, and fewer answers are right",
    r"rise|rose|grow|higher|up",
    r"fall|fell|drop|lower|down|fewer",
    r"right|correct|accuracy",
    reported="https://github.com/huggingface/open-r1/issues/255",
    in_steps=True,
)
def reward_hacking(lab: Lab) -> None:
    def right_answer(completions: list[Chat], ground_truth: list[str], **columns: Any) -> Scores:
        return [
            right(text, truth) for text, truth in zip(texts(completions), ground_truth, strict=True)
        ]

    def sevens(completions: list[Chat], **columns: Any) -> Scores:
        return [min(1.0, text.count("7") / 5) for text in texts(completions)]

    right_answer.gives_verdicts = True  # type: ignore[attr-defined]
    lab.strike()
    lab.script(
        right_answer,
        sevens,
        reward_weights=[0.1, 1.0],
        max_steps=50,
        learning_rate=1e-3,
        per_device_train_batch_size=64,
        num_generations=8,
    )


@fault(
    "the reward makes answers ever shorter",
    r"length|tokens|short",
    r"fell|fall|shrink|shorter|collapse|dropped",
    reported="https://github.com/om-ai-lab/VLM-R1/issues/280",
    in_steps=True,
    oracle=lambda text, truth, finish: -length(text, truth),
)
def length_collapses(lab: Lab) -> None:
    def brevity(completions: list[Chat], **columns: Any) -> Scores:
        return [-len(text) / 100 for text in texts(completions)]

    lab.strike()
    lab.script(brevity, max_steps=40, learning_rate=1e-3, per_device_train_batch_size=32)


@fault(
    "the reward makes answers ever longer",
    r"cut|truncated|max_(new_tokens|completion_length)|length",
    r"\d+ ?%|rose|grow|longer",
    reported="https://github.com/huggingface/trl/pull/3138",
    in_steps=True,
    oracle=length,
)
def length_explodes(lab: Lab) -> None:
    def verbosity(completions: list[Chat], **columns: Any) -> Scores:
        return [len(text) / 100 for text in texts(completions)]

    lab.strike()
    lab.script(verbosity, max_steps=40, learning_rate=1e-3, per_device_train_batch_size=32)
