"""Foreign bytes decode or are refused by name, at once and in little memory. Groups are in
tests/common/wire/test_codec.py."""

import json
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from common.errors import InvalidInput, ServiceError
from common.wire.codec import decode
from common.wire.schemas import (
    Groups,
    SampledGroups,
    TakenGroups,
)
from services.engine.adapters import AdapterRegistry, BadAdapter
from services.engine.weights import BadWeights, load_into
from tests.support.processes.fuzzed_service import SECONDS

pytestmark = pytest.mark.integration

relaxed = settings(
    max_examples=200 * max(1, SECONDS),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def named(error: ServiceError) -> None:
    assert error.field


@pytest.mark.parametrize("kind", [Groups, TakenGroups, SampledGroups])
@pytest.mark.parametrize(
    "body",
    [
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\x7f\xff\xff\xff\xa1a",
        b"\x81\xa6groups\xdd\xff\xff\xff\xf0\x90",
    ],
)
def test_false_length_takes_no_memory(kind: Any, body: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(InvalidInput):
            decode(body, kind)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


def safetensors(header: bytes, data: bytes = b"", length: int | None = None) -> bytes:
    return struct.pack("<Q", len(header) if length is None else length) + header + data


def entry(dtype: str = "F32", shape: Any = (2, 2), offsets: Any = (0, 16)) -> bytes:
    return json.dumps(
        {"weight": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}
    ).encode()


BAD_FILES = [
    b"",
    b"\x00" * 7,
    safetensors(b"", length=2**63),
    safetensors(b"{}", length=2**40),
    safetensors(b"{"),
    safetensors(b"\xff\xfe"),
    safetensors(b"[" * 100_000),
    safetensors(entry(), b"\x00" * 15),
    safetensors(entry(), b"\x00" * 17),
    safetensors(entry(offsets=(16, 0)), b"\x00" * 16),
    safetensors(entry(shape=(2**40, 2**40)), b"\x00" * 16),
    safetensors(entry(shape=(-1, 2)), b"\x00" * 16),
    safetensors(entry("F99"), b"\x00" * 16),
    safetensors(entry(), np.array([1, np.nan, 1, 1], np.float32).tobytes()),
    safetensors(entry("I32"), b"\x00" * 16),
    safetensors(entry("F32", (4,)), b"\x00" * 16),
]


@pytest.mark.parametrize("content", BAD_FILES, ids=lambda content: repr(content[:30]))
def test_safetensors_with_a_bad_header_change_nothing(tmp_path: Path, content: bytes) -> None:
    model = torch.nn.Linear(2, 2, bias=False)
    before = model.weight.detach().clone()
    (tmp_path / "model.safetensors").write_bytes(content)
    if content == BAD_FILES[-2]:
        load_into(model, tmp_path)  # integers are accepted as numbers
        return
    with pytest.raises(BadWeights):
        load_into(model, tmp_path)
    assert torch.equal(model.weight, before)


@relaxed
@given(st.data())
def test_damaged_safetensors_load_or_are_bad_weights(tmp_path: Path, data: st.DataObject) -> None:
    model = torch.nn.Linear(2, 2, bias=False)
    body = bytearray(safetensors(entry(), b"\x00" * 16))
    for _ in range(data.draw(st.integers(1, 3))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    (tmp_path / "model.safetensors").write_bytes(bytes(body))
    try:
        load_into(model, tmp_path)
    except BadWeights as error:
        named(error)
    assert bool(torch.isfinite(model.weight).all())


BAD_INDEXES = [
    b"",
    b"[]",
    b"{}",
    b'{"weight_map": []}',
    b'{"weight_map": {"a": 1}}',
    b'{"weight_map": {"a": "../x"}}',
    b"[" * 100_000,
]


@pytest.mark.parametrize("index", BAD_INDEXES, ids=lambda index: repr(index[:20]))
def test_a_bad_index_is_bad_weights(tmp_path: Path, index: bytes) -> None:
    (tmp_path / "model.safetensors.index.json").write_bytes(index)
    with pytest.raises(BadWeights):
        load_into(torch.nn.Linear(2, 2), tmp_path)


GOOD = {"peft_type": "LORA", "r": 1, "lora_alpha": 2}
A, B = "base_model.model.0.lora_A.weight", "base_model.model.0.lora_B.weight"


@pytest.mark.parametrize(
    ("config", "tensors"),
    [
        (GOOD | {"r": 0}, {}),
        (GOOD | {"r": "1"}, {}),
        (GOOD | {"r": None}, {}),
        ([], {}),
        ("x", {}),
        (GOOD | {"r": 10**400, "lora_alpha": 1.5}, {}),
        (GOOD, {A: torch.zeros(())}),
        (GOOD, {A: torch.zeros(1, 2)}),
        (GOOD, {A: torch.zeros(1, 2), B: torch.zeros(())}),
        (GOOD, {A: torch.zeros(1, 2), B: torch.full((2, 1), torch.nan)}),
        (GOOD | {"peft_type": []}, {A: torch.zeros(1, 2), B: torch.zeros(2, 1)}),
    ],
)
def test_a_bad_adapter_is_named_and_not_known(
    tmp_path: Path, config: Any, tensors: dict[str, torch.Tensor]
) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 4))
    model.get_output_embeddings = lambda: model[1]
    adapters = AdapterRegistry(model)
    with pytest.raises(BadAdapter):
        adapters.load("a", tmp_path)
    assert adapters.paths() == {}


def test_error_about_anything_is_short_and_can_be_sent() -> None:
    error = ServiceError("x" * 100_000, field="\ud800" * 1000, value="\udfff", remedy="\ud800")
    assert len(json.dumps(error.body(), ensure_ascii=False).encode()) < 20_000
