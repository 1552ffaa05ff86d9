"""Models of many kinds on real SGLang: the weights that it holds are those that were sent, and it computes with them."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file
from transformers import AutoTokenizer

from common.rollout_client import RolloutClient
from services.rollout.engine_client import EngineClient
from tests.support.engines import expected_logprobs, sglang_is_installed, sglang_process
from tests.support.tiny_models import GEMMA, KINDS, write
from trainer.weights.comparison import Checksums

pytestmark = [
    pytest.mark.process,
    pytest.mark.slow,
    pytest.mark.skipif(not sglang_is_installed(), reason="SGLang is not installed: `make sglang-cpu` does it"),
]
PROMPT = [20, 21]


@pytest.mark.parametrize("kind", [*KINDS, GEMMA])
async def test_contract_sglang_has_and_computes_what_was_sent(kind: str, model_dir: Path, tmp_path: Path) -> None:
    """Widths that are no multiple of 32, mixtures, and a model with a vision tower; within the window where it has none."""
    directory = write(kind, tmp_path / "model", **({"sliding_window": 32} if kind == "Mistral" else {}))
    AutoTokenizer.from_pretrained(model_dir).save_pretrained(directory)
    sent = load_file(directory / "model.safetensors")
    with sglang_process(directory, tmp_path / "log", "7", max_new_tokens=24) as url:
        async with EngineClient("engine", url) as engine, RolloutClient("rollout", url) as client:
            ranks = await engine.checksums(60)
            [completion] = await client.generate(PROMPT, n=1, max_new_tokens=24, temperature=1, stop_token_ids=[])
    found = Checksums(on_gpu=False).compare(sent, ranks)
    assert (found.problem, found.compared, found.unseen) == (None, len(sent), [])
    wanted = expected_logprobs(directory, None, PROMPT, completion.token_ids.tolist())
    np.testing.assert_allclose(completion.logprobs, wanted, rtol=0, atol=1e-4)
