"""A model knows which prompts it was trained on, in every form in which it is kept."""

from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from common.errors import ConfigError
from common.prompts.prompter import PromptStyle
from common.settings.config import load
from common.wire.schemas import Prompt
from services.data.sft_examples import load_examples
from tests.support.errors import raises
from tests.support.runs.sft import fine_tune
from trainer import ModelEvaluator, OnlineRLTrainer, TrainerConfig
from trainer.policy.trained_prompts import TRAINED_PROMPTS, TrainedPrompts, style_of
from trainer.sft.settings import SFT_SETTINGS

APPLES = (
    "Maria picks 14 apples on Monday and three times as many on Tuesday. She gives half of all "
    "her apples to her neighbour. How many apples does she have left?"
)


def problem(prompt: str, ground_truth: str = "28") -> Prompt:
    return Prompt(id=prompt[:20], prompt=prompt, ground_truth=ground_truth)


def trained(folder: Path, *prompts: tuple[str, str]) -> TrainedPrompts:
    """Returns fingerprints that were written and read."""
    found = TrainedPrompts.none()
    found.add(prompts)
    (folder / TRAINED_PROMPTS).write_bytes(found.file())
    return TrainedPrompts.of(folder)


def test_the_form_of_a_problem_does_not_count_and_its_ground_truth_does(tmp_path: Path) -> None:
    found = trained(tmp_path, (APPLES, "28"), ("What is 2+3?", ""))
    same = [APPLES.upper(), APPLES.replace(" ", " \n"), APPLES.replace("14", "１４")]
    assert found.contain([problem(each) for each in same]) == [True] * 3
    others = [problem(APPLES, "29"), problem("What is 2+4?"), problem("")]
    assert found.contain(others) == [False] * 3
    assert found.contain([problem("what is 2+3?", "5")]) == [True], (
        "as an example of supervised fine-tuning"
    )
    assert TrainedPrompts.of(tmp_path / "nothing").contain([problem(APPLES)]) == [False]


def test_prompts_of_another_form_are_said(tmp_path: Path) -> None:
    found = TrainedPrompts.none()
    found.style = style_of(PromptStyle(system_prompt="Answer with #### N."))
    (tmp_path / TRAINED_PROMPTS).write_bytes(found.file())
    read = TrainedPrompts.of(tmp_path)
    assert read.other_style(PromptStyle(system_prompt="Answer with #### N.")) == ""
    assert read.other_style(PromptStyle(prefill="So")) == (
        "sampling.system_prompt was 'Answer with #### N.' and is ''; "
        "sampling.prefill was '' and is 'So'"
    )
    assert trained(tmp_path, (APPLES, "28")).other_style(PromptStyle(prefill="So")) == "", (
        "a file of before does not know"
    )


def test_a_prompt_takes_8_bytes(tmp_path: Path) -> None:
    words = [f"{APPLES} {number} {APPLES}" for number in range(1000)]
    twice = [(each, "1") for each in words + words]
    trained(tmp_path, *twice)
    assert (tmp_path / TRAINED_PROMPTS).stat().st_size < 8_000 + 1000


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    (tmp_path / TRAINED_PROMPTS).write_bytes(b"PK\3\4 cut")
    with raises(ConfigError, field="model.name"):
        TrainedPrompts.of(tmp_path)


def rows(numbers: range) -> list[dict[str, str]]:
    return [{"prompt": f"What is {n}+1?", "answer": str(n + 1)} for n in numbers]


@pytest.mark.integration
def test_an_evaluation_says_what_was_trained_on(
    base_model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A merged adapter keeps what it was trained on, and what its base was trained on."""
    words = f"--model.name {base_model} --trainer.run_dir {tmp_path / 'sft'} --data.source tiny"
    few = "--data.num_samples 12 --trainer.batch_size 4 --trainer.max_steps 1"
    off = "--evaluation.samples 0"
    answers = load(f"{words} {few} {off}".split(), {}, subset=SFT_SETTINGS)
    examples = load_examples(answers)
    learned = examples.train
    fine_tuned = fine_tune(answers, examples, Console(quiet=True))

    def right(completions: list[Any], **_: Any) -> list[float]:
        return [float(len(completion) > 3) for completion in completions]

    config = TrainerConfig(
        model_name_or_path=str(fine_tuned),
        output_dir=tmp_path / "run",
        per_device_train_batch_size=8,
        gradient_accumulation_steps=1,
        num_generations=2,
        max_steps=1,
        max_new_tokens=4,
        settings={"lora.rank": 2},
    )
    trainer = OnlineRLTrainer(config, right, rows(range(4)), rows(range(2, 6)))
    result = trainer.train()
    shown = capsys.readouterr().out
    assert "(4 problems, 2 of which were trained on)" in shown
    assert shown.count("warning: 2 of 4 held-out problems were trained on") == 1
    assert [line["trained_on"] for line in result.evaluations] == [0, 2]

    saved = trainer.save_model(tmp_path / "merged")
    assert "4, 2 of which were trained on" in (saved / "README.md").read_text()
    evaluator = ModelEvaluator(saved, max_new_tokens=4, progress=False)
    measured = evaluator.evaluate(rows(range(2, 6)), right)
    assert measured["trained_on"] == [True, True, False, False]
    assert caplog.messages == [f"{saved}: 2 of 4 problems were trained on"]
    caplog.clear()
    other = ModelEvaluator(
        saved, max_new_tokens=4, progress=False, settings={"sampling.prefill": "So"}
    )
    other.evaluate(rows(range(2, 6)), right)
    assert caplog.messages[0] == (
        f"{saved}: trained on prompts of another form: sampling.prefill was '' and is 'So'"
    )
    assert sum(TrainedPrompts.of(saved).contain(learned)) == 4, "the batch of examples"

    resumed = trainer.train()
    assert sum(TrainedPrompts.of(resumed.checkpoint).contain(learned)) == 4
