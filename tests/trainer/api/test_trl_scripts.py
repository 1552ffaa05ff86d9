"""Scripts as users of TRL write them run from their first line to their last, with the import
changed. They run one after the other in one process, which has loaded the libraries once."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.processes.ports import free_port
from tests.support.trl.trl_scripts import RECIPES, ROWS, SCRIPTS

pytestmark = pytest.mark.integration
LONG = {
    "benchmarked",
    "countdown",
    "few_shot",
    "filtered",
    "saved",
    "streamed",
    "summaries",
    "wrapped",
}
"""Scripts that only run with the slow tests."""


@pytest.fixture(scope="module")
def folders(
    base_model: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> dict[str, Path]:
    """Runs the chosen scripts, and returns the folder of each."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    root = tmp_path_factory.mktemp("scripts")
    base = str(base_model.resolve())
    scorer = str(root / "scorer")
    reward_model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1)
    reward_model.config.pad_token_id = 0
    reward_model.save_pretrained(scorer)
    AutoTokenizer.from_pretrained(base).save_pretrained(scorer)

    chosen = [
        str(item.callspec.params["name"])
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.parent is request.node
    ]
    made = {}
    for name in chosen:
        script, words, _ = SCRIPTS[name]
        folder = root / name
        folder.mkdir()
        (folder / "script.py").write_text(script.replace("{rows}", ROWS))
        (folder / "recipe.yaml").write_text(RECIPES.get(name, "").replace("BASE", base))
        given = [word.replace("BASE", base).replace("SCORER", scorer) for word in words]
        (folder / "words.json").write_text(json.dumps(given))
        made[name] = folder

    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "HF_DATASETS_CACHE": str(root / "datasets"),
        "HF_ENDPOINT": f"http://127.0.0.1:{free_port()}",
    }
    runner = [sys.executable, "-m", "tests.support.workers.trl_script_runner"]
    folders = list(map(str, made.values()))
    subprocess.run([*runner, *folders], cwd=ROOT, env=environment, check=True)
    return made


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] if name in LONG else []) for name in SCRIPTS],
)
def test_a_script_of_trl_runs_to_its_end(name: str, folders: dict[str, Path]) -> None:
    failed = folders[name] / "failed"
    output = (folders[name] / "output").read_text()
    assert not failed.exists(), f"{output[-2000:]}\n{failed.read_text()}"
    for said in SCRIPTS[name][2].split("|"):
        assert said in output, output[-2000:]
