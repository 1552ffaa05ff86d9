"""Folders of tasks in Harbor's format (task.toml, instruction.md, environment, tests), for
`environment.name harbor:COMMAND`.
"""

import re
from collections.abc import Iterable
from pathlib import Path

from common.settings.sections import HARBOR_COLUMN
from common.wire.schemas import Prompt
from services.data.loaders_base import Loader, part_of
from services.data.rows import stop

_CANARY = re.compile(r"<!--.*canary.*-->|#.*canary.*", re.IGNORECASE)


def has_tasks(folder: Path) -> bool:
    """Returns whether a folder has tasks, or folders of tasks for its splits."""
    return any(_files(folder)) or any(any(_files(split)) for split in folder.glob("*/"))


class HarborLoader(Loader):
    """Tasks, each in a folder: all in one, of which a tenth is held out, or a folder of them for
    each split. The prompt is the instruction; the environment-server reads everything else at the
    same path.
    """

    @property
    def has_splits(self) -> bool:
        """Whether there is a folder of tasks for each split."""
        return not any(_files(Path(self.source)))

    def _load(self, split: str) -> list[Prompt]:
        folder = Path(self.source)
        if self.has_splits:
            folder = folder / split
        prompts = [_prompt(file.parent) for file in sorted(_files(folder))]
        return prompts if self.has_splits else part_of(prompts, split, folder)


def _files(folder: Path) -> Iterable[Path]:
    return folder.glob("*/task.toml")


def _prompt(folder: Path) -> Prompt:
    file = folder / "instruction.md"
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        stop(f"{file} cannot be read: {error}", folder, "repair the task")
    # Marks against training on benchmarks, which no agent sees.
    while lines and (not lines[0].strip() or _CANARY.fullmatch(lines[0].strip())):
        del lines[0]
    text = "\n".join(lines).strip()
    if not text:
        stop(f"{file} is empty", folder, "write what the agent has to do")
    return Prompt(
        id=folder.name, prompt=text, ground_truth="", columns={HARBOR_COLUMN: str(folder)}
    )
