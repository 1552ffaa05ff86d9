"""Models of many kinds on real SGLang: it holds the weights that were sent, and the learner scores
tokens the same way.

`-s` prints the largest difference of each kind.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file
from transformers import AutoTokenizer

from common.clients.rollout import RolloutClient
from common.wire.schemas import Group
from services.rollout.engine_client import EngineClient
from tests.support.batches.groups import learner_logprobs
from tests.support.engines.engines import sglang_is_installed, sglang_process
from tests.support.models.tiny_models import GEMMA, KINDS, write
from trainer.weights.comparison import Checksums

pytestmark = [
    pytest.mark.integration,
    pytest.mark.slow,
    pytest.mark.skipif(
        not sglang_is_installed(), reason="SGLang is not installed: `make sglang-cpu` does it"
    ),
]
PROMPT = [20, 21]
SHAPES: list[dict[str, Any]] = [{}, {"top_p": 0.8, "top_k": 4096}]


@pytest.mark.parametrize("kind", [*KINDS, GEMMA])
async def test_contract_sglang_holds_the_sent_weights_and_the_learner_scores_alike(
    kind: str, model_dir: Path, tmp_path: Path
) -> None:
    """Covers widths that are not multiples of 32, mixtures and a vision tower, within windows that
    SGLang lacks."""
    directory = write(
        kind, tmp_path / "model", **({"sliding_window": 32} if kind == "Mistral" else {})
    )
    AutoTokenizer.from_pretrained(model_dir).save_pretrained(directory)
    sent, groups = load_file(directory / "model.safetensors"), list[Group]()
    with sglang_process(directory, tmp_path / "log", "7", max_new_tokens=24) as url:
        async with EngineClient("engine", url) as engine, RolloutClient("rollout", url) as client:
            client.repeats_prompt = True  # true for every SGLang
            ranks = await engine.checksums(60)
            for shape in SHAPES:
                found = await client.generate(
                    PROMPT,
                    n=4,
                    max_new_tokens=24,
                    temperature=1,
                    stop_token_ids=[],
                    parameters=shape,
                )
                groups.append(
                    Group(
                        id=str(shape),
                        prompt_id="",
                        prompt="",
                        ground_truth="",
                        prompt_token_ids=np.array(PROMPT, np.int32),
                        completions=found,
                    )
                )
    compared = Checksums(on_gpu=False).compare(sent, ranks)
    assert (compared.problem, compared.compared, compared.unseen) == (None, len(sent), [])
    scored = learner_logprobs(directory, groups, 1.0)
    completions = [completion for group in groups for completion in group.completions]
    largest = max(
        np.abs(own - each.logprobs).max() for own, each in zip(scored, completions, strict=True)
    )
    print(
        f"{kind}: {sum(len(row) for row in scored)} tokens, largest |Δ log-probability| {largest:.1e}"
    )
    assert largest < 1e-5
