"""Rotary positions that depend on the longest sequence of a batch (LongRoPE, dynamic NTK), as
`config.json` gives them.
"""

from collections.abc import Mapping
from typing import Any

from common import Json


def rotations(parameters: Any) -> list[Json]:
    """Returns the rotary parameters of every kind of layer; `parameters` holds one set, or one for
    each kind.
    """
    sets = [parameters, *parameters.values()] if isinstance(parameters, dict) else []
    return [each for each in sets if isinstance(each, dict) and _kind(each)]


def switch_length(shape: Mapping[str, Any]) -> int | None:
    """Returns the length in tokens above which LongRoPE changes the factors of a whole batch.

    None when the model has no such positions, or its two lists of factors are equal. `shape` is a
    text model's `config.json`.
    """
    original = "original_max_position_embeddings"
    for each in rotations(shape.get("rope_parameters") or shape.get("rope_scaling")):
        same_factors = each.get("short_factor") == each.get("long_factor")
        same_scales = each.get("short_mscale") == each.get("long_mscale")
        if _kind(each) in ("longrope", "su") and not (same_factors and same_scales):
            # The model's own field wins, as in transformers (Phi-3).
            length = shape.get(original) or each.get(original)
            return None if length is None else int(length)
    return None


def is_dynamic(shape: Mapping[str, Any]) -> bool:
    """Returns whether a text model's `config.json` asks for dynamic NTK scaling."""
    return any(
        _kind(each) == "dynamic"
        for each in rotations(shape.get("rope_parameters") or shape.get("rope_scaling"))
    )


def _kind(parameters: Mapping[str, Any]) -> Any:
    return parameters.get("rope_type") or parameters.get("type")
