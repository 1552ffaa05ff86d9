"""Errors of ours in tests: their code, field and value, whatever the words are."""

from typing import TypeVar

import pytest

from common.errors import ServiceError

_E = TypeVar("_E", bound=ServiceError)


def raises(kind: type[_E], **expected: object) -> pytest.RaisesExc[_E]:
    """Returns `pytest.raises` for an error whose attributes are as expected: `code`, `field`, and
    `value`, which is the text that the user reads.
    """

    def is_as_expected(error: _E) -> bool:
        found = {name: getattr(error, name) for name in expected}
        assert found == expected, f"{found} instead of {expected}"
        return True

    return pytest.raises(kind, check=is_as_expected)
