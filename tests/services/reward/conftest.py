"""A sandbox for hostile programs."""

import time
from collections.abc import Iterator

import pytest

from services.reward.functions import CodeRewardFunction
from tests.support.services.sandbox import code_function, sandboxes


@pytest.fixture(scope="module")
def code() -> CodeRewardFunction:
    return code_function(timeout_s=1, memory_mb=256, slots=2, partial_credit=True)


@pytest.fixture
def nothing_is_left() -> Iterator[None]:
    yield
    left = sandboxes()
    limit = time.monotonic() + 400
    while left and time.monotonic() < limit:
        time.sleep(0.05)
        left = sandboxes()
    assert not left, "a sandbox is still there"
