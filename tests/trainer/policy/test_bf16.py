"""How far an engine and a trainer in bfloat16 are apart before any update, and what clipping makes
of the difference.

`docs/explanation/off-policy.md` states these bounds.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from common.wire.schemas import Int32
from learning.layout import Packed
from services.engine.engine import Engine
from services.engine.jobs import GenerationJob, SamplingParams, Sequence
from services.engine.model import Model
from trainer.policy.scorer import Scorer

QUESTION = "Dan has {} apples, buys {} more and finds {} more. How many apples now?"
PER_PROMPT, LIMIT_S = 8, 400


class Lowered:
    """Loads models in bfloat16, as FSDP2 and engines compute; rotary frequencies are buffers and
    stay float32."""

    @staticmethod
    def from_pretrained(path: Path, **options: Any) -> Any:
        options |= {
            "attn_implementation": options.get("attn_implementation", "eager"),
            "dtype": torch.float32,
        }
        found = AutoModelForCausalLM.from_pretrained(path, **options)
        model = found[0] if options.get("output_loading_info") else found
        for parameter in model.parameters():
            parameter.data = parameter.data.bfloat16()
        return found


@pytest.fixture(scope="module")
def engine(base_model: Path) -> Iterator[Engine]:
    with pytest.MonkeyPatch.context() as patch:
        # On a CPU it would compute in float32.
        patch.setattr("services.engine.model.AutoModelForCausalLM", Lowered)
        made = Engine(
            Model(base_model, 256), max_running=64, max_waiting=1000, weight_version="0", seed=0
        )
    made.start()
    yield made
    made.stop()


@dataclass(frozen=True)
class Scored:
    """Log-probabilities [L] per completion: the engine's, and the trainer's for all at once and
    group by group."""

    engine: list[torch.Tensor]
    trainer: list[torch.Tensor]
    by_group: list[torch.Tensor]

    @staticmethod
    def apart(one: list[torch.Tensor], other: list[torch.Tensor]) -> list[torch.Tensor]:
        return [a - b for a, b in zip(one, other, strict=True)]


@pytest.fixture(scope="module")
def scored(engine: Engine, base_model: Path) -> Scored:
    tokenizer = engine.model.tokenizer
    numbers = np.random.default_rng(0).integers(2, 10, (24, 3)).tolist()
    chats = [[{"role": "user", "content": QUESTION.format(*three)}] for three in numbers]
    prompts = [
        tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        for chat in chats
    ]
    options = SamplingParams(max_new_tokens=48, stop_token_ids=engine.model.eos_ids)
    jobs = [
        GenerationJob(f"job-{i}", prompt, options, PER_PROMPT) for i, prompt in enumerate(prompts)
    ]
    engine.submit(jobs)
    groups = [(np.array(job.prompt, np.int32), job.done.result(LIMIT_S)) for job in jobs]
    scorer = Scorer(Lowered.from_pretrained(base_model, attn_implementation="sdpa"), "on")

    def score(some: list[tuple[Int32, list[Sequence]]]) -> list[torch.Tensor]:
        rows = [
            (prompt, np.array(answer.tokens, np.int32))
            for prompt, answers in some
            for answer in answers
        ]
        completions = [completion for _, completion in rows]
        targets = torch.from_numpy(np.concatenate(completions)).long()
        with torch.no_grad():
            found = scorer(
                Packed.of([prompt for prompt, _ in rows], completions), targets, 1.0
            ).logprobs
        return list(found.split([len(completion) for completion in completions]))

    sampled = [torch.tensor(answer.logprobs) for _, answers in groups for answer in answers]
    return Scored(sampled, score(groups), [row for group in groups for row in score([group])])


def outside_gspo(differences: list[torch.Tensor]) -> float:
    """Returns the share of completions whose ratio is outside GSPO's range."""
    ratio = torch.stack([difference.mean().exp() for difference in differences])
    return float(((ratio < 1 - 3e-4) | (ratio > 1 + 4e-4)).float().mean())


def test_log_probabilities_of_the_same_weights_are_close(scored: Scored) -> None:
    apart = torch.cat(scored.apart(scored.trainer, scored.engine))
    assert len(scored.engine) == 24 * PER_PROMPT
    assert 0 < apart.abs().mean() < 0.005
    assert apart.abs().max() < 0.3
    assert (apart.exp() - 1 - apart).mean() < 2e-4, "KL(engine | trainer)"


def test_rounding_hardly_affects_clipping_by_token(scored: Scored) -> None:
    ratio = torch.cat(scored.apart(scored.trainer, scored.engine)).exp()
    assert ((ratio - 1).abs() > 0.2).float().mean() < 0.005


def test_clipping_by_completion_needs_the_trainers_own_log_probabilities(scored: Scored) -> None:
    """GSPO's narrow range contains the trainer's ratios, whatever the micro-batches, but excludes
    most of the engine's.

    Over six seeds of prompts and samples, 65 to 76 % of the engine's were outside, and none of the
    trainer's.
    """
    assert outside_gspo(scored.apart(scored.trainer, scored.by_group)) < 0.01
    assert outside_gspo(scored.apart(scored.trainer, scored.engine)) > 0.01
