"""GSM8K (Cobbe et al. 2021, arXiv:2110.14168) and MATH (Hendrycks et al. 2021,
arXiv:2103.03874).
"""

import re
from collections.abc import Collection, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path

from common.errors import ConfigError
from common.prompts.stated_answers import last_box
from common.wire.schemas import Prompt
from services.data.loaders_base import RowLoader
from services.data.rows import Cells, answer_of, further_columns, id_of, refuse, stop, text_of

GSM8K_ON_HUB = "openai/gsm8k"
MATH_ON_HUB = "DigitalLearningGmbH/MATH-lighteval"
"""7,500 and 5,000 problems with the columns problem, level, type and solution. The original is no
longer on the hub."""
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
_LEVEL = re.compile(r"(?:level\s*)?(\d+)(?:\.0)?", re.IGNORECASE)
_UNKNOWN_LEVEL = re.compile(r"level\s*\?", re.IGNORECASE)
_MATH_COLUMNS = ("problem", "solution", "answer", "level", "subject", "type", "id")


@dataclass
class GSM8KLoader(RowLoader):
    """Grade-school problems with the columns question and answer; the answer ends in `#### N`.

    The ground truth is N without thousands separators, such as `1080` or `-2`. An answer that is
    not one number is an error. `source` is `org/name` on the hub, or a file or directory with the
    same columns.
    """

    source: str | Path = GSM8K_ON_HUB
    _: KW_ONLY
    hub_config: str = "main"
    name: str = "gsm8k"

    def _prompt(self, row: Cells, default_id: str) -> Prompt:
        answer = answer_of(row, "answer", "another source")
        if not _NUMBER.fullmatch(answer):
            refuse(
                f"the answer {answer!r:.80} is not a number",
                "end the answer in #### and one number",
            )
        return Prompt(
            id=id_of(row, default_id),
            prompt=text_of(row, "question", "another source"),
            ground_truth=answer,
            task=self.task,
            columns=further_columns(row, ("question", "answer", "id")),
        )


@dataclass
class MATHLoader(RowLoader):
    """Competition problems with the columns problem and solution, and optionally answer, level, and
    subject or type.

    The ground truth is the column answer, else the content of the last balanced box of the
    solution. Level and subject are in `Prompt.columns`; a known `level` is a number. Any choice of
    levels leaves out problems whose level is unknown.

    Args:
        levels: keep problems of these levels: 1 to 5, as 5, "5" or "Level 5"; all when None.
        subjects: keep problems of these subjects, such as `Algebra` or `counting_and_probability`;
            all when None.
        source: `org/name` on the hub, or a file or directory with the same columns.
        hub_config: configuration of a hub data set that has several; empty for the default one.
        task: task of the prompts, which selects their reward functions; empty for the default ones.

    Raises:
        ConfigError: a level is invalid.
    """

    source: str | Path = MATH_ON_HUB
    _: KW_ONLY
    name: str = "math"
    levels: Collection[int | str] | None = None
    subjects: Sequence[str] | None = None

    def __post_init__(self) -> None:
        if self.levels is not None:
            self.levels = frozenset(map(_wanted_level, self.levels))
        self._wanted = {_plain(name): name for name in self.subjects or ()}
        self._seen = set[str]()

    def _load(self, split: str) -> list[Prompt]:
        self._seen = set()
        prompts = super()._load(split)
        absent = next((self._wanted[each] for each in self._wanted.keys() - self._seen), None)
        if absent:
            there = ", ".join(sorted(self._seen)) or "none"
            stop(
                f"the split {split!r} has no subject {absent!r}; it has {there}",
                absent,
                "name one of these",
                "data.subjects",
            )
        return prompts

    def _prompt(self, row: Cells, default_id: str) -> Prompt | None:
        level = self._level(row)
        subject = next(
            (row[name] for name in ("subject", "type") if isinstance(row.get(name), str)), None
        )
        self._seen.add(_plain(subject or ""))
        if self.levels is not None and level not in self.levels:
            return None
        if self.subjects is not None and _plain(subject or "") not in self._wanted:
            return None
        known = {"level": row.get("level") if level is None else level, "subject": subject}
        columns = {name: value for name, value in known.items() if value is not None}
        return Prompt(
            id=id_of(row, default_id),
            prompt=text_of(row, "problem", "another source"),
            ground_truth=_ground_truth(row),
            task=self.task,
            columns=columns | further_columns(row, _MATH_COLUMNS),
        )

    def _level(self, row: Cells) -> int | None:
        """Returns the level of a row; None if unknown.

        Raises ConfigError when it is needed but the column is absent.
        """
        value = row.get("level")
        if value is None:
            if self.levels is not None:
                text_of(
                    row,
                    "level",
                    "data.levels to nothing: the problems of this source have no levels",
                )
            return None
        level = level_number(value)
        is_unknown = isinstance(value, str) and _UNKNOWN_LEVEL.fullmatch(value.strip())
        if level is None and not is_unknown:
            refuse(f"the level is {value!r:.80}, not a number or Level N")
        return level


def level_number(value: object) -> int | None:
    """Returns 5 for 5, 5.0, "5" and "Level 5"; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    found = _LEVEL.fullmatch(str(value).strip())
    return int(found.group(1)) if found else None


def _wanted_level(value: int | str) -> int:
    level = level_number(value)
    if level is None:
        raise ConfigError(
            "this is not a level",
            field="data.levels",
            value=value,
            remedy="write levels as 5, '5' or 'Level 5'",
        )
    return level


def _plain(subject: str) -> str:
    """Normalises a subject: `Counting & Probability` and `counting_and_probability` become
    equal.
    """
    return " ".join(re.findall("[a-z]+", subject.lower().replace("&", " and ")))


def _ground_truth(row: Cells) -> str:
    if row.get("answer") is not None:
        return answer_of(row, "answer", "the column answer")
    solution = text_of(row, "solution", "the column answer, or solution")
    answer = last_box(solution)
    if not answer:
        refuse(
            "the solution has no \\boxed answer",
            "put the answer into a box, or add a column answer",
        )
    return answer
