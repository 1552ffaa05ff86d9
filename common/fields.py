"""Bodies of msgpack with raw little-endian arrays, and the checks of their fields.

Every check returns the value it was given, or raises InvalidInput that names the field `where` it was found.
"""

import sys
from typing import Any, NoReturn, TypeVar

import msgpack
import numpy as np
from numpy.typing import NDArray

from common.errors import InvalidInput

MSGPACK = "application/msgpack"
MAX_ITEMS = 4_000_000
"""Items of all lists and mappings of a body. A byte can be an empty mapping, of which Python makes 64: a body within its limit
would take all memory there is. Real bodies have few items, since token ids are raw arrays."""
_FLOAT32_MAX = float(np.finfo(np.float32).max)
_T = TypeVar("_T", bound=np.generic)
_C = TypeVar("_C", list[Any], dict[str, Any])


def raw(array: NDArray[Any]) -> bytes:
    """Its numbers in little-endian order; `array` reads them back."""
    return np.ascontiguousarray(array, array.dtype.newbyteorder("<")).tobytes()


def pack(content: dict[str, Any]) -> bytes:
    packed = msgpack.packb(content, use_bin_type=True)
    assert isinstance(packed, bytes)
    return packed


def unpack(body: bytes) -> dict[str, Any]:
    """The mapping of a msgpack body."""
    left = MAX_ITEMS

    def count(items: _C) -> _C:
        nonlocal left
        if (left := left - 1 - len(items)) < 0:
            raise ValueError(f"it has more than {MAX_ITEMS} items")
        return items

    limits = {"max_array_len": MAX_ITEMS, "max_map_len": MAX_ITEMS, "max_ext_len": 0}
    try:
        content = msgpack.unpackb(body, raw=False, strict_map_key=True, list_hook=count, object_hook=count, **limits)
    except (ValueError, TypeError, RecursionError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0][:200]
        raise InvalidInput(f"the body is not msgpack: {reason}", field="body", remedy=f"send {MSGPACK}") from None
    if not isinstance(content, dict):
        refuse("body", content, "the body is a mapping")
    return content


def array(value: object, dtype: type[_T], where: str) -> NDArray[_T]:
    """[numbers] from raw bytes (read-only then) or from a list; the dtypes are int32 and float32."""
    if isinstance(value, bytes):
        if len(value) % 4:
            refuse(where, f"{len(value)} bytes", "raw arrays are 4 bytes a number")
        return np.frombuffer(value, np.dtype(dtype).newbyteorder("<")).astype(dtype, copy=False)
    if isinstance(value, list) and all(isinstance(x, int | float) and not isinstance(x, bool) for x in value):
        if dtype is np.int32 and not all(isinstance(x, int) and -(2**31) <= x < 2**31 for x in value):
            refuse(where, value, "token ids are 32-bit integers")
        if dtype is np.float32 and not all(abs(x) <= _FLOAT32_MAX for x in value):
            refuse(where, value, "finite 32-bit numbers")
        return np.array(value, dtype)
    return refuse(where, value, "an array is raw bytes (msgpack) or a list of numbers (JSON)")


def only_known(content: dict[str, Any], known: set[str], where: str) -> None:
    """Refuses keys that are not in `known`."""
    for key in content:
        if key not in known:
            refuse(f"{where}.{key}", content[key], f"no such field; known: {', '.join(sorted(known))}")


def text(content: dict[str, Any], key: str, where: str, limit: int = 1_000_000, empty: bool = True) -> str:
    """The text at `key`, of at most `limit` characters; the empty text when it is not there and may be `empty`."""
    value = content.get(key, "" if empty else None)
    if not isinstance(value, str) or len(value) > limit or not (value or empty):
        refuse(f"{where}.{key}", value, f"a text of {0 if empty else 1} to {limit} characters")
    try:
        value.encode()
    except UnicodeEncodeError:
        refuse(f"{where}.{key}", value, "text that can be sent as UTF-8, without lone surrogates")
    return value


def integer(value: object, where: str) -> int:
    """A whole number from 0 to 2^53 − 1."""
    if type(value) is not int or not 0 <= value < 2**53:
        refuse(where, value, "a whole number that is not negative")
    return value


def number(value: object, where: str) -> float:
    """A finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
        refuse(where, value, "a finite number")
    return float(value)


def boolean(value: object, where: str) -> bool:
    if not isinstance(value, bool):
        refuse(where, value, "true or false")
    return value


def choice(value: object, choices: tuple[str, ...], where: str) -> Any:
    if value not in choices:
        refuse(where, value, f"one of {', '.join(choices)}")
    return value


def refuse(where: str, value: object, remedy: str) -> NoReturn:
    """Raises InvalidInput."""
    raise InvalidInput(f"{where} cannot be used", field=where, value=value, remedy=remedy)
