r"""The wire format of protocol buffers, as far as Tinker's messages use it.

A message is a sequence of fields: a varint with the number and the kind of each, then its value.
`Messages` says what they hold, a message in a line, and `*` marks a field that is repeated:

    points = Messages("Point: 1 x int, 2 names str*, 3 near Point")
    points.encode("Point", {"x": 7})         # b"\x08\x07"
    points.decode("Point", b"\x08\x07")      # {"x": 7, "names": [], "near": None}

The SDK's own classes are generated code of a package that this project does not need otherwise.
"""

import itertools
import struct
from collections.abc import Iterator, Mapping
from io import BytesIO
from typing import Any

from common.errors import InvalidInput, TooLarge

MOST_FIELDS = 100_000
"""A message has at most this many fields, since each becomes an object. The SDK sends at most 1,024
data at once."""
_VARINT = 0
_DOUBLE = 1
_BYTES = 2
_WIDTHS = {_DOUBLE: 8, 5: 4}
_ZEROS: dict[str, Any] = {"int": 0, "float": 0.0, "str": "", "bytes": b""}
"""What stands for a field that is not there, by its kind; a float is a double on the wire."""


class Messages:
    """Kinds of messages, as dicts. A map is a repeated message of `key` and `value`."""

    def __init__(self, text: str) -> None:
        self._kinds: dict[str, dict[int, tuple[str, str, bool]]] = {}
        for line in text.strip().splitlines():
            kind, _, listed = line.partition(":")
            fields = self._kinds[kind.strip()] = {}
            for each in listed.split(","):
                number, name, of = each.split()
                fields[int(number)] = (name, of.rstrip("*"), of.endswith("*"))

    def decode(self, kind: str, message: bytes) -> dict[str, Any]:
        """Returns the fields of a message of this kind; a nested message that is absent is None.
        Raises InvalidInput for bytes that are no such message.
        """
        known = self._kinds[kind]
        found: dict[str, Any] = {}
        for name, of, many in known.values():
            found[name] = [] if many else _ZEROS.get(of)
        for number, value in _fields(message):
            # Other fields are of another version, or are not needed.
            name, of, many = known.get(number, ("", "", False))
            if many and of == "int" and isinstance(value, bytes):
                found[name] += _numbers(value)
            elif many:
                found[name].append(self._value(of, value))
            elif of:
                found[name] = self._value(of, value)
        return found

    def _value(self, kind: str, value: Any) -> Any:
        wanted = type(_ZEROS[kind]) if kind in ("int", "float") else bytes
        if not isinstance(value, wanted):
            raise _malformed(f"{type(value).__name__} in the place of {wanted.__name__}")
        if kind in self._kinds:
            return self.decode(kind, value)
        try:
            return value.decode() if kind == "str" else value
        except UnicodeDecodeError:
            raise _malformed("a text that is not UTF-8") from None

    def encode(self, kind: str, values: Mapping[str, Any]) -> bytes:
        """Returns the bytes of a message of this kind; a field that is None is left out."""
        parts = []
        for number, (name, of, many) in self._kinds[kind].items():
            value = values.get(name)
            for each in value or () if many else [value]:
                if each is not None:
                    parts.append(self._field(number, of, each))
        return b"".join(parts)

    def _field(self, number: int, kind: str, value: Any) -> bytes:
        if kind == "int":
            return _varint(number << 3 | _VARINT) + _varint(value)
        if kind == "float":
            return _varint(number << 3 | _DOUBLE) + struct.pack("<d", value)
        content: bytes = value
        if kind in self._kinds:
            content = self.encode(kind, value)
        elif kind == "str":
            content = value.encode()
        return _varint(number << 3 | _BYTES) + _varint(len(content)) + content


def _fields(message: bytes) -> Iterator[tuple[int, int | float | bytes]]:
    """Yields the number and the value of each field: bytes of texts, arrays and messages, a float
    for a double, an int for any other number.
    """
    stream = BytesIO(message)
    for count in itertools.count(1):
        if stream.tell() == len(message):
            return
        if count > MOST_FIELDS:
            raise TooLarge(
                f"a message has more than {MOST_FIELDS:,} fields",
                field="body",
                remedy="send less data in one message",
            )
        key = _read_varint(stream)
        kind = key & 7
        if kind == _VARINT:
            yield key >> 3, _read_varint(stream)
            continue

        size = _read_varint(stream) if kind == _BYTES else _WIDTHS.get(kind, len(message) + 1)
        content = stream.read(min(size, len(message)))
        if len(content) != size:
            raise _malformed(
                f"a field of kind {kind} with {size} bytes before byte {stream.tell()}"
            )
        yield key >> 3, struct.unpack("<d", content)[0] if kind == _DOUBLE else content


def _numbers(content: bytes) -> Iterator[int]:
    stream = BytesIO(content)
    while stream.tell() < len(content):
        yield _read_varint(stream)


def _varint(value: int) -> bytes:
    parts = bytearray()
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    parts.append(value)
    return bytes(parts)


def _read_varint(stream: BytesIO) -> int:
    value = 0
    for shift in range(0, 70, 7):
        (byte,) = stream.read(1) or [0x80]  # at the end of the message: it does not end
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value
    raise _malformed(f"a number that does not end, before byte {stream.tell()}")


def _malformed(what: str) -> InvalidInput:
    return InvalidInput(
        f"this is not a message of Tinker's protocol: {what}",
        field="body",
        remedy="send what the SDK `tinker` sends",
    )
