"""The sandbox for tests; where it does not work they are skipped with its own reason."""

from typing import Any

import pytest

from common.errors import ConfigError
from services.reward.functions import CodeRewardFunction


def code_function(**arguments: Any) -> CodeRewardFunction:
    try:
        return CodeRewardFunction(**arguments)
    except ConfigError as error:
        pytest.skip(str(error))
