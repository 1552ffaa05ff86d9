"""`given_problems.json`: the problems that a program gave a run with `trainer.audit`. No setting
says where they come from, and an audit or a fork needs them.
"""

from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from common.wire.schemas import Prompt
from trainer.observe.run_dir import PROBLEMS, damaged, storing_run


@dataclass(frozen=True)
class Problems:
    """The caller's data, in place of `config.data`."""

    train: list[Prompt]
    held_out: list[Prompt]
    """Empty when there is no evaluation (`evaluation.samples` 0)."""


_JSON = TypeAdapter(Problems)


def keep_problems(run_dir: Path, problems: Problems) -> None:
    """Writes the file. Raises StorageFailed."""
    path = run_dir / PROBLEMS
    with storing_run(path):
        path.write_bytes(_JSON.dump_json(problems))


def kept_problems(run_dir: Path) -> Problems | None:
    """Returns the problems; None without the file. Raises ConfigError for a damaged one."""
    path = run_dir / PROBLEMS
    try:
        return _JSON.validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValidationError) as error:
        raise damaged(f"{path.name} cannot be read: {error}", path) from None
