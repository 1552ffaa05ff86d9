"""Measures answers graded per second: our grader and plain math-verify on the same cases.

    python -m benchmarks.rewards [--cases 1000]

Plain math-verify parses the gold and the whole response and verifies them in one process, as in its
documentation. The cases are generated GSM8K-like responses, half of them wrong; the golden cases of
the tests; gradings that people disputed, and real solutions of GSM8K and MATH-500, if the files are
available.
"""

import asyncio
import json
import logging
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from math_verify import parse, verify

from benchmarks.command import command_parser
from benchmarks.processes import ROOT
from common.settings.sections import RewardSection
from common.wire.schemas import RewardItem
from services.reward.service import RewardService

GOLDEN = ROOT / "tests" / "golden" / "rewards.jsonl"
GSM8K = ROOT.parent / "shared" / "data" / "gsm8k" / "test.jsonl"
KINDS = ROOT / "tests" / "golden" / "kinds.jsonl"
GRADERS = ROOT.parent / "shared" / "data" / "graders"
MATH500 = ROOT.parent / "shared" / "data" / "math500" / "test.jsonl"
NOTATIONS = ("{}", "{:,}", "\\${}", "{}.00", "\\frac{{{}}}{{1}}", "{}\\text{{ dollars}}")


@dataclass
class Case:
    """A response, its gold answer, and whether it is right."""

    item: RewardItem
    right: bool


def generated(count: int, rng: random.Random) -> list[Case]:
    """Generates sums in the style of GSM8K, boxed in one of several notations; every second answer
    is a little off.
    """
    cases = []
    for i in range(count):
        a = rng.randint(2, 400)
        b = rng.randint(2, 400)
        price = rng.randint(2, 20)
        total = (a + b) * price
        answered = total if i % 2 == 0 else total + rng.choice([-10, -1, 1, 10])
        answer = rng.choice(NOTATIONS).format(answered)
        text = (
            f"She has {a} + {b} = {a + b} eggs and sells each for ${price}: "
            f"{a + b} * {price} = {answered}. \\boxed{{{answer}}}"
        )
        cases.append(Case(RewardItem(response=text, ground_truth=str(total)), answered == total))
    return cases


def real(count: int, rng: random.Random) -> list[Case]:
    """Returns GSM8K's own solutions, every second one with a different final answer."""
    cases = []
    for i, line in enumerate(GSM8K.read_text(encoding="utf-8").splitlines()[:count]):
        reasoning, _, gold = json.loads(line)["answer"].rpartition("####")
        value = int(gold.replace(",", ""))
        answered = value if i % 2 == 0 else value + rng.choice([-10, -1, 1, 10])
        cases.append(
            Case(
                RewardItem(response=f"{reasoning}#### {answered:,}", ground_truth=gold.strip()),
                answered == value,
            )
        )
    return cases


def golden() -> list[Case]:
    """Returns the golden cases of the tests: many notations, right and wrong."""
    rows = [json.loads(line) for line in GOLDEN.read_text(encoding="utf-8").splitlines()]
    return [
        Case(RewardItem(response=row["response"], ground_truth=row["ground_truth"]), row["correct"])
        for row in rows
    ]


def real_math(count: int) -> list[Case]:
    """Returns MATH-500's own solutions, every second one with one added to its final answer."""
    cases = []
    for i, line in enumerate(MATH500.read_text(encoding="utf-8").splitlines()[:count]):
        row = json.loads(line)
        response = (
            row["solution"] if i % 2 == 0 else f"So the answer is $\\boxed{{{row['answer']}+1}}$."
        )
        cases.append(Case(RewardItem(response=response, ground_truth=row["answer"]), i % 2 == 0))
    return cases


def kinds() -> list[Case]:
    """Returns the golden answers by kind of notation, in boxes."""
    cases = []
    for line in KINDS.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        item = RewardItem(response=f"\\boxed{{{row['answer']}}}", ground_truth=row["gold"])
        cases.append(Case(item, row["correct"]))
    return cases


def disputed(name: str) -> list[Case]:
    """Returns the math cases of a file of gradings; those of programs and of loaders are others."""
    cases = []
    for line in (GRADERS / name).read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if isinstance(row["gold"], str) and isinstance(row["expected"], int | float):
            item = RewardItem(response=row["text"], ground_truth=row["gold"])
            cases.append(Case(item, bool(row["expected"])))
    return cases


def plain(cases: Sequence[Case]) -> list[bool]:
    """Grades with math-verify as documented."""
    return [
        bool(verify(parse(f"${case.item.ground_truth}$"), parse(case.item.response)))
        for case in cases
    ]


async def ours(cases: Sequence[Case], batch: int) -> tuple[float, list[bool | None]]:
    """Returns (seconds, verdicts) of our grader, without the start of its workers; None for an
    answer without a verdict, which loses its group.
    """
    async with RewardService(RewardSection()) as grader:
        await grader.ready()
        verdicts: list[bool | None] = []
        start = time.perf_counter()
        for i in range(0, len(cases), batch):
            results = await grader.score([case.item for case in cases[i : i + batch]])
            for result in results:
                verdicts.append(None if result.reward is None else result.correct)
        return time.perf_counter() - start, verdicts


def compare(name: str, cases: Sequence[Case], batch: int) -> None:
    """Runs both on the same cases and prints a row each."""
    plain(cases[:20])  # fills its caches
    start = time.perf_counter()
    plain_verdicts = plain(cases)
    plain_s = time.perf_counter() - start
    our_s, our_verdicts = asyncio.run(ours(cases, batch))
    print(f"\n{name}: {len(cases)} cases, batches of {batch}")
    header = ("answers/s", "right", "false rewards", "lost answers", "lost groups")
    print(f"{'':24}" + "".join(f"{title:>15}" for title in header))
    sides: list[tuple[str, float, Sequence[bool | None]]] = [
        ("math-verify", plain_s, plain_verdicts),
        ("reward-server's grader", our_s, our_verdicts),
    ]
    for label, took_s, verdicts in sides:
        counts = Counter(
            (verdict, case.right) for verdict, case in zip(verdicts, cases, strict=True)
        )
        row = (
            round(len(cases) / took_s),
            counts[True, True] + counts[False, False],
            counts[True, False],
            counts[False, True],
            counts[None, True] + counts[None, False],
        )
        print(f"{label:24}" + "".join(f"{number:15,}" for number in row))
    print(f"ratio {plain_s / our_s:.1f}")


def main() -> None:
    """Prints the comparison."""
    parser = command_parser("benchmarks.rewards", __doc__)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=64)
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    compare("generated", generated(arguments.cases, random.Random(0)), arguments.batch)
    compare("golden cases", golden(), arguments.batch)
    compare("kinds of notations", kinds(), arguments.batch)
    if GRADERS.is_dir():
        compare("disputed, wrong then", disputed("wrong.jsonl"), arguments.batch)
        compare("disputed, right then", disputed("right.jsonl"), arguments.batch)
    if GSM8K.is_file():
        compare("GSM8K", real(arguments.cases, random.Random(0)), arguments.batch)
    if MATH500.is_file():
        compare("MATH-500", real_math(arguments.cases), arguments.batch)


if __name__ == "__main__":
    main()
