"""Every engine as a teacher for distillation, called directly and through the router, scores like
transformers."""

from pathlib import Path

import httpx
import numpy as np
import pytest
from rich.console import Console
from transformers import AutoTokenizer

from common.settings.config import load
from common.settings.sections import TeacherSection
from tests.support.engines.engines import expected_logprobs, sglang_is_installed, sglang_process
from tests.support.paths import ROOT
from trainer import train_in_process
from trainer.observe.run_dir import read_lines
from trainer.rollouts.teacher import Teacher

pytestmark = pytest.mark.integration
PROMPT, COMPLETIONS = [20, 21, 22], [[30, 31, 32], [40], [50, 51, 52, 53, 54, 2]]


async def test_contract_a_teacher_is_accepted_and_scores_the_tokens_that_were_sampled(
    target_url: str, model_dir: Path, request: pytest.FixtureRequest
) -> None:
    """SGLang's transformers version reads this artificial tokenizer differently, so only tokens are
    compared there."""
    async with Teacher(TeacherSection(url=target_url)) as teacher:
        if "sglang" not in request.node.name:
            await teacher.check(AutoTokenizer.from_pretrained(model_dir), 60)
        scores = await teacher.score(PROMPT, [np.array(tokens, np.int32) for tokens in COMPLETIONS])
    for found, tokens in zip(scores, COMPLETIONS, strict=True):
        np.testing.assert_allclose(
            found, expected_logprobs(model_dir, None, PROMPT, tokens), rtol=0, atol=1e-4
        )


def test_contract_other_tokens_are_scored_beside_those_of_a_prompt(target_url: str) -> None:
    """What Tinker's samples are made of (`trainer.tinker.sampling`), also behind a router."""
    body = {
        "input_ids": [*PROMPT, 30, 31],
        "sampling_params": {"max_new_tokens": 0},
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": 3,
        "token_ids_logprob": [7, 30],
    }
    answer = httpx.post(f"{target_url}/generate", json=body, timeout=60).json()
    meta = (answer[0] if isinstance(answer, list) else answer)["meta_info"]
    own, likeliest, chosen = (
        meta[f"input_{name}"] for name in ("token_logprobs", "top_logprobs", "token_ids_logprobs")
    )
    assert len(own) == len(likeliest) == len(chosen) == 5
    assert not likeliest[0]
    assert not chosen[0]
    for (logprob, *_), best, named in zip(own[1:], likeliest[1:], chosen[1:], strict=True):
        numbers = [each for each, *_ in best]
        assert numbers == sorted(numbers, reverse=True)
        assert numbers[0] >= logprob - 1e-5
        assert [token for _, token, *_ in named] == [7, 30]
    # The token after the prompt is 30.
    assert chosen[3][1][0] == pytest.approx(own[3][0], abs=1e-4)


@pytest.mark.slow
@pytest.mark.skipif(
    not sglang_is_installed(), reason="SGLang is not installed: `make sglang-cpu` does it"
)
def test_contract_a_run_takes_sglang_as_its_teacher(base_model: Path, tmp_path: Path) -> None:
    """The teacher is the student itself, so that both give every sampled token the same
    probability."""
    place = tmp_path / "run"
    words = [
        *(
            "--config",
            str(ROOT / "jobgroup/configs/tiny-cpu.yaml"),
            "--model.name",
            str(base_model),
        ),
        *(
            "--trainer.run_dir",
            str(place),
            "--state_dir",
            str(place / "state"),
            "--algorithm.name",
            "opd",
        ),
        *("--trainer.batch_size", "4", "--trainer.max_steps", "1", "--sampling.group_size", "4"),
        *("--evaluation.samples", "0", "--optimizer.warmup_steps", "0", "--reward.workers", "1"),
    ]
    with sglang_process(base_model, tmp_path / "sglang.log", "0") as url:
        train_in_process(load([*words, "--teacher.url", url], {}), Console(quiet=True))
    (line,) = read_lines(place / "metrics.jsonl")
    assert line["dropped"] == {}
    assert abs(line["update"]["teacher_kl"]) < 1e-4
    assert line["update"]["grad_norm"] < 1e-2
