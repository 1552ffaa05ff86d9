"""Checks at the start of a run that every problem can be solved.

A ground truth that cannot be read gives 0 to every answer, without a word. So while the first
groups are generated, the reward-server grades each ground truth against itself. Problems that fail
are named and no longer drawn.
"""

import json
import logging
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from common.errors import ConfigError, ServiceError
from common.process.storage import storing
from common.wire.schemas import GroundTruthProblems, Prompt, RewardItem
from trainer.rollouts.services import Services

log = logging.getLogger(__name__)
GROUND_TRUTHS = "ground_truths.json"
MAX_SHARE = 0.1
"""A run with a larger share of problems that cannot be solved stops: it reads the wrong column."""
PAGE = 256
"""Problems in one call."""
REPAIRED = "%s ground truths are read as what they hold: a list of one answer, doubled backslashes"
_LISTED = 5
_REASON_CHARS = 120


class GroundTruthCheck:
    """The check of one run.

    Args:
        services: the data-server and the reward-server are used.
        path: file that gets the result, as JSON.
    """

    def __init__(self, services: Services, path: Path) -> None:
        self._services = services
        self._path = path
        self.unsolvable: dict[str, str] = {}
        """Why a problem cannot be solved, by its id; grows while the check runs."""
        self._repaired = 0

    async def run(self) -> None:
        """Checks both splits, training first, as far as the services answer.

        Raises ConfigError when more than `MAX_SHARE` of a split cannot be solved.
        """
        data = self._services.data
        checked = 0
        too_many = False
        for list_prompts in (data.train_prompts, data.eval_prompts):
            known = len(self.unsolvable)
            count = await self._check_split(list_prompts)
            checked += count
            too_many |= len(self.unsolvable) - known > MAX_SHARE * count

        result = {
            "checked": checked,
            "repaired": self._repaired,
            "unsolvable": self.unsolvable,
        }
        with storing("the checked ground truths", self._path, "state_dir"):
            self._path.write_text(json.dumps(result, indent=1, ensure_ascii=False))
        if too_many:
            raise ConfigError(
                summary(checked, self.unsolvable),
                field="data.answer_field",
                value=f"{len(self.unsolvable)} of {checked}",
                remedy="name the column with the final answers, correct these rows, or choose a "
                "reward function that reads them",
            )
        if self.unsolvable:
            log.warning("%s", summary(checked, self.unsolvable))
        else:
            log.info("%s ground truths, all can be graded", f"{checked:,}")
        if self._repaired:
            log.warning(REPAIRED, f"{self._repaired:,}")

    async def _check_split(
        self, list_prompts: Callable[[int, int], Awaitable[list[Prompt]]]
    ) -> int:
        """Checks the problems of one split; returns how many were checked."""
        offset = 0
        try:
            prompts = await list_prompts(PAGE, 0)
            while prompts:
                found, repaired = await check_prompts(
                    prompts, self._services.reward.check_ground_truths
                )
                self.unsolvable.update(found)
                self._repaired += repaired
                offset += len(prompts)
                is_last = len(prompts) < PAGE
                prompts = [] if is_last else await list_prompts(PAGE, offset)
        except ServiceError as error:
            log.warning("the ground truths after %d could not be checked: %s", offset, error)
        return offset


async def check_prompts(
    prompts: Sequence[Prompt],
    check: Callable[[list[RewardItem]], Awaitable[GroundTruthProblems]],
) -> tuple[dict[str, str], int]:
    """Returns why problems cannot be solved, by their ids, as `check` finds it, and how many of the
    other ground truths were repaired.
    """
    # Not validated here: the reward-server says what is wrong with one.
    items = [
        RewardItem.model_construct(
            response="",
            ground_truth=prompt.ground_truth,
            task=prompt.task,
            columns=prompt.columns,
        )
        for prompt in prompts
    ]
    found: dict[str, str] = {}
    checked = await check(items)
    for problem in checked.problems:
        prompt = prompts[problem.index]
        found[prompt.id] = f"{prompt.ground_truth!r:.60}: {problem.reason:.{_REASON_CHARS}}"
    return found, checked.repaired


def summary(count: int, unsolvable: dict[str, str]) -> str:
    """Returns one line: how many problems cannot be solved, and the first of them."""
    listed = [f"{name} ({reason})" for name, reason in list(unsolvable.items())[:_LISTED]]
    more = ", …" if len(unsolvable) > _LISTED else ""
    return f"{count:,} ground truths; {len(unsolvable)} cannot be graded: {', '.join(listed)}{more}"
