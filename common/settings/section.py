"""What every section of the settings is made of."""

import re
from typing import Annotated, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict

from common.errors import Refused, did_you_mean

_T = TypeVar("_T")
IN_HELP = "in help"
InHelp = Annotated[_T, IN_HELP]
"""Marks a setting that `--help` shows; the others appear only in `--help-all`."""


def _named(value: object) -> object:
    # `Path("")` is the working directory.
    if value == "":
        raise Refused("it is empty", "name a path, or leave it out")
    return value


Named = Annotated[_T, BeforeValidator(_named)]
"""A path that an empty text does not name."""


class Section(BaseModel):
    """A section of the settings; unknown names and numbers that are not finite are refused."""

    model_config = ConfigDict(
        extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False, protected_namespaces=()
    )


def among(*names: str, path: str = "package.module:name") -> AfterValidator:
    """Returns a validator: the text must be one of `names` or an import path."""

    def check(text: str) -> str:
        if text in names or re.fullmatch(r"[\w.]+:\w+", text):
            return text
        choices = [*filter(None, names), f"an import path {path}"]
        raise Refused(f"there is no {text}", did_you_mean(text, choices))

    return AfterValidator(check)
