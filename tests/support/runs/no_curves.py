"""Runs that draw no picture at their end: that takes longer than a short run itself."""

import sys
from types import ModuleType

import pytest

PLOTS = "trainer.observe.plots"


def no_curves(patch: pytest.MonkeyPatch) -> None:
    """Replaces the module that draws, so that matplotlib is not imported either."""
    stub = ModuleType(PLOTS)
    vars(stub).update(plot_curves=lambda *_: None)
    patch.setitem(sys.modules, PLOTS, stub)
