"""Versions on disk, against their manifest: random tensors that change, and the deltas between."""

import json
import random
from io import BytesIO
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load
from torch import Tensor

from common.weights.checksums import checksum
from common.weights.deltas import apply_delta
from common.wire.schemas import WeightManifest
from trainer.weights.tensor_file import write_tensors
from trainer.weights.versions import version_name, write_version

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.float16)


def random_tensors(draw: random.Random, count: int) -> dict[str, Tensor]:
    torch.manual_seed(draw.randrange(1 << 30))
    found = {}
    for number in range(count):
        shape = draw.choice([(), (0, 4), (3,), (5, 7), (400, 700)])
        tensor = torch.randint(0, 2, shape) if draw.random() < 0.5 else torch.randn(shape)
        found[f"layer.{draw.randrange(100)}.{number}"] = tensor.to(draw.choice(DTYPES))
    return found


@pytest.mark.parametrize("seed", range(10))
def test_a_file_has_every_tensor_where_a_reader_may_map_it(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    tensors = random_tensors(draw, draw.randint(0, 7))
    stream = BytesIO()
    pieces: list[int] = []
    found = write_tensors(tensors, stream, lambda: pieces.append(stream.tell()))
    content = stream.getvalue()
    path = tmp_path / "file"
    path.write_bytes(content)
    assert found == checksum(path)
    read = load(content)
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(read[name], tensor)
        assert read[name].dtype == tensor.dtype

    length = int.from_bytes(content[:8], "little")
    assert (8 + length) % 8 == 0
    header = json.loads(content[8 : 8 + length])
    assert header.pop("__metadata__") == {"format": "pt"}
    offsets = {name: each["data_offsets"][0] for name, each in header.items()}
    assert all(offsets[name] % tensor.itemsize == 0 for name, tensor in tensors.items())
    assert pieces[-1] == len(content)
    steps = [after - before for before, after in pairwise(pieces)]
    assert all(0 < step <= 1 << 20 for step in steps)


def manifest_of(directory: Path, manifest: WeightManifest) -> None:
    """Checks a version on disk against its manifest."""
    folder = directory / version_name(manifest.version)
    names = {file.name for file in manifest.files}
    names |= {file.delta.name for file in manifest.files if file.delta}
    assert {path.name for path in folder.iterdir()} == names
    for file in manifest.files:
        path = folder / file.name
        assert (path.stat().st_size, checksum(path)) == (file.size, file.xxh3)


@pytest.mark.parametrize("seed", range(10))
def test_a_delta_leads_from_the_version_before_to_the_next_and_only_where_it_is_needed(
    tmp_path: Path, seed: int
) -> None:
    draw = random.Random(seed)
    static = [tmp_path / "config.json", tmp_path / "tokenizer.json"]
    texts = ["{}" * 500, "[]" * 500]
    directory = tmp_path / "weights"
    tensors = random_tensors(draw, 4) | {"large": torch.zeros(1000)}
    previous: WeightManifest | None = None
    for version in range(1, 6):
        changes = draw.choice(["nothing", "a number", "a shape", "a text"])
        if changes == "a number":
            tensors["large"] = tensors["large"].clone()
            tensors["large"][draw.randrange(len(tensors["large"]))] += 1
        if changes == "a shape":
            tensors["large"] = torch.zeros(len(tensors["large"]) + 1)
        if changes == "a text":
            texts[0] = f"{version}{texts[0][1:]}"
        for path, text in zip(static, texts, strict=True):
            path.unlink(missing_ok=True)  # versions of before share it by hard links
            path.write_text(text)
        is_lost = previous is not None and draw.random() < 0.2
        if is_lost and previous is not None:
            (directory / version_name(previous.version) / "config.json").unlink()

        manifest = write_version(
            tensors.items(), static, directory, "run", version, previous=previous
        )
        manifest_of(directory, manifest)
        with (directory / version_name(version) / "model.safetensors").open("rb") as stream:
            read = load(stream.read())
        assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())
        before = {file.name: file for file in previous.files} if previous else {}
        for file in manifest.files:
            old = before.get(file.name)
            has_base = old is not None and old.size == file.size and old.xxh3 != file.xxh3
            if is_lost and file.name == "config.json":
                has_base = False
            assert (file.delta is not None) == has_base, (file.name, changes)
            if file.delta is None or old is None or previous is None:
                continue
            assert file.delta.base == old.xxh3
            folder = directory / version_name(version)
            delta = folder / file.delta.name
            assert (delta.stat().st_size, checksum(delta)) == (file.delta.size, file.delta.xxh3)
            made = tmp_path / "made"
            base = directory / version_name(previous.version) / file.name
            assert apply_delta(base, delta, made) == file.xxh3
            assert made.read_bytes() == (folder / file.name).read_bytes()
            made.unlink()
        previous = manifest


def test_files_are_copied_to_a_disk_without_hard_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Path, target: Path) -> None:
        raise OSError(18, "cross-device link")

    static = tmp_path / "config.json"
    static.write_text("{}")
    monkeypatch.setattr(Path, "hardlink_to", refuse)
    manifest = write_version([], [static], tmp_path / "weights", "run", 1)
    manifest_of(tmp_path / "weights", manifest)
    assert [file.name for file in manifest.files] == ["config.json", "model.safetensors"]
