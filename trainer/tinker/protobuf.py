r"""The wire format of protocol buffers, as far as Tinker's messages use it.

A message is a sequence of fields: a varint with the number and the kind of each, then its value. A
`Schema` says what they hold, and a message is a dict by their names:

    POINT: Schema = {1: ("x", int), 2: ("names", [str]), 3: ("near", Map(bytes))}
    encode(POINT, {"x": 7})                 # b"\x08\x07"
    decode(POINT, b"\x08\x07")             # {"x": 7, "names": [], "near": {}}

The SDK's own classes are generated code of a package that this project does not need otherwise.
"""

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from common.errors import InvalidInput, TooLarge

MOST_FIELDS = 100_000
"""A message has at most so many fields, since each becomes an object. The SDK sends at most 1,024
data at once."""
_VARINT = 0
_DOUBLE = 1
_BYTES = 2
_WIDTHS = {_DOUBLE: 8, 5: 4}
Schema = Mapping[int, tuple[str, Any]]
"""Name and kind of the fields by number: `int`, `float` (a double), `str`, `bytes`, another schema,
[kind] for a repeated one, or `Map`."""


@dataclass(frozen=True)
class Map:
    """A map with texts as keys, whose values are of this kind."""

    value: Any

    @property
    def entry(self) -> Schema:
        return {1: ("key", str), 2: ("value", self.value)}


def decode(schema: Schema, message: bytes) -> dict[str, Any]:
    """Returns a message; of what is not there its kind's zero, or None for a message. Raises
    InvalidInput for what is no such message.
    """
    found: dict[str, Any] = {}
    for name, kind in schema.values():
        found[name] = kind() if isinstance(kind, type) else None
        if isinstance(kind, list | Map):
            found[name] = [] if isinstance(kind, list) else {}

    for number, value in _fields(message):
        name, kind = schema.get(number, ("", None))
        if isinstance(kind, Map):
            entry = decode(kind.entry, _checked(bytes, value))
            found[name][entry["key"]] = entry["value"]
        elif isinstance(kind, list):
            # Numbers may be packed into one field.
            is_packed = kind[0] is int and isinstance(value, bytes)
            found[name] += _numbers(value) if is_packed else [_value(kind[0], value)]
        elif kind is not None:  # others are of another version, or are not needed
            found[name] = _value(kind, value)
    return found


def _value(kind: Any, value: Any) -> Any:
    if isinstance(kind, Mapping):
        return decode(kind, _checked(bytes, value))
    if kind is not str:
        return _checked(kind, value)
    try:
        return _checked(bytes, value).decode()
    except UnicodeDecodeError:
        raise _malformed("a text that is not UTF-8") from None


def _checked(kind: type, value: Any) -> Any:
    if not isinstance(value, kind):
        raise _malformed(f"{type(value).__name__} in the place of {kind.__name__}")
    return value


def encode(schema: Schema, values: Mapping[str, Any]) -> bytes:
    """Returns the bytes of a message, whose fields are in the order of the schema."""
    parts = []
    for number, (name, kind) in schema.items():
        value = values.get(name)
        if isinstance(kind, Map):
            for key, each in (value or {}).items():
                parts.append(_field(number, kind.entry, {"key": key, "value": each}))
        elif isinstance(kind, list):
            parts += [_field(number, kind[0], each) for each in value or ()]
        elif value is not None:
            parts.append(_field(number, kind, value))
    return b"".join(parts)


def _field(number: int, kind: Any, value: Any) -> bytes:
    if kind is int:
        return _varint(number << 3 | _VARINT) + _varint(value)
    if kind is float:
        return _varint(number << 3 | _DOUBLE) + struct.pack("<d", value)
    content: bytes = value
    if isinstance(kind, Mapping):
        content = encode(kind, value)
    elif kind is str:
        content = value.encode()
    return _varint(number << 3 | _BYTES) + _varint(len(content)) + content


def _fields(message: bytes) -> Iterator[tuple[int, int | float | bytes]]:
    """Yields the number and the value of each field: bytes of texts, arrays and messages, a float
    for a double, an int for any other number.
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


def _numbers(content: bytes) -> list[int]:
    found: list[int] = []
    at = 0
    while at < len(content):
        number, at = _read_varint(content, at)
        found.append(number)
    return found


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
