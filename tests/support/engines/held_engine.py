"""Holds an engine of this process between two tokens, so that a test sees a state that would
pass."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from services.engine.engine import Engine
from services.engine.sampling import Inputs


@contextmanager
def held(engine: Engine) -> Iterator[None]:
    """Inside, the engine answers prompts with their first token and then waits; it runs later calls
    after one more."""
    decode, released = engine.model.decode, threading.Event()

    def wait(inputs: Inputs) -> NDArray[np.float64]:
        assert released.wait(400)
        return decode(inputs)

    model: Any = engine.model
    model.decode = wait
    try:
        yield
    finally:
        released.set()
        model.decode = decode
