"""The sections of `benchmarks.gpu_check`, executed on a CPU with tiny shapes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console

from benchmarks.gpu_check.__main__ import check, parse
from benchmarks.gpu_check.sections import SECTIONS
from common.errors import ConfigError


def lines(directory: Path, *words: str) -> dict[str, dict[str, object]]:
    options = parse(["--out", str(directory), "--device", "cpu", "--small", *words])
    with (directory.parent / "console").open("w") as file:
        held = check(options, Console(file=file))
    found = [json.loads(line) for line in (directory / "gpu-check.jsonl").read_text().splitlines()]
    assert held, (directory / "gpu-check.md").read_text()
    return {line["name"]: line for line in found}


@pytest.mark.slow
@pytest.mark.integration
def test_sections_run_as_processes(tmp_path: Path) -> None:
    found = lines(tmp_path / "out", "--only", "varlen", "resume")
    assert list(found) == ["varlen", "resume"]
    assert all(not line["error"] and line["findings"]["claims"] for line in found.values())  # type: ignore[index]
    assert "200 tensors of weights and optimiser, bit by bit" in (tmp_path / "out" / "gpu-check.md").read_text()


@pytest.mark.integration
@pytest.mark.slow
def test_every_section_runs(tmp_path: Path) -> None:
    found = lines(tmp_path / "out", "--minutes", "60")
    assert list(found) == list(SECTIONS)
    assert all(not line["error"] for line in found.values())


@pytest.mark.integration
@pytest.mark.slow
def test_the_update_alone_needs_no_service() -> None:
    code = "import sys, benchmarks.update; print(*{'fastapi', 'datasets', 'math_verify'}.intersection(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == ""


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_error_names_the_options_for_a_cpu(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="torch finds no GPU") as caught:
        check(parse(["--out", str(tmp_path)]), Console(quiet=True))
    assert "--device cpu --small" in str(caught.value)
