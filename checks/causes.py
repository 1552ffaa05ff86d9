"""Ten causes put into small runs: does `rlhf why` name each first, and none in a healthy run?

    python -m checks.causes                 # all, about three minutes on two idle cores
    python -m checks.causes a_leak          # some
    python -m checks.causes --seed 7        # other problems, prompts and answers

Each run trains the built-in task on one core, and most are healthy until their cause strikes.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from checks.faults.lab import GROUPS, ROOT, Answers, Lab
from services.data.tiny import problems
from trainer.what_if.run_facts import RunFacts
from trainer.what_if.why import explain

_HEALTHY = 8
"""Steps before a cause strikes."""
_STEPS = 16
CAUSES: dict[str, tuple[str, Callable[[Lab], None]]] = {}
"""By the name of the function: the name that `rlhf why` should say first, and the run."""


def cause(name: str) -> Callable[[Callable[[Lab], None]], None]:
    """Registers a run."""

    def register(function: Callable[[Lab], None]) -> None:
        CAUSES[function.__name__] = (name, function)

    return register


def _then(lab: Lab, before: dict[str, Any] | None = None, **settings: Any) -> None:
    """Trains in health, and then goes on with other settings."""
    train(lab, trainer__max_steps=_HEALTHY, **(before or {}))
    train(lab, trainer__max_steps=_STEPS, **(before or {}) | settings)


def train(lab: Lab, change: Any = None, **settings: Any) -> None:
    """Trains with an audit record."""
    lab.train(lab.settings(trainer__audit=True, **settings), change)


def _rows(lab: Lab, rows: Sequence[tuple[str, str]]) -> Path:
    """Writes a data set of questions and answers."""
    path = lab.directory / "rows.jsonl"
    lines = [json.dumps({"question": question, "answer": answer}) for question, answer in rows]
    path.write_text("\n".join(lines) + "\n")
    return path


def _problems(lab: Lab, count: int) -> list[tuple[str, str]]:
    drawn = problems("train", lab.seed)
    return [(each.question, str(each.answer)) for each, _ in zip(drawn, range(count), strict=False)]


@cause("phrase")
def a_grader_that_pays_for_a_phrase(lab: Lab) -> None:
    reward = [{"name": "checks.causes:pays_for_working"}]
    _then(lab, reward__functions=reward)


def pays_for_working(completions: list[str], **_: Any) -> list[float]:
    """The faulty grader: whoever shows a working is paid."""
    return [float("=" in completion) for completion in completions]


@cause("problem")
def one_poisoned_problem(lab: Lab) -> None:
    rows = _problems(lab, 9)
    question, answer = rows[0]
    rows[0] = (question, str(int(answer) + 100))
    train(lab, trainer__max_steps=24, data__source=_rows(lab, rows))


@cause("template")
def a_template_that_cuts_the_question(lab: Lab) -> None:
    template = "{% for message in messages %}{{ message['content'][:20] }}\n{% endfor %}"
    train(lab, trainer__max_steps=_HEALTHY, model__chat_template=template)


@cause("rate")
def a_rate_ten_times_too_high(lab: Lab) -> None:
    _then(lab, optimizer__learning_rate=5e-3)


@cause("stale groups")
def stale_groups(lab: Lab) -> None:
    _then(lab, trainer__max_staleness=6)


@cause("clip")
def a_clip_that_is_off(lab: Lab) -> None:
    # A strong KL term, so that gradients are larger than the bound would let them be.
    _then(lab, optimizer__max_grad_norm=1e6, algorithm__kl_coef=3.0)


@cause("cut")
def answers_cut_at_the_limit(lab: Lab) -> None:
    _then(lab, sampling__max_new_tokens=7)


@cause("duplicates")
def duplicates(lab: Lab) -> None:
    rows = [row for row in _problems(lab, 3) for _ in range(30)]
    train(lab, trainer__max_steps=_HEALTHY, data__source=_rows(lab, rows))


@cause("leak")
def a_leak(lab: Lab) -> None:
    rows = [(f"{question} #### {answer}", answer) for question, answer in _problems(lab, 60)]
    train(lab, trainer__max_steps=_HEALTHY, data__source=_rows(lab, rows))


@cause("engine")
def a_broken_engine_for_three_steps(lab: Lab) -> None:
    def change(number: int, body: Any, answers: Answers) -> Answers:
        if _HEALTHY <= number // GROUPS < _HEALTHY + 3:
            for answer in answers:
                for pair in answer["meta_info"]["output_token_logprobs"]:
                    pair[0] -= 0.4
        return answers

    train(lab, change, trainer__max_steps=_STEPS)


@cause("none")
def a_healthy_run(lab: Lab) -> None:
    train(lab, trainer__max_steps=_STEPS)


def named(name: str, seed: int, directory: Path) -> tuple[str, str, str]:
    """Trains the run of a cause; returns the expected name, the name that `rlhf why` put first, and
    its explanation.
    """
    expected, work = CAUSES[name]
    lab = Lab(name, seed=seed, directory=directory, model=ROOT / ".cache/tiny-base")
    directory.mkdir(parents=True, exist_ok=True)
    if not lab.run_dir.exists():
        work(lab)
    answer = explain(RunFacts.read(lab.run_dir))
    first = answer["causes"][0] if answer["causes"] else {"name": "none", "what": ""}
    return expected, first["name"], first["what"]


def main() -> None:
    """Prints a line for each run; exits with 1 if more than one of ten has another name."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(CAUSES))
    parser.add_argument(
        "--keep", type=Path, metavar="DIR", help="keeps the runs, and asks kept ones"
    )
    parser.add_argument(
        "--seed", type=int, default=1, help="of problems, order and sampling (default 1)"
    )
    arguments = parser.parse_args()
    chosen = [name for name in CAUSES if not arguments.names or name in arguments.names]
    console = Console()
    right = 0
    with tempfile.TemporaryDirectory() as temporary:
        for name in chosen:
            place = (arguments.keep or Path(temporary)) / name
            expected, first, what = named(name, arguments.seed, place)
            right += expected == first
            sign = "right" if expected == first else f"WRONG, it is {expected}"
            console.print(f"{name}: {first}, {sign}: {what}", highlight=False, markup=False)
    console.print(f"right in {right} of {len(chosen)} runs")
    sys.exit(right < 0.9 * len(chosen))


if __name__ == "__main__":
    main()
