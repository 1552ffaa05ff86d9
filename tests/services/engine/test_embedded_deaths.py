"""A model that the engine cannot run is refused at its start; an engine that dies says why to
everybody who waits."""

from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import (
    AutoTokenizer,
    BloomConfig,
    BloomForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    RwkvConfig,
    RwkvForCausalLM,
)

from common.clients.base import Client, wait_healthy
from common.clients.rollout import RolloutClient
from common.errors import ServiceLost
from services.engine.app import make_app
from services.engine.decoder import UnfitModel
from services.engine.engine import Engine
from services.engine.jobs import GenerationJob, SamplingParams
from services.engine.model import Model
from services.rollout.engine_client import EngineClient
from tests.support.engines.engines import write_model
from tests.support.errors import raises

LIMIT_S = 400
EXPERTS = {
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "max_position_embeddings": 256,
    "output_router_logits": True,
    "vocab_size": 300,
    "bos_token_id": None,
}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("engine") / "model", seed=0)


def written(module: Any, tokens_of: Path, directory: Path) -> Path:
    module.save_pretrained(directory)
    AutoTokenizer.from_pretrained(tokens_of).save_pretrained(directory)
    return directory


def job(prompt: list[int], n: int = 1, **options: Any) -> GenerationJob:
    return GenerationJob("job", prompt, SamplingParams(**options), n)


@pytest.mark.parametrize(
    "module",
    [
        MixtralForCausalLM(MixtralConfig(num_local_experts=4, **EXPERTS)),
        Qwen3MoeForCausalLM(
            Qwen3MoeConfig(
                num_experts=4,
                num_experts_per_tok=2,
                moe_intermediate_size=32,
                head_dim=8,
                **EXPERTS,
            )
        ),
    ],
    ids=["mixtral", "qwen3_moe"],
)
def test_experts_saved_with_their_router_logits_generate(
    module: Any, model_dir: Path, tmp_path: Path
) -> None:
    engine = Engine(Model(written(module, model_dir, tmp_path), 256))
    engine.start()
    jobs = [job([20], n=2, max_new_tokens=4), job([20, 21, 22], max_new_tokens=4)]
    engine.submit(jobs)
    try:
        assert [
            len(sequence.tokens) for each in jobs for sequence in each.done.result(LIMIT_S)
        ] == [4, 4, 4]
    finally:
        engine.stop()


def test_a_model_that_cannot_decode_is_refused_with_the_place_and_the_remedy(
    model_dir: Path, tmp_path: Path
) -> None:
    """BLOOM reads the positions for its attention from a mask of two dimensions."""
    module = BloomForCausalLM(BloomConfig(hidden_size=32, n_layer=2, n_head=4, vocab_size=300))
    with pytest.raises(UnfitModel) as caught:
        Engine(Model(written(module, model_dir, tmp_path), 256))
    assert caught.value.message.startswith(
        "the embedded engine cannot run this model: ValueError: "
    )
    assert (
        "(in build_alibi_tensor, transformers/models/bloom/modeling_bloom.py:"
        in caught.value.message
    )
    assert caught.value.value == "bloom"
    assert caught.value.remedy is not None
    assert "rollout.engine sglang" in caught.value.remedy
    assert "another model" in caught.value.remedy


def test_a_model_without_a_kv_cache_is_refused(model_dir: Path, tmp_path: Path) -> None:
    """Its decode steps would forget the prompt."""
    module = RwkvForCausalLM(
        RwkvConfig(hidden_size=32, attention_hidden_size=32, num_hidden_layers=2, vocab_size=300)
    )
    with raises(UnfitModel, code="unfit_model", value="rwkv"):
        Engine(Model(written(module, model_dir, tmp_path), 256))


def test_the_check_at_the_start_leaves_nothing_behind(model_dir: Path) -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    model = Model(model_dir, 256)
    model.reserve(4)
    assert torch.equal(torch.get_rng_state(), before)
    assert model.cache.tensors() == []


class Dying(Model):
    """Runs out of memory at its third decode step, as a GPU does."""

    steps = 0

    def decode(self, *arguments: Any) -> Any:
        self.steps += 1
        if self.steps == 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return super().decode(*arguments)


async def test_every_request_fails_at_once_with_the_error_of_the_engine_that_died(
    model_dir: Path,
) -> None:
    """Both the running and the later ones, and nobody waits for the engine to become healthy or to
    load weights."""
    app = make_app(Engine(Dying(model_dir, 256), max_running=2))
    transport = httpx.ASGITransport(app)
    async with (
        app.router.lifespan_context(app),
        RolloutClient(
            "rollout-server", "http://in-process", transport=transport, deadline_s=LIMIT_S
        ) as client,
        EngineClient(
            "engine", "http://in-process", transport=transport, deadline_s=LIMIT_S
        ) as control,
    ):
        for _ in range(2):
            with pytest.raises(ServiceLost) as caught:
                await client.generate(
                    [20], n=8, max_new_tokens=50, temperature=1.0, stop_token_ids=[]
                )
            assert (
                "the engine has died: OutOfMemoryError: CUDA out of memory." in caught.value.message
            )
            assert "(in decode, " in caught.value.message
            assert caught.value.remedy is not None
            assert "rollout.max_running_requests" in caught.value.remedy
        with pytest.raises(ServiceLost, match="out of memory"):
            await control.load(model_dir, "1", LIMIT_S)
        with pytest.raises(ServiceLost, match="out of memory"):
            await wait_healthy([client], LIMIT_S)


async def test_a_broken_call_is_answered_with_the_death_that_it_caused(model_dir: Path) -> None:
    app = make_app(engine := Engine(Model(model_dir, 256)))
    async with app.router.lifespan_context(app):
        with pytest.raises(ServiceLost, match="ZeroDivisionError"):
            engine.call(lambda _: 1 // 0).result(LIMIT_S)
        async with Client(
            "engine", "http://in-process", transport=httpx.ASGITransport(app)
        ) as client:
            with pytest.raises(ServiceLost, match="ZeroDivisionError"):
                await client.request("POST", "/continue_generation", json={})


def test_embedded_a_supervised_engine_ends_its_process_before_anybody_learns_of_its_death(
    model_dir: Path,
) -> None:
    """Else a caller would give up although the supervisor starts the engine again."""
    failures: list[ServiceLost | None] = []
    engine = Engine(Dying(model_dir, 256), on_crash=lambda: failures.append(engine.failure))
    waiting = job([20], max_new_tokens=50)
    engine.start()
    engine.submit([waiting])
    with pytest.raises(ServiceLost):
        waiting.done.result(LIMIT_S)
    assert failures == [None]
