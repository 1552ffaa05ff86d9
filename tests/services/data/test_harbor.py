"""Folders of Harbor tasks as a data set."""

from pathlib import Path

import pytest

from common.errors import ConfigError
from common.settings.sections import DataSection
from services.data.loaders import load_split


def write(folder: Path, instruction: str) -> None:
    folder.mkdir(parents=True)
    (folder / "task.toml").touch()
    (folder / "instruction.md").write_text(instruction)


def test_the_instruction_is_the_prompt(tmp_path: Path) -> None:
    canary = "<!-- a canary GUID 26b5 -->\n# another CANARY\n\n"
    write(tmp_path / "train" / "one", f"{canary}# Repair it.\n\nAll of it.\n")
    write(tmp_path / "train" / "two", "Second.")
    write(tmp_path / "test" / "three", "Third.")
    config = DataSection(source=str(tmp_path))
    prompts = load_split(config, "train", seed=0)
    assert [prompt.id for prompt in prompts] == ["one", "two"]
    assert prompts[0].prompt == "# Repair it.\n\nAll of it."
    assert prompts[0].columns == {"harbor_task": str(tmp_path / "train" / "one")}
    assert [prompt.prompt for prompt in load_split(config, "eval", seed=0)] == ["Third."]


def test_a_folder_without_splits_holds_a_part_out(tmp_path: Path) -> None:
    for number in range(40):
        write(tmp_path / str(number), f"Task {number}.")
    config = DataSection(source=str(tmp_path))
    train = {prompt.id for prompt in load_split(config, "train", seed=0)}
    held_out = {prompt.id for prompt in load_split(config, "eval", seed=0)}
    assert train.isdisjoint(held_out)
    assert len(train | held_out) == 40
    assert 1 <= len(held_out) <= 10


def test_a_task_without_an_instruction_is_named(tmp_path: Path) -> None:
    write(tmp_path / "train" / "one", " \n")
    with pytest.raises(ConfigError, match=r"instruction.md is empty"):
        load_split(DataSection(source=str(tmp_path)), "train", seed=0)
    (tmp_path / "train" / "one" / "instruction.md").unlink()
    with pytest.raises(ConfigError, match=r"instruction.md cannot be read"):
        load_split(DataSection(source=str(tmp_path)), "train", seed=0)
