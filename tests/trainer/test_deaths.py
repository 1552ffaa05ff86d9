"""No run in one process waits for something that has died: it ends with the reason.

The limits of all waits are left at their defaults (ten minutes and more): a run that waited would
not end here.
"""

import asyncio
import sys
from collections.abc import Callable
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
)

from common.clients.rollout import RolloutClient
from common.errors import ConfigError, ServiceLost
from common.settings.config import Config
from services.engine.model import Model
from services.engine.scheduler import Scheduler
from tests.support.runs.in_process import Faulty, metrics, quiet
from trainer import GRPOConfig, GRPOTrainer, train_in_process
from trainer.backends.engines import DirectPublisher
from trainer.rollouts.collector import CollectFailed
from trainer.weights.versions import Weights

pytestmark = pytest.mark.integration

LIMIT_S = 400
ROWS = [
    {"prompt": f"How many apples are {n} and 1?", "ground_truth": str(n + 1)} for n in range(12)
]


def length(completions: list[Any], **_: Any) -> list[float]:
    return [len(str(completion)) / 50 for completion in completions]


def api(folder: Path, **fields: Any) -> GRPOConfig:
    small = {
        "per_device_train_batch_size": 4,
        "num_generations": 4,
        "max_completion_length": 8,
        "use_cpu": True,
    }
    return GRPOConfig(output_dir=folder / "run", verbose=False, **small | {"max_steps": 2} | fields)


def written(module: Any, tokenizer: Any, directory: Path) -> str:
    module.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return str(directory)


# ------------------------------------------------------------ the engine


@pytest.fixture
def engine_dies_after(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Lets the engine's thread run out of memory at a decode step."""

    def arrange(steps: int) -> None:
        class Dying(Model):
            left = steps

            def decode(self, *arguments: Any) -> Any:
                self.left -= 1
                if self.left < 0:
                    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
                return super().decode(*arguments)

        monkeypatch.setattr("trainer.backends.embedded.Model", Dying)

    return arrange


DIED = r"the engine has died: OutOfMemoryError: CUDA out of memory.*\(in decode, .*rollout.max_running_requests"


@pytest.mark.parametrize(
    "words",
    [
        (),
        pytest.param(("--trainer.max_staleness", "1"), marks=pytest.mark.slow),
        ("--environment.name", f"python:{__name__}:Asks"),
        pytest.param(("--evaluation.samples", "4"), marks=pytest.mark.slow),
    ],
    ids=["batch", "staleness", "episodes", "evaluation"],
)
def test_an_engine_that_dies_ends_the_run_with_its_error(
    settings: Callable[..., Config],
    engine_dies_after: Callable[[int], None],
    words: tuple[str, ...],
) -> None:
    """Whatever the training loop waits for: a batch, episodes, or an evaluation."""
    engine_dies_after(5)
    with pytest.raises(ServiceLost, match=DIED) as caught:
        train_in_process(settings(*words), quiet())
    assert "supervisor" not in str(caught.value)
    assert "node" not in str(caught.value)


class Asks:
    """An environment without tools."""

    def reset(self) -> None:
        """Begins."""


@pytest.mark.parametrize("staleness", [pytest.param("0", marks=pytest.mark.slow), "1"])
def test_an_engine_that_dies_of_new_weights_ends_the_run(
    settings: Callable[..., Config], monkeypatch: pytest.MonkeyPatch, staleness: str
) -> None:
    """With staleness, the thread that publishes waits for the engine, and the training loop for a
    batch."""
    load, loads = Scheduler.update_weights, list[str | None]()

    def third(self: Scheduler, source: Any, version: str | None) -> None:
        loads.append(version)
        if len(loads) == 3:
            raise MemoryError("no memory for the new weights")
        load(self, source, version)

    monkeypatch.setattr(Scheduler, "update_weights", third)
    config = settings("--trainer.max_staleness", staleness, "--trainer.max_steps", "6")
    with pytest.raises(
        ServiceLost, match="the engine has died: MemoryError: no memory for the new weights"
    ):
        train_in_process(config, quiet())
    assert len(metrics(config)) < 6


def test_a_model_that_the_engine_cannot_run_is_refused_before_the_first_step(
    base_model: Path, tmp_path: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(base_model)
    ids = {
        "vocab_size": len(tokenizer),
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    module = BloomForCausalLM(BloomConfig(hidden_size=32, n_layer=2, n_head=4, **ids))
    trainer = GRPOTrainer(
        written(module, tokenizer, tmp_path / "model"), length, api(tmp_path), ROWS
    )
    with pytest.raises(
        ConfigError, match=r"the embedded engine cannot run this model: .*engine='sglang'"
    ) as caught:
        trainer.train()
    assert caught.value.field == "model"


def test_experts_saved_with_their_router_logits_are_trained(
    base_model: Path, tmp_path: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(base_model)
    config = MixtralConfig(
        vocab_size=len(tokenizer),
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        output_router_logits=True,
    )
    model = written(MixtralForCausalLM(config), tokenizer, tmp_path / "model")
    result = GRPOTrainer(model, length, api(tmp_path), ROWS).train()
    assert result.global_step == 2
    assert all(line["update"]["delta_logprob"] < 1e-5 for line in result.history)


# ------------------------------------------------------------ what collects


def test_an_exit_inside_the_collectors_tasks_ends_the_run(settings: Callable[..., Config]) -> None:
    """asyncio ends its loop with it, and everything in one process lives in that loop."""

    class Exiting(Faulty):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            if self.calls == 5:
                sys.exit("out of here")
            return await super().handle_async_request(request)

    with pytest.raises(CollectFailed, match="collecting was ended by SystemExit: out of here"):
        train_in_process(
            settings(), quiet(), lambda app: Exiting(app, set(), lambda: httpx.Response(500))
        )


async def exits(completions: list[Any], **_: Any) -> list[float]:
    await asyncio.sleep(0)
    sys.exit("no judge")


def exits_now(completions: list[Any], **_: Any) -> list[float]:
    sys.exit("no judge")


@pytest.mark.parametrize("function", [exits, pytest.param(exits_now, marks=pytest.mark.slow)])
def test_a_reward_function_that_exits_ends_the_run(
    base_model: Path, tmp_path: Path, function: Callable[..., Any]
) -> None:
    trainer = GRPOTrainer(str(base_model), function, api(tmp_path), ROWS)
    with pytest.raises(ConfigError, match="SystemExit: no judge"):
        trainer.train()


class Exits:
    """An environment whose coroutine exits."""

    async def reset(self) -> None:
        """Begins."""
        sys.exit("no game")


@pytest.mark.slow
def test_an_environment_that_exits_fails_its_episodes(settings: Callable[..., Config]) -> None:
    config = settings(
        "--environment.name", f"python:{__name__}:Exits", "--limits.max_failed_groups", "2"
    )
    with pytest.raises(CollectFailed, match="SystemExit: no game"):
        train_in_process(config, quiet())


# ------------------------------------------------------------ what cannot start


def test_graders_that_do_not_start_end_the_run(
    settings: Callable[..., Config], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken = tmp_path / "worker.py"
    broken.write_text("raise SystemExit('no math-verify here')\n")
    monkeypatch.setattr("services.reward.pool._SCRIPT", broken)
    monkeypatch.setattr("services.reward.pool._RETRY_S", 0.01)
    with pytest.raises(
        ServiceLost, match=r"reward-server: the graders did not start \d+ times in a row"
    ):
        train_in_process(settings(), quiet())


def test_an_environments_server_that_does_not_start_ends_the_run(
    settings: Callable[..., Config],
) -> None:
    config = settings("--environment.name", "agent:sh -c 'echo no game here; exit 3' {port}")
    with pytest.raises(
        ServiceLost,
        match=r"failed starts: 5; sh ended with status 3 before it answered: no game here",
    ):
        train_in_process(config, quiet())


# ------------------------------------------------------------ what writes and publishes


def test_a_publishing_thread_that_dies_ends_the_run(
    settings: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    publish = DirectPublisher.publish

    def dying(self: DirectPublisher, weights: Weights, version: int) -> None:
        if version == 2:
            raise ZeroDivisionError("the bytes of no weights")
        publish(self, weights, version)

    monkeypatch.setattr(DirectPublisher, "publish", dying)
    with pytest.raises(ZeroDivisionError, match="the bytes of no weights"):
        train_in_process(
            settings("--trainer.max_staleness", "1", "--trainer.max_steps", "6"), quiet()
        )


async def test_a_lost_service_is_not_asked_again_for_each_item() -> None:
    """Covers `RolloutClient`, whose errors the collector does not count as dropped groups."""

    class Lost(httpx.AsyncBaseTransport):
        calls = 0

        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            self.calls += 1
            return httpx.Response(500, json=ServiceLost("the engine has died: E: e").body())

    transport = Lost()
    async with RolloutClient(
        "rollout-server", "http://lost", transport=transport, deadline_s=LIMIT_S
    ) as client:
        with pytest.raises(ServiceLost, match="rollout-server: the engine has died"):
            await client.generate([20], n=1, max_new_tokens=1, temperature=1.0, stop_token_ids=[])
    assert transport.calls == 1
