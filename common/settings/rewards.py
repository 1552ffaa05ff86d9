"""The entries of `reward.functions`: each built-in reward function with its own arguments, and the
user's own.
"""

import re
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Discriminator,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    SerializerFunctionWrapHandler,
    Tag,
    model_serializer,
    model_validator,
)

from common import Json
from common.errors import Refused, did_you_mean
from common.settings.section import Section


class Reward(Section):
    """What every reward function takes."""

    name: str
    """Name of the function, or the import path `package.module:Class` of your own."""
    weight: float = 1.0
    """Weight in the sum of the rewards; may be negative."""
    tasks: list[str] = Field([""], min_length=1)
    """Tasks of the problems that it scores (`data.task_field`); `""` stands for problems without a
    task."""

    @model_serializer(mode="wrap")
    def _as_written(self, handler: SerializerFunctionWrapHandler) -> str | Json:
        """Leaves out defaults, so that saved settings look as somebody would write them."""
        defaults = {name: field.default for name, field in type(self).model_fields.items()}
        content = handler(self)
        other = {name: value for name, value in content.items() if value != defaults[name]}
        return {"name": self.name, **other} if other.keys() - {"name"} else self.name


class MathReward(Reward):
    """Compares final answers with the ground truth."""

    name: Literal["math"] = "math"
    timeout_s: PositiveFloat = 1.0
    """Seconds for one answer in a worker. Waiting for a processor does not count."""


class CodeReward(Reward):
    """Runs programs against test cases."""

    name: Literal["code"] = "code"
    timeout_s: PositiveFloat = 5.0
    """Seconds for one test case. All cases of a program share five times as much. Waiting for a
    processor does not count."""
    partial_credit: bool = False
    """Reward the share of test cases that pass, instead of all or nothing."""
    slots: int | None = Field(None, gt=0)
    """Programs that run at once. Unset: one per processor."""
    memory_mb: int = Field(512, ge=32)
    """Address space of one program, in MB."""
    output_kb: int = Field(1024, ge=1)
    """Standard output of one test case, and size of a value that a program returns, in KB. A test
    case that expects more is refused."""
    python: str = ""
    """Python interpreter for programs, with its installed packages. Empty: one without packages."""
    sandbox: Literal["bubblewrap", "none"] = "bubblewrap"
    """`none` runs programs as the server's own user without protection. Only for programs that you
    trust."""


class FormatReward(Reward):
    """Searches for patterns."""

    name: Literal["format"] = "format"
    required: list[str] = []
    """Regular expressions that must be found in a completion. A dot matches line ends too."""
    forbidden: list[str] = []
    """Regular expressions that must not be found in a completion."""

    @model_validator(mode="after")
    def _has_patterns(self) -> "FormatReward":
        if not self.required and not self.forbidden:
            raise Refused(
                "the reward function format has no pattern", "give it `required` or `forbidden`"
            )
        return self


class LengthReward(Reward):
    """Punishes long completions."""

    name: Literal["length"] = "length"
    soft_chars: NonNegativeInt = 4000
    """Characters up to which nothing is subtracted from the reward."""
    hard_chars: PositiveInt = 8000
    """Characters from which 1 is subtracted."""

    @model_validator(mode="after")
    def _rises(self) -> "LengthReward":
        if self.soft_chars >= self.hard_chars:
            raise Refused(
                f"soft_chars {self.soft_chars} of the reward function length is not below "
                f"hard_chars {self.hard_chars}",
                "lower it",
            )
        return self


class RepetitionReward(Reward):
    """Punishes repetitions."""

    name: Literal["repetition"] = "repetition"


class ModelReward(Reward):
    """Asks a reward model."""

    name: Literal["reward_model"] = "reward_model"
    model: str = Field(min_length=1)
    """Sequence-classification model, on the hub or in a directory."""
    max_tokens: PositiveInt = 4096
    """Longest chat that is scored, in tokens. A longer chat gets no score."""


class JudgeReward(Reward):
    """Asks a language model."""

    name: Literal["judge"] = "judge"
    url: str = Field(min_length=1)
    """OpenAI-compatible endpoint, such as http://127.0.0.1:8000/v1. Its key comes from
    JUDGE_API_KEY."""
    model: str = Field(min_length=1)
    """Name of the model at the endpoint."""
    rubric: str = ""
    """Criteria for the judge. Empty: a general rubric on correctness."""
    timeout_s: PositiveFloat = 60.0
    """Seconds for one request."""
    concurrency: PositiveInt = 16
    """Maximum concurrent requests."""
    max_tokens: PositiveInt = 1024
    """Longest reply, in tokens, thoughts included. A reply that is cut there gives no score."""

    @model_validator(mode="after")
    def _no_secrets(self) -> "JudgeReward":
        if "@" in self.url.partition("://")[2].partition("/")[0]:
            raise Refused(
                "the judge's url contains credentials, but a run saves its settings",
                "put them into JUDGE_API_KEY",
            )
        return self


class OwnReward(Reward):
    """A class or function of your own."""


BUILT_IN: dict[str, type[Reward]] = {
    "math": MathReward,
    "code": CodeReward,
    "format": FormatReward,
    "length": LengthReward,
    "repetition": RepetitionReward,
    "reward_model": ModelReward,
    "judge": JudgeReward,
}


def _read(given: Any) -> Any:
    """Turns a name alone into an entry. Raises Refused for a name that does not exist."""
    if isinstance(given, Reward):
        return given
    if isinstance(given, str):
        given = {"name": given}
    name = given.get("name") if isinstance(given, dict) else None
    if not isinstance(name, str):
        raise Refused(
            "an entry is neither the name of a function nor a mapping with its name",
            "write math, or a mapping with `name` and arguments",
        )
    if name not in BUILT_IN and not re.fullmatch(r"[\w.]+:\w+", name):
        choices = [*BUILT_IN, "an import path package.module:Class"]
        raise Refused(f"there is no {name}", did_you_mean(name, choices))
    return given


def _kind(given: Any) -> str:
    """Returns the tag of an entry. An object of the caller's may have the name of a built-in
    function.
    """
    if isinstance(given, OwnReward):
        return "own"
    name = given.get("name") if isinstance(given, dict) else getattr(given, "name", "")
    return name if name in BUILT_IN else "own"


RewardEntry = Annotated[
    Annotated[MathReward, Tag("math")]
    | Annotated[CodeReward, Tag("code")]
    | Annotated[FormatReward, Tag("format")]
    | Annotated[LengthReward, Tag("length")]
    | Annotated[RepetitionReward, Tag("repetition")]
    | Annotated[ModelReward, Tag("reward_model")]
    | Annotated[JudgeReward, Tag("judge")]
    | Annotated[OwnReward, Tag("own")],
    Discriminator(_kind),
    BeforeValidator(_read),
]
"""A reward function with its arguments, or its name alone."""
