"""What goes to and from the critic-server, as msgpack with raw little-endian arrays; every field is checked.

All decoders raise InvalidInput naming the first field that is wrong, e.g. `rows[3].returns`.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from common.fields import array, integer, number, only_known, pack, raw, refuse, text, unpack
from common.schemas import Float32, Int32, TokenSequence, UpdateRequest, ValueRequest, Values, ValueTargets

_SEQUENCE = {"prompt_ids", "completion_ids"}
_FLOAT32_MAX = float(np.finfo(np.float32).max)
_ROW = _SEQUENCE | {"old_values", "returns", "weight"}


def encode_value_request(request: ValueRequest) -> bytes:
    """`{"sequences": […]}`, and `run_id` and `step` when they are set."""
    sequences = [_sequence_dict(sequence) for sequence in request.sequences]
    state = {"run_id": request.run_id, "step": request.step}
    return pack({"sequences": sequences, **{name: value for name, value in state.items() if value is not None}})


def decode_value_request(body: bytes) -> ValueRequest:
    content = unpack(body)
    only_known(content, {"sequences", "run_id", "step"}, "body")
    sequences = [_sequence(item, f"sequences[{i}]", _SEQUENCE) for i, item in enumerate(_list(content, "sequences"))]
    if ("run_id" in content) != ("step" in content):
        refuse("run_id" if "step" in content else "step", None, "run_id and step together name a critic: send both or neither")
    if "run_id" not in content:
        return ValueRequest(sequences)
    return ValueRequest(sequences, _run_id(content), integer(content["step"], "step"))


def encode_values(values: Values) -> bytes:
    """`{"values": […], "step"}`."""
    return pack({"values": [_floats(value) for value in values.values], "step": values.step})


def decode_values(body: bytes) -> Values:
    content = unpack(body)
    values = [_finite(item, f"values[{i}]") for i, item in enumerate(_list(content, "values"))]
    return Values(values, integer(content.get("step"), "step"))


def encode_update_request(request: UpdateRequest) -> bytes:
    """`{"run_id", "step", "seed", "rows": […]}`."""
    rows = [
        _sequence_dict(row.sequence)
        | {"old_values": _floats(row.old_values), "returns": _floats(row.returns), "weight": float(row.weight)}
        for row in request.rows
    ]
    return pack({"run_id": request.run_id, "step": request.step, "seed": request.seed, "rows": rows})


def decode_update_request(body: bytes) -> UpdateRequest:
    content = unpack(body)
    only_known(content, set(UpdateRequest.__dataclass_fields__), "body")
    return UpdateRequest(
        run_id=_run_id(content),
        step=integer(content.get("step"), "step"),
        seed=integer(content.get("seed"), "seed"),
        rows=[_row(item, f"rows[{i}]") for i, item in enumerate(_list(content, "rows"))],
    )


def _row(content: object, where: str) -> ValueTargets:
    sequence = _sequence(content, where, _ROW)
    assert isinstance(content, dict)
    numbers = []
    for name in ("old_values", "returns"):
        numbers.append(_finite(content.get(name), f"{where}.{name}"))
        if len(numbers[-1]) != len(sequence.completion_ids):
            refuse(f"{where}.{name}", len(numbers[-1]), f"{len(sequence.completion_ids)} tokens need as many numbers")
    weight = number(content.get("weight", 1.0), f"{where}.weight")
    if not 0 <= weight <= _FLOAT32_MAX:
        refuse(f"{where}.weight", weight, "a weight is not negative, and a 32-bit number")
    return ValueTargets(sequence, numbers[0], numbers[1], weight)


def _sequence(content: object, where: str, known: set[str]) -> TokenSequence:
    if not isinstance(content, dict):
        refuse(where, content, f"a mapping with {', '.join(sorted(known))}")
    only_known(content, known, where)
    return TokenSequence(_token_ids(content, "prompt_ids", where), _token_ids(content, "completion_ids", where))


def _token_ids(content: dict[str, Any], name: str, where: str) -> Int32:
    ids = array(content.get(name), np.int32, f"{where}.{name}")
    if len(ids) == 0:
        refuse(f"{where}.{name}", "[]", "a prompt and a completion have at least one token each")
    return ids


def _finite(value: object, where: str) -> Float32:
    numbers = array(value, np.float32, where)
    if not np.isfinite(numbers).all():
        refuse(where, "NaN or infinity", "finite numbers")
    return numbers


def _list(content: dict[str, Any], name: str) -> list[Any]:
    items = content.get(name)
    if not isinstance(items, list):
        refuse(name, items, f"{name} is a list")
    return items


def _run_id(content: dict[str, Any]) -> str:
    return text(content, "run_id", "body", limit=128, empty=False)


def _sequence_dict(sequence: TokenSequence) -> dict[str, Any]:
    return {name: raw(np.asarray(getattr(sequence, name), np.int32)) for name in sorted(_SEQUENCE)}


def _floats(values: Sequence[float] | Float32) -> bytes:
    return raw(np.asarray(values, np.float32))
