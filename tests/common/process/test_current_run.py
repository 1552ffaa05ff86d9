"""Which runs a service serves, by a model: a run that another one followed never comes back."""

import random

import pytest

from common.errors import Conflict
from common.process.current_run import CurrentRun


def _is_refused(runs: CurrentRun, run: str, replaces: str) -> bool:
    try:
        runs.check_begin(run, replaces)
    except Conflict:
        return True
    return False


@pytest.mark.parametrize("seed", range(20))
def test_a_run_begins_once_and_ends_only_the_one_that_it_knew(seed: int) -> None:
    draw = random.Random(seed)
    runs = CurrentRun()
    order = [""]  # of the runs that have begun; the current one is last
    for _ in range(40):
        run, replaces = draw.choice("abcdef"), draw.choice(["", *"abcdef"])
        is_over = run in order[:-1]
        knows_the_current = replaces == order[-1] or order[-1] in ("", run)
        refused = _is_refused(runs, run, replaces)
        assert refused == (is_over or not knows_the_current), (order, run, replaces)
        if not refused:
            runs.begin(run)
            if run != order[-1]:
                order.append(run)
        assert runs.current == order[-1]
