"""Runs whose sampler truncates, waits or stops early: the trainer scores the distribution the
engine sampled from."""

from collections.abc import Callable
from typing import Any

import pytest

from common.settings.config import Config
from common.wire.schemas import Group
from tests.support.runs.in_process import metrics, quiet, stored
from trainer import train_in_process
from trainer.observe.run_dir import read_lines
from trainer.policy.scorer import load_tokenizer

pytestmark = pytest.mark.integration
Run = tuple[Config, list[dict[str, Any]], list[Group]]


@pytest.fixture
def run(settings: Callable[..., Config]) -> Callable[..., Run]:
    """Returns a function that runs two steps and returns configuration, metrics and groups."""

    def make(**more: Any) -> Run:
        words = [
            word
            for name, value in more.items()
            for word in (f"--{name.replace('__', '.')}", str(value))
        ]
        config = settings("--trainer.max_steps", "2", *words)
        train_in_process(config, quiet())
        return config, metrics(config), stored(config)

    return make


def test_truncated_sampling_is_replayed(run: Callable[..., Run]) -> None:
    """With a reference model, two updates per batch and an entropy bonus, which all use only the
    tokens kept."""
    update = {
        "algorithm__kl_coef": 0.01,
        "algorithm__mini_batches": 2,
        "algorithm__entropy_coef": 0.01,
    }
    sampling = {
        "sampling__top_p": 0.8,
        "sampling__min_p": 0.01,
        "sampling__temperature": 1.3,
        "sampling__prefill": "It is ",
    }
    _, lines, groups = run(**update, **sampling)
    for line in lines:
        assert line["update"]["delta_logprob"] < 1e-5
        assert line["update"]["entropy"] > 0
    completions = [completion for group in groups for completion in group.completions]
    counts = [count for completion in completions for count in completion.kept_counts.tolist()]
    assert 1 == min(counts) < max(counts) < 420
    assert all(
        logprob == 0
        for c in completions
        for logprob, kept in zip(c.logprobs, c.kept_counts, strict=True)
        if kept == 1
    )
    assert all(completion.text.startswith("It is ") for completion in completions)


def test_a_shortest_length_is_replayed_and_stop_texts_end_answers(run: Callable[..., Run]) -> None:
    ends = {
        "sampling__min_new_tokens": 12,
        "sampling__stop": '["####"]',
        "data__prompt_template": "Q: {question}\nA:",
    }
    config, lines, groups = run(**ends)
    assert all(line["update"]["delta_logprob"] < 1e-5 for line in lines)
    completions = [completion for group in groups for completion in group.completions]
    tokenizer = load_tokenizer(config.model)
    stopped = ["####" in tokenizer.decode(completion.token_ids) for completion in completions]
    assert any(stopped)
    for completion, early in zip(completions, stopped, strict=True):
        assert "####" not in completion.text
        assert early or len(completion.token_ids) >= 12
    assert {group.min_new_tokens for group in groups} == {12}
    assert tokenizer.decode(groups[0].prompt_token_ids) == f"Q: {groups[0].prompt}\nA:"


def test_an_evaluation_samples_as_it_is_told(run: Callable[..., Run]) -> None:
    own = {
        "evaluation__temperature": 0.8,
        "evaluation__n": 3,
        "evaluation__top_p": 0.9,
        "evaluation__max_new_tokens": 10,
    }
    config, lines, groups = run(**own, evaluation__samples=6)
    assert config.trainer.run_dir is not None
    evaluations = read_lines(config.trainer.run_dir / "evaluations.jsonl")
    assert [line["n"] for line in evaluations] == [3, 3]
    assert all(
        abs(line["accuracy"] * 18 - round(line["accuracy"] * 18)) < 1e-6 for line in evaluations
    )
    assert evaluations[0]["pass_at_k"] is not None
    assert all(line["update"]["delta_logprob"] < 1e-5 for line in lines)
    assert not any(
        len(completion.kept_counts) for group in groups for completion in group.completions
    )


def test_graders_get_the_mark_with_which_the_template_opens_a_thought(
    run: Callable[..., Run],
) -> None:
    template = (
        "{% for m in messages %}{{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}<think>\n{% endif %}"
    )
    _, _, groups = run(
        model__chat_template=template,
        reward__functions='[{"name": "format", "required": ["<think>"]}]',
        reward__require_stop=False,  # few of its answers stop
    )
    completions = [completion for group in groups for completion in group.completions]
    assert completions
    for completion in completions:
        assert completion.text.startswith("<think>\n")
        assert completion.reward == 1.0
