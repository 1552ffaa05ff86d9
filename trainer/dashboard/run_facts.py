"""Facts about a run besides its numbers: changed settings, and the user's note."""

import json
from pathlib import Path

from common import Json
from common.process.storage import storing
from common.settings.config import Config
from trainer.observe.run_dir import changed
from trainer.rollouts.ground_truths import GROUND_TRUTHS, summary
from trainer.trackers.base import flatten

NOTE = "notes.md"
MAX_NOTE_CHARS = 20_000
_DEFAULTS = flatten(Config().model_dump(mode="json"))


def changed_settings(config: Json) -> Json:
    """Returns the settings that differ from this version's defaults, in the order of the file."""
    return changed(_DEFAULTS, config)


def unsolvable(directory: Path) -> list[str]:
    """Returns a sentence about the problems that no answer solves; nothing without any."""
    try:
        found = json.loads((directory / GROUND_TRUTHS).read_bytes())
        problems = dict(found["unsolvable"])
        return [summary(int(found["checked"]), problems)] if problems else []
    except FileNotFoundError:
        return []
    except (OSError, ValueError, LookupError, TypeError) as error:
        return [f"{GROUND_TRUTHS} cannot be read: {error}"]


def read_note(directory: Path) -> str:
    """Returns the note of a run; empty without one."""
    try:
        return (directory / NOTE).read_text(encoding="utf-8", errors="replace")[:MAX_NOTE_CHARS]
    except OSError:
        return ""


def write_note(directory: Path, text: str) -> None:
    """Writes the note to the run directory; an empty note removes it. Raises StorageFailed."""
    path = directory / NOTE
    with storing(NOTE, path, "RUN_DIR", "make room, or let this user write there"):
        if not text.strip():
            path.unlink(missing_ok=True)
            return
        partial = path.with_suffix(".partial")
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
