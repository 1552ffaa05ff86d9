"""The commands, and the code in the documentation, as a user runs them: processes, files, exit
statuses, Ctrl-C."""

import ast
import itertools
import json
import os
import pty
import shlex
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from common.errors import ConfigError, ServiceError
from services.data.tiny import Split, problems
from tests.support.errors import raises
from tests.support.paths import ROOT
from tests.support.processes.forks import Forked
from tests.support.processes.hub import data_set, hub
from tests.support.processes.waits import until
from trainer.api.settings import TrainerConfig
from trainer.cli import evaluate_model, train_math
from trainer.cli.commands import setting

pytestmark = pytest.mark.integration

EXAMPLE = """
from trainer import TrainerConfig, OnlineRLTrainer, MathRewardFunction, GSM8KLoader
train_data = GSM8KLoader().load("train", num_samples=100)
config = TrainerConfig(trainer_type="grpo", model_name_or_path="Qwen/Qwen2.5-0.5B-Instruct", num_generations=4, learning_rate=5e-6)
trainer = OnlineRLTrainer(config, MathRewardFunction(), train_data)
trainer.train(); trainer.save_model("./outputs/my_model")

from trainer import ModelEvaluator
results = ModelEvaluator("./outputs/my_model").evaluate(GSM8KLoader().load("test", num_samples=50), MathRewardFunction())
print(f"Accuracy: {results['accuracy']:.2%}")
"""
QUICK = (
    "--dataset",
    "tiny",
    "--per-device-train-batch-size",
    "8",
    "--max-new-tokens",
    "24",
    "--eval-samples",
    "4",
)


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **more}


def command(*words: str, cwd: Path = ROOT) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", *words], cwd=cwd, env=environment(), capture_output=True, text=True
    )


@pytest.mark.slow
def test_the_example_of_the_documentation_runs_as_it_is(base_model: Path, tmp_path: Path) -> None:
    """Only the model is smaller; the library's own code loads GSM8K from a hub on this machine."""

    def rows(split: Split, count: int) -> list[dict[str, Any]]:
        return [
            {"question": p.question, "answer": p.solution}
            for p in itertools.islice(problems(split), count)
        ]

    code = EXAMPLE.replace("Qwen/Qwen2.5-0.5B-Instruct", str(base_model.resolve()))
    assert code != EXAMPLE
    with hub({"openai/gsm8k": data_set("main", rows("train", 150), rows("test", 60))}) as address:
        words = environment(HF_ENDPOINT=address, HF_HOME=str(tmp_path / "hf"))
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", code],
            cwd=tmp_path,
            env=words,
            capture_output=True,
            text=True,
        )
    assert done.returncode == 0, done.stderr
    accuracy = float(done.stdout.rpartition("Accuracy: ")[2].strip().removesuffix("%"))
    assert 0 < accuracy < 100
    assert "step   12/12" in done.stdout  # 100 problems, 8 per step
    assert (tmp_path / "outputs" / "my_model" / "config.json").exists()


def test_the_example_is_the_one_of_the_documentation() -> None:
    page = (ROOT / "docs" / "how-to" / "python-api.md").read_text()
    block = page.partition("```python\n")[2].partition("```")[0]
    assert ast.dump(ast.parse(block)) == ast.dump(ast.parse(EXAMPLE))


def test_training_and_evaluation_on_the_built_in_task(
    base_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fourteen steps are enough to learn to show the working; the comparison says so and names
    changed problems."""
    out, report = tmp_path / "run", tmp_path / "r.json"
    train_math.main(
        [
            *(
                "--model",
                str(base_model),
                "--dataset",
                "tiny",
                "--num-samples",
                "256",
                "--num-train-epochs",
                "3",
            ),
            *("--max-steps", "14", "--num-generations", "8", "--per-device-train-batch-size", "64"),
            *(
                "--max-new-tokens",
                "24",
                "--learning-rate",
                "5e-4",
                "--eval-samples",
                "50",
                "--output-dir",
                str(out),
            ),
        ]
    )
    said = capsys.readouterr().out
    assert "step   14/14" in said
    assert f"model:      {out}/final" in said
    evaluate_model.main(
        [
            *(
                "--model",
                str(out / "final"),
                "--compare",
                str(base_model),
                "--dataset",
                "tiny",
                "--num-samples",
                "100",
            ),
            *("--max-new-tokens", "24", "--k", "4", "--output-file", str(report)),
        ]
    )
    said = capsys.readouterr().out
    for word in (
        "pass@4",
        "avg@4",
        "maj@4",
        "more than chance",
        "right by the first only:",
        "95 % interval",
        "tokens",
    ):
        assert word in said
    found = json.loads(report.read_text())
    assert found["num_samples"] == found["compare"]["num_samples"] == 100
    assert found["comparison"]["low"] > 0.1
    assert found["comparison"]["difference"] == pytest.approx(
        found["accuracy"] - found["compare"]["accuracy"]
    )
    gained = found["comparison"]["gained"][0]
    assert found["correct"][gained]
    assert not found["compare"]["correct"][gained]
    assert found["prompts"][gained] in said


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["rloo", "ppo"])
def test_other_trainers_and_settings(base_model: Path, tmp_path: Path, kind: str) -> None:
    train_math.main(
        [
            *(
                "--kl-coef",
                "0.05",
                "--model",
                str(base_model),
                "--trainer",
                kind,
                *QUICK,
                "--max-steps",
                "1",
            ),
            *(
                "--output-dir",
                str(tmp_path / "run"),
                "--save-to",
                str(tmp_path / "saved"),
                "--quiet",
            ),
            *("--set", "algorithm.entropy_coef=0.01", "--set", "data.curriculum=difficulty"),
        ]
    )
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["algorithm"]["name"] == kind
    assert config["algorithm"]["kl_coef"] == 0.05
    assert config["algorithm"]["entropy_coef"] == 0.01
    assert (tmp_path / "saved" / "model.safetensors").exists()


def test_custom_problems_and_resuming(
    base_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine.jsonl"
    rows = [
        {"question": p.question, "answer": p.answer}
        for p in itertools.islice(problems("train"), 40)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [
        "--model",
        str(base_model),
        "--dataset",
        str(file),
        *QUICK[2:],
        "--output-dir",
        str(tmp_path / "run"),
    ]
    with raises(ConfigError, field="--resume"):  # a mistyped directory begins nothing
        train_math.main([*words, "--max-steps", "1", "--resume"])
    train_math.main([*words, "--max-steps", "1", "--resume", "auto"])
    with raises(ConfigError, field="--output-dir"):
        train_math.main([*words, "--max-steps", "2"])
    capsys.readouterr()
    # One command serves the first start and every later one.
    for steps, resume in (("2", ["--resume"]), ("3", ["--resume", "auto"])):
        train_math.main([*words, "--max-steps", steps, *resume])
        said = capsys.readouterr().out
        assert f"step    {steps}/{steps}" in said
        assert f"step    1/{steps}" not in said


def test_a_data_set_smaller_than_asked_for(base_model: Path, tmp_path: Path) -> None:
    file = tmp_path / "few.jsonl"
    file.write_text('{"question": "1+1?", "answer": 2}\n{"question": "1+2?", "answer": 3}\n')
    evaluate_model.main(
        [
            "--model",
            str(base_model),
            "--dataset",
            str(file),
            "--split",
            "all",
            "--max-new-tokens",
            "8",
        ]
    )
    with raises(ConfigError, field="--num-samples", value="3"):
        evaluate_model.main(
            [
                "--model",
                str(base_model),
                "--dataset",
                str(file),
                "--split",
                "all",
                "--num-samples",
                "3",
            ]
        )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("trainer.train_math", "--model", "x", "--trainer", "dpo"),
            "error: there is no such choice",
        ),
        (
            ("trainer.train_math", "--num-generations", "1"),
            "error: algorithm.advantage",
        ),
        (("trainer.train_math", "--set", "seed"), "error: 'seed' is not NAME=VALUE"),
        (("trainer.train_math", "--dataset", "nothing.jsonl"), "error: "),
        (
            ("trainer.train_math", "--dataset", "tiny", "--set", "data.source=mine.jsonl"),
            "error: --set does not take what has an argument of its own · field: --dataset · "
            "value: mine.jsonl · remedy: use that argument",
        ),
        (
            ("trainer.train_math", "--set", "seed=3"),
            "error: seed is derived from the other fields · field: --seed · value: 3 · "
            "remedy: set seed instead",
        ),
        (
            ("trainer.train_math", "--set", "optimizer.learning_rate=1"),
            "error: optimizer.learning_rate is derived from the other fields · "
            "field: --set optimizer.learning_rate · value: 1 · remedy: set learning_rate instead",
        ),
        (
            ("trainer.train_math", "--set", "checkpoint.resume=/x"),
            "error: checkpoint.resume is derived from the other fields · "
            "field: --set checkpoint.resume · value: /x · remedy: leave it out",
        ),
        (
            ("trainer.train_math", "--model", ""),
            "error: invalid value, expected at least 1 character · field: --model · value:  · "
            "remedy: give a value that has at least 1 character",
        ),
        (
            ("trainer.train_math", "--save-steps", "-1"),
            "error: no interval · field: --save-steps · value: -1 · remedy: give a whole number",
        ),
        (("trainer.train_math", "--resume"), "error: --resume needs the directory of the run"),
        pytest.param(
            ("trainer.train_math", "--use-gpu", "--model", ".cache/tiny-base", *QUICK),
            "error: torch finds no GPU",
            marks=pytest.mark.slow,  # imports torch
        ),
        (
            ("trainer.evaluate_model", "--model", "nothing/here", "--dataset", "tiny"),
            "error: there is no such directory here",
        ),
        (("trainer.evaluate_model",), "error: this argument is required · field: --model"),
        (
            ("trainer.evaluate_model", "--model", "x", "--output-file", "/no/r.json"),
            "error: there is no such directory",
        ),
    ],
)
def test_an_error_is_one_line_and_status_2(words: tuple[str, ...], message: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *words],
        cwd=ROOT,
        env=environment(HF_HUB_OFFLINE="1", CUDA_VISIBLE_DEVICES=""),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert done.stderr.startswith(message)
    assert "remedy: " in done.stderr
    assert "Traceback" not in done.stderr


def test_help_and_a_certificate_do_not_wait_for_torch() -> None:
    for name, word in (("train_math", "train"), ("evaluate_model", "eval")):
        done = command(f"trainer.{name}", "--help")
        assert done.returncode == 0
        assert "examples:" in done.stdout
        assert f"rlhf {word} --model" in done.stdout
    programs = "trainer, trainer.train_math, trainer.evaluate_model, trainer.audit.certify"
    code = f"import sys, {programs}; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False"


def test_ctrl_c_ends_training_with_130_and_says_how_to_go_on(
    base_model: Path, tmp_path: Path
) -> None:
    words = [
        "--model",
        str(base_model),
        *QUICK,
        "--save-steps",
        "1",
        "--output-dir",
        str(tmp_path / "run"),
    ]
    log = tmp_path / "log"
    process = Forked("trainer.train_math", *words, log=log)
    until((tmp_path / "run" / "checkpoints" / "step_000001").exists, log, process)
    process.send_signal(signal.SIGINT)
    status, said = process.wait(400), log.read_text()
    assert status == 130, said
    assert "interrupted; the same command with --resume" in said
    assert "Traceback" not in said


@pytest.mark.slow
def test_a_progress_bar_on_a_terminal_and_ctrl_c_ends_an_evaluation_with_130(
    base_model: Path,
) -> None:
    words = [
        "--model",
        str(base_model),
        "--dataset",
        "tiny",
        "--num-samples",
        "1000",
        "--k",
        "64",
        "--max-new-tokens",
        "400",
    ]
    terminal, end = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "trainer.evaluate_model", *words, "--temperature", "5"],
        cwd=ROOT,
        env=environment(TERM="xterm"),
        stdout=subprocess.DEVNULL,
        stderr=end,
    )
    os.close(end)
    said = ""
    with suppress(OSError):  # the other end of the terminal is closed
        while part := os.read(terminal, 4096).decode(errors="replace"):
            seen = "0/1000" in said
            said += part  # the expected text may arrive in two parts
            if not seen and "0/1000" in said:
                process.send_signal(signal.SIGINT)
    os.close(terminal)
    assert process.wait(400) == 130, said
    assert "evaluating" in said
    assert "interrupted; nothing was written" in said
    assert "Traceback" not in said


def test_settings_are_read_as_on_a_command_line() -> None:
    """The setting itself reads numbers."""
    assert setting("algorithm.entropy_coef=1e-3") == ("algorithm.entropy_coef", "1e-3")
    assert setting("optimizer.adam_betas=[0.8, 0.9]") == ("optimizer.adam_betas", [0.8, 0.9])
    assert setting("data.levels=4, 5") == ("data.levels", ["4", "5"])
    assert setting("trainer.max_steps=null") == ("trainer.max_steps", None)
    with raises(ConfigError, field="data.levels", value="[4"):
        setting("data.levels=[4")


def test_a_missing_key_variable_is_named(base_model: Path) -> None:
    with raises(ServiceError, field="--api-key-env", value="NOT_SET_HERE"):
        evaluate_model.main(
            ["--model", "http://127.0.0.1:1", "--dataset", "tiny", "--api-key-env", "NOT_SET_HERE"]
        )


def test_the_command_that_evaluates_reads_the_same_columns() -> None:
    settings = {"data.prompt_field": "the text", "data.levels": ["4", "5"]}
    config = TrainerConfig(model_name_or_path="base", max_new_tokens=24, system_prompt="Be brief.")
    told = train_math.evaluation(config, Path("out/final"), "my data.csv", settings, num_samples=56)
    words = shlex.split(told)[2:]  # after rlhf eval
    arguments = vars(evaluate_model.parser().parse_args(words))
    assert (arguments["dataset"], arguments["compare"]) == ("my data.csv", "base")
    assert arguments["system_prompt"] == "Be brief."
    assert arguments["num_samples"] == 56, "the problems that training answered"
    assert dict(arguments["set"]) == settings
