"""The parts of `make demo-agent` in one process: warm start, calculator behind the gateway,
training, report."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from transformers import AutoTokenizer
from transformers.utils import get_json_schema

from common.settings.config import Config, load
from examples.tool_calculator import report
from examples.tool_calculator.base import Problem, build, conversations, problems
from examples.tool_calculator.calculator import Calculator
from services.environment.messages import parse_messages
from services.environment.template import Template
from tests.support.environments.own_environments import RewardsAtRandom
from tests.support.paths import ROOT
from tests.support.runs.in_process import stored
from trainer.observe.run_dir import read_lines
from trainer.start.in_process import train_in_process

pytestmark = pytest.mark.integration
QUIET = Console(quiet=True)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that knows the form of a call and little more."""
    directory = tmp_path_factory.mktemp("agent")
    build(directory, console=QUIET, steps=80, batch=8)
    return directory


def settings(directory: Path, run: Path, **more: Any) -> Config:
    change: dict[str, Any] = {
        "model.name": directory / "base",
        "data.source": directory / "problems",
        "trainer.run_dir": run,
        "state_dir": run.with_name("state"),
    }
    arguments = [f"--{name}={value}" for name, value in (change | more).items()]
    return load(["--config", str(ROOT / "examples/tool_calculator/grpo.yaml"), *arguments], {})


def test_the_conversations_of_the_warm_start_have_the_tokens_of_the_gateway(made: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(made / "base")
    template, tools = (
        Template(tokenizer, [tokenizer.eos_token_id]),
        [get_json_schema(Calculator().multiply)],
    )
    problem = Problem(4739, 8526)
    tokens, labels = conversations(problem, tokenizer).called
    question = parse_messages([{"role": "user", "content": "4739 * 8526 = ?"}])
    prompt = template.prompt(question, tools)
    end = tokens.index(tokenizer.eos_token_id, len(prompt)) + 1
    answer, problem_of_call = template.parse(template.decode(tokens[len(prompt) : end]), tools)
    assert not problem_of_call
    assert [call["function"] for call in answer.tool_calls] == [
        {"name": "multiply", "arguments": {"a": 4739, "b": 8526}}
    ]
    result = parse_messages(
        [
            {
                "role": "tool",
                "content": "40404714",
                "tool_call_id": answer.tool_calls[0]["id"],
                "name": "multiply",
            }
        ]
    )
    sampled = np.array(tokens[len(prompt) : end], np.int32)
    between = template.continuation(answer, result, tools, sampled=sampled)
    assert between is not None
    assert tokens[: len(prompt)] == prompt
    assert tokens[end : end + len(between)] == between
    assert template.decode(tokens[end + len(between) :]) == "#### 40404714"
    learned = [label != -100 for label in labels]
    assert learned == [False] * len(prompt) + [True] * (end - len(prompt)) + [False] * len(
        between
    ) + [True] * (len(tokens) - end - len(between))


def test_no_problem_is_held_out_and_trained_on(made: Path) -> None:
    parts = {path.stem: path.read_text().splitlines() for path in (made / "problems").iterdir()}
    assert {name: len(lines) for name, lines in parts.items()} == {"train": 2048, "test": 256}
    found = problems(0, 128 + 2048 + 256)
    assert len({*found}) == len(found)
    assert [json.loads(line)["question"] for line in parts["train"]] == [
        each.question for each in found[128:-256]
    ]


@pytest.mark.parametrize(
    ("answer", "reward"),
    [("#### 42", 1), ("#### 6 * 7", 0), ("42", 0), ("#### 42 ", 0), ("#### 042", 0), ("", 0)],
)
def test_only_the_number_itself_is_rewarded(answer: str, reward: float) -> None:
    environment = Calculator()
    environment.reset("42")
    assert environment.get_reward() == 0
    environment.step([{"role": "assistant", "content": answer}])
    assert environment.get_reward() == reward


def test_episodes_with_the_calculator_train_on_the_tokens_that_were_sampled(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change: dict[str, Any] = {
        "sampling.group_size": 4,
        "trainer.batch_size": 4,
        "trainer.max_steps": 2,
        "evaluation.samples": 8,
    }
    change["environment.name"] = f"python:{RewardsAtRandom.__module__}:{RewardsAtRandom.__name__}"
    config = settings(made, tmp_path / "run", **change)
    train_in_process(config, QUIET)
    steps = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert [step["dropped"] for step in steps] == [{}, {}]
    assert all(step["update"]["trained_tokens"] > 0 for step in steps)
    assert max(step["update"]["delta_logprob_current"] for step in steps) < 1e-6
    completions = [completion for group in stored(config) for completion in group.completions]
    result = AutoTokenizer.from_pretrained(made / "base").convert_tokens_to_ids("<tool_response>")
    context = [
        completion.token_ids[completion.mask == 0]
        for completion in completions
        if completion.mask is not None
    ]
    assert any(result in tokens for tokens in context), "what the tool said is context"
    alone = {"accuracy": 0.0, "compare": {"accuracy": 0.0}}
    (tmp_path / "alone.json").write_text(json.dumps(alone))
    report.main(tmp_path)
    shown = capsys.readouterr().out
    assert "with the tool" in shown
    assert "mean |Δ log-probability|" in shown


@pytest.mark.slow
def test_the_model_learns_to_use_the_tool(tmp_path: Path) -> None:
    build(tmp_path, console=QUIET)
    train_in_process(settings(tmp_path, tmp_path / "run"), QUIET)
    before, *_, after = read_lines(tmp_path / "run" / "evaluations.jsonl")
    error = (before["standard_error"] ** 2 + after["standard_error"] ** 2) ** 0.5
    assert after["accuracy"] - before["accuracy"] > 4 * error
    assert (
        max(
            step["update"]["delta_logprob_current"]
            for step in read_lines(tmp_path / "run" / "metrics.jsonl")
        )
        < 1e-6
    )
