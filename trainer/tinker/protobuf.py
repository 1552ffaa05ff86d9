"""The wire format of protocol buffers, as far as Tinker's messages use it.

A message is a sequence of fields: a varint with the number and the kind of each, then its value.
The SDK's own classes are generated code of a package that this project does not need otherwise.
"""

import struct
from collections.abc import Iterator

from common.errors import InvalidInput, TooLarge

MOST_FIELDS = 100_000
"""A message has at most so many fields, since each becomes an object. The SDK sends at most 1,024
data at once."""
_VARINT = 0
_DOUBLE = 1
_BYTES = 2
_FIXED32 = 5
_WIDTHS = {_DOUBLE: 8, _FIXED32: 4}
Value = int | float | bytes


def fields(message: bytes) -> Iterator[tuple[int, Value]]:
    """Yields the number and the value of each field: bytes of texts, arrays and messages, a float
    for a double, an int for any other number. Raises InvalidInput for what is no message.
    """
    at = 0
    count = 0
    while at < len(message):
        count += 1
        if count > MOST_FIELDS:
            raise TooLarge(
                f"a message has more than {MOST_FIELDS:,} fields",
                field="body",
                remedy="send fewer data at once",
            )
        key, at = _read_varint(message, at)
        number = key >> 3
        kind = key & 7
        if kind == _VARINT:
            value, at = _read_varint(message, at)
            yield number, value
            continue

        if kind == _BYTES:
            size, at = _read_varint(message, at)
        elif kind in _WIDTHS:
            size = _WIDTHS[kind]
        else:
            raise _malformed(f"kind {kind} at byte {at}")
        if at + size > len(message):
            raise _malformed(f"a field of {size} bytes at byte {at} of {len(message)}")
        content = message[at : at + size]
        at += size
        yield number, struct.unpack("<d", content)[0] if kind == _DOUBLE else content


def numbers(value: Value) -> list[int]:
    """Returns the integers of one field of a repeated number: packed in bytes, or one alone."""
    if isinstance(value, int):
        return [value]
    found: list[int] = []
    at = 0
    content = as_bytes(value)
    while at < len(content):
        number, at = _read_varint(content, at)
        found.append(number)
    return found


def as_bytes(value: Value) -> bytes:
    """Returns the bytes of a field. Raises InvalidInput for a number."""
    if not isinstance(value, bytes):
        raise _malformed("a number in the place of bytes")
    return value


def as_text(value: Value) -> str:
    """Returns the text of a field. Raises InvalidInput for a number and for other encodings."""
    try:
        return as_bytes(value).decode()
    except UnicodeDecodeError:
        raise _malformed("a text that is not UTF-8") from None


def entry(message: bytes) -> tuple[str, bytes | float]:
    """Returns key and value of an entry of a map with texts as keys."""
    found = dict(fields(message))
    value = found.get(2, b"")
    return as_text(found.get(1, b"")), value


def varint_field(number: int, value: int) -> bytes:
    """Returns a field with an integer of at least 0; nothing for 0, the default."""
    return _varint(number << 3 | _VARINT) + _varint(value) if value else b""


def bytes_field(number: int, value: bytes) -> bytes:
    """Returns a field with bytes, a text or a message."""
    return _varint(number << 3 | _BYTES) + _varint(len(value)) + value


def double_field(number: int, value: float) -> bytes:
    """Returns a field with a double."""
    return _varint(number << 3 | _DOUBLE) + struct.pack("<d", value)


def map_field(number: int, key: str, value: bytes) -> bytes:
    """Returns an entry of a map; `value` is the field 2 of the entry."""
    return bytes_field(number, bytes_field(1, key.encode()) + value)


def _varint(value: int) -> bytes:
    parts = bytearray()
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    parts.append(value)
    return bytes(parts)


def _read_varint(message: bytes, at: int) -> tuple[int, int]:
    """Returns the number at a position, and the position behind it."""
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(message):
            break
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise _malformed(f"a number that does not end, at byte {at}")


def _malformed(what: str) -> InvalidInput:
    return InvalidInput(
        f"this is not a message of Tinker's protocol: {what}",
        field="body",
        remedy="send what the SDK `tinker` sends",
    )
