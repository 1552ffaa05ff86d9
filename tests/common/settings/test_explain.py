"""What pydantic finds is told as what is wrong and what to give instead."""

from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from common.settings.explain import explained


class Item(TypedDict):
    """A mapping with one field."""

    __pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[misc]

    name: str


@pytest.mark.parametrize(
    ("kind", "given", "message", "remedy"),
    [
        (int, "x", "invalid value, expected a valid integer", "give a value that is a valid"),
        (Annotated[float, Field(gt=0)], -1, "expected greater than 0", "is greater than 0"),
        (Annotated[str, Field(min_length=1)], "", "expected at least 1 char", "has at least 1 c"),
        (Annotated[list[int], Field(min_length=2)], [1], "expected at least 2 items", "has at le"),
        (Path, 5, "invalid value, expected a path", "give a text"),
        (Literal["sft", "grpo"], "grop", "there is no such choice", "did you mean grpo? use sft"),
        (Item, {}, "it is missing", "give it"),
        (Item, {"name": "a", "nmae": "b"}, "there is no such field", "leave it out, or correct"),
    ],
)
def test_every_kind_of_mistake_has_a_remedy(
    kind: Any, given: object, message: str, remedy: str
) -> None:
    with pytest.raises(ValidationError) as caught:
        TypeAdapter(kind).validate_python(given)
    told = explained(caught.value.errors()[0])
    assert message in told.reason
    assert remedy in told.remedy
    assert "after validation" not in str(told)
