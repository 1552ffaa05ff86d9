"""A sandbox for hostile programs."""

from collections.abc import Iterator

import pytest

from services.reward.functions import CodeRewardFunction
from tests.support.processes.waits import until
from tests.support.services.sandbox import code_function, sandboxes


@pytest.fixture(scope="module")
def code() -> CodeRewardFunction:
    return code_function(timeout_s=1, memory_mb=256, slots=2, partial_credit=True)


@pytest.fixture
def nothing_is_left() -> Iterator[None]:
    yield
    until(lambda: not sandboxes(), "a sandbox is still there")
