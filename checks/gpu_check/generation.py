"""Compares the embedded engine with transformers' `generate`, and its logprobs with the
trainer's.
"""

import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from checks.gpu_check.harness import Findings
from checks.gpu_check.setting import Setting, claim_agreement, seconds
from common.wire.schemas import Int32
from learning.layout import moved
from services.engine.engine import Engine
from services.engine.jobs import GenerationJob, SamplingParams, Sequence
from services.engine.model import Model
from trainer.policy.scorer import Scorer

_FASTER = 1.2
"""The ratio that `benchmarks.engine` claims on a CPU."""
_WAIT_S = 120


def speed(found: Findings, setting: Setting) -> None:
    """Generates 32 prompts × 8 completions at once, ended only by length; the second of two rounds
    counts.
    """
    rng = np.random.default_rng(0)
    directory = setting.model("small" if setting.small else "0.5b")
    count, samples, length, new = (4, 2, 12, 8) if setting.small else (32, 8, 64, 128)
    model = Model(directory, length + new, setting.device, dtype="bfloat16")
    engine = Engine(model, max_running=count * samples)
    prompts = rng.integers(10, model.vocab_size, (count, length)).tolist()
    engine.start()
    try:
        _round(engine, prompts, samples, new)
        ours, answers = _round(engine, prompts, samples, new)
    finally:
        engine.stop()
    theirs = _generate(setting, directory, prompts, samples, new)
    total = count * samples * new
    found.figures = {"engine": total / ours, "generate": total / theirs}
    text = f"the embedded engine beside `generate`, {count} × {samples} completions of {new} tokens"
    measured = f"{total / ours:,.0f} and {total / theirs:,.0f} tokens/s, ratio {theirs / ours:.2f}"
    found.claim(
        text, f"ratio ≥ {_FASTER}", measured, None if setting.small else theirs / ours >= _FASTER
    )
    completions = [[np.array(answer.tokens, np.int32) for answer in group] for group in answers]
    apart = (scored(setting, model.path, prompts, completions) - _logprobs(answers)).abs()
    claim_agreement(found, "the engine's log-probabilities beside the trainer's", apart)


def _round(
    engine: Engine, prompts: list[list[int]], samples: int, new: int
) -> tuple[float, list[list[Sequence]]]:
    """Returns the seconds of a round, and the answers to every prompt."""
    jobs = [
        GenerationJob(str(i), prompt, SamplingParams(max_new_tokens=new, sampling_seed=i), samples)
        for i, prompt in enumerate(prompts)
    ]
    start = time.perf_counter()
    engine.submit(jobs)
    answers = [job.done.result(_WAIT_S) for job in jobs]
    took = time.perf_counter() - start
    assert all(len(answer.tokens) == new for group in answers for answer in group)
    return took, answers


def _generate(
    setting: Setting, directory: Any, prompts: list[list[int]], samples: int, new: int
) -> float:
    """Returns the seconds of the second `generate` on the same rows."""
    kind = torch.bfloat16 if setting.on_gpu else torch.float32
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=kind).eval().to(setting.device)
    model.generation_config.eos_token_id = None  # ignored on both sides
    rows = torch.tensor(
        [prompt for prompt in prompts for _ in range(samples)], device=setting.device
    )
    options = {
        "do_sample": True,
        "temperature": 1.0,
        "top_k": 0,
        "max_new_tokens": new,
        "pad_token_id": 0,
    }

    def generate() -> None:
        with torch.inference_mode():
            output = model.generate(rows, attention_mask=torch.ones_like(rows), **options)
        assert output.shape[1] == rows.shape[1] + new

    return seconds(generate, setting, 1)


def scored(
    setting: Setting, path: Path, prompts: list[list[int]], completions: list[list[Int32]]
) -> torch.Tensor:
    """Returns the trainer's logprobs of the completions' tokens, with the engine's weights and
    precision.
    """
    kind = torch.bfloat16 if setting.on_gpu else torch.float32
    scorer = Scorer(
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).to(setting.device).train(),
        "on",
    )
    found = []
    for prompt, group in zip(prompts, completions, strict=True):
        layout = moved(
            scorer.layout.of([np.array(prompt, np.int32)] * len(group), group), setting.device
        )
        targets = torch.from_numpy(np.concatenate(group).astype(np.int64)).to(setting.device)
        with torch.no_grad(), torch.autocast(setting.device.type, kind, enabled=setting.on_gpu):
            found.append(scorer(layout, targets, 1.0).logprobs.float().cpu())
    return torch.cat(found)


def _logprobs(answers: list[list[Sequence]]) -> torch.Tensor:
    return torch.tensor(
        [value for group in answers for answer in group for value in answer.logprobs]
    )
