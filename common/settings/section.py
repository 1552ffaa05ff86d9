"""What every section of the settings is made of."""

from typing import Annotated, TypeVar

from pydantic import BaseModel, ConfigDict

_T = TypeVar("_T")
IN_HELP = "in help"
InHelp = Annotated[_T, IN_HELP]
"""Marks a setting that `--help` shows; the others appear only in `--help-all`."""


class Section(BaseModel):
    """A section of the settings; unknown names and numbers that are not finite are refused."""

    model_config = ConfigDict(
        extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False, protected_namespaces=()
    )
