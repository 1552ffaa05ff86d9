"""The notebook runs from the first cell to the last and shows tables."""

import ast
import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.paths import ROOT

NOTEBOOK = ROOT / "examples" / "notebook" / "tiny_task.ipynb"


def shown(source: str, names: dict[str, Any]) -> Any:
    """Runs a cell like Jupyter and returns the value of its last expression."""
    body = ast.parse(source).body
    last = body.pop() if isinstance(body[-1], ast.Expr) else None
    exec(compile(ast.Module(body, []), str(NOTEBOOK), "exec"), names)  # noqa: S102
    return (
        eval(compile(ast.Expression(last.value), str(NOTEBOOK), "eval"), names)  # noqa: S307
        if isinstance(last, ast.Expr)
        else None
    )


@pytest.mark.integration
def test_every_cell_runs(base_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("NOTEBOOK_OUTPUT", str(tmp_path / "run"))
    monkeypatch.setenv("NOTEBOOK_STEPS", "2")
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    names: dict[str, Any] = {"__name__": "__main__"}
    values = [
        shown("".join(cell["source"]), names) for cell in cells if cell["cell_type"] == "code"
    ]
    tables = [value for value in values if hasattr(value, "_repr_html_")]
    assert len(tables) == 3
    assert list(tables[2]["step"]) == [1] * 4 + [2] * 4
    assert names["result"].global_step == 2
    assert "shows its working" in names["result"].history[0]["logged"]


def test_the_notebook_is_saved_with_its_outputs() -> None:
    cells = [
        cell
        for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
        if cell["cell_type"] == "code"
    ]
    kinds = {
        kind for cell in cells for output in cell["outputs"] for kind in output.get("data", {})
    }
    assert "text/html" in kinds
    assert not [
        output for cell in cells for output in cell["outputs"] if output["output_type"] == "error"
    ]
    assert NOTEBOOK.stat().st_size < 400_000
