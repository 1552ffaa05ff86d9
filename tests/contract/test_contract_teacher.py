"""The teacher of distillation behind every engine, asked directly and through the router: it scores as transformers does."""

from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from common.sections import TeacherSection
from tests.support.engines import expected_logprobs
from trainer.rollouts.teacher import Teacher

pytestmark = pytest.mark.process
PROMPT, COMPLETIONS = [20, 21, 22], [[30, 31, 32], [40], [50, 51, 52, 53, 54, 2]]


async def test_contract_a_teacher_is_accepted_and_scores_the_tokens_that_were_sampled(
    target_url: str, model_dir: Path, request: pytest.FixtureRequest
) -> None:
    """SGLang's own transformers reads this made-up tokenizer otherwise than ours, so only tokens are compared with it."""
    async with Teacher(TeacherSection(url=target_url)) as teacher:
        if "sglang" not in request.node.name:
            await teacher.check(AutoTokenizer.from_pretrained(model_dir), 60)
        scores = await teacher.score(PROMPT, [np.array(tokens, np.int32) for tokens in COMPLETIONS])
    for found, tokens in zip(scores, COMPLETIONS, strict=True):
        np.testing.assert_allclose(found, expected_logprobs(model_dir, None, PROMPT, tokens), rtol=0, atol=1e-4)
