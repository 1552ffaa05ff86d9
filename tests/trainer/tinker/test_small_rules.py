"""Rules of the server that one case does not show: seeds, bounds, who gives way, what is kept."""

import json
import random
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from common.errors import ConfigError
from common.process.storage import StorageFailed
from common.settings.config import Config, from_mapping
from common.weights.checksums import checksum
from services.rollout.engine_client import EngineClient
from tests.support.errors import raises
from tests.support.tinker.client import Client, serving
from tests.support.tinker.stand_ins import CountingLearner, EchoEngine
from trainer.observe.audit import Setup
from trainer.tinker import store as store_module
from trainer.tinker.messages import MESSAGES
from trainer.tinker.records import TinkerOperation, TinkerResult
from trainer.tinker.run import _record_settings
from trainer.tinker.sampling import Adapters
from trainer.tinker.store import Journal, TinkerStore


async def _asked(client: Client, sampler: str, seq: int, **body: Any) -> httpx.Response:
    sample = {"prompt": {"chunks": [{"tokens": [4, 5, 6, 7, 8]}]}, "sampling_params": {}, **body}
    asked = await client.post("asample", sampling_session_id=sampler, seq_id=seq, **sample)
    return await client.result(asked["request_id"])


async def test_a_seed_that_is_given_counts_also_0_and_others_are_those_of_the_request(
    tmp_path: Path,
) -> None:
    engine = EchoEngine()
    given = [0, 1, -1, 2**63 - 1, 2**63, None, None]
    async with serving(tmp_path, CountingLearner(), engine) as client:
        sampler = await client.sampler_of_base()
        for seq, seed in enumerate(given):
            await _asked(client, sampler, seq, sampling_params={"seed": seed})
        sent = [body["sampling_params"]["sampling_seed"] for body in engine.requests]
        assert sent[:5] == [0, 1, 2**63 - 1, 2**63 - 1, 0]
        assert len({*sent}) == 5, "those without a seed differ from each other and from all"

        # The stand-in's first weight is the seed.
        for number, seed in enumerate((0, 5)):
            run = await client.run(number, seed=seed)
            stepped = (await client.result(await client.step(run, 1))).json()
            assert stepped["metrics"] == {"weight:mean": float(seed)}


@pytest.mark.parametrize("last", [1, 2, 4, 5, 6])
async def test_log_probabilities_are_told_of_as_many_last_tokens_as_are_asked_for(
    tmp_path: Path, last: int
) -> None:
    async with serving(tmp_path, CountingLearner(), EchoEngine()) as client:
        sampler = await client.sampler_of_base()
        asked = {"prompt_logprobs": True, "prompt_logprobs_last_n": last}
        answer = await _asked(client, sampler, 0, **asked)
    scores = np.frombuffer(MESSAGES.decode("Samples", answer.content)["prompt_logprobs"], "<f4")
    assert len(scores) == 5
    # The first token has none.
    assert np.isfinite(scores).tolist() == [place >= max(1, 5 - last) for place in range(5)]


@pytest.mark.parametrize("seed", range(2))
async def test_adapters_that_were_used_longest_ago_give_way(tmp_path: Path, seed: int) -> None:
    engine = EchoEngine()
    control = EngineClient("engine", "http://engine", transport=httpx.MockTransport(engine.answer))
    adapters = Adapters(lambda: [control], most=3)
    folders: dict[str, Path] = {}
    for number in range(6):
        folder = tmp_path / str(number)
        folder.mkdir()
        file = folder / "adapter_model.safetensors"
        file.write_bytes(bytes([number]))
        folders[f"{number}@{checksum(file)}"] = folder

    draw = random.Random(seed)
    newest: list[str] = []
    for name in draw.choices(list(folders), k=30):
        async with adapters.use(name, folders[name]):
            newest = [name, *(each for each in newest if each != name)]
            assert engine.adapters.keys() == {*newest[:3]}


async def test_a_result_is_that_of_the_first_end(tmp_path: Path) -> None:
    """As of a request that ends while it is cancelled."""
    store = TinkerStore(tmp_path / "tinker.sqlite")
    first = TinkerResult(ok=True, content=b"first", is_json=False)
    second = TinkerResult(ok=False, content=b"second", is_json=True)
    with store.transaction():
        store.accept(TinkerOperation("s:sample:0", 1, "sample", b"x"))
        for result in (first, second):
            store.finish("s:sample:0", 1, result, repeatable=False)
        found = store.result("s:sample:0", 1)
        assert found is not None
        assert (found.ok, found.content) == (True, b"first")
        assert len(store.finished_after("s:sample:0", range(9), after=0)) == 1
    store.close()


async def test_results_wait_for_a_full_disk_and_for_no_other_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "AGAIN_S", 0.0)
    journal = Journal(TinkerStore(tmp_path / "tinker.sqlite"))
    faults = [StorageFailed("broken", code="damaged"), StorageFailed("full", code="disk_full")]

    def work(_: TinkerStore) -> None:
        if faults:
            raise faults.pop()

    with pytest.raises(StorageFailed, match="broken"):
        await journal.settle(work)
    assert not faults, "it was tried again when the disk was full"
    await journal.settle(work)
    assert journal.waits_for is None
    await journal.close()


async def test_a_run_is_deleted_with_the_samplers_of_its_weights_without_a_name(
    tmp_path: Path,
) -> None:
    engine = EchoEngine()
    async with serving(tmp_path, CountingLearner(), engine) as client:
        names = []
        for number in range(2):
            run = await client.run(number)
            saved = await client.post("save_weights_for_sampler", model_id=run, seq_id=1)
            answer = (await client.result(saved["request_id"])).json()
            names.append(answer["sampling_session_id"])
        await client.http.delete(f"/api/v1/training_runs/{client.session}:train:0")

    async with serving(tmp_path, CountingLearner(), engine) as client:
        sample = {"prompt": {"chunks": [{"tokens": [4]}]}, "sampling_params": {}, "seq_id": 0}
        for name, status in zip(names, (404, 200), strict=True):
            body = {"sampling_session_id": name, **sample}
            assert (await client.http.post("/api/v1/asample", json=body)).status_code == status


_SETUP = Setup(packages={}, world_size=1, threads=1, device="cpu", instructions="")


@pytest.mark.parametrize(
    ("name", "value"),
    [("model.name", "another"), ("model.dtype", "float32"), ("lora.alpha", 7.0)],
)
def test_a_directory_is_of_one_base_model_precision_and_scale(
    tmp_path: Path, name: str, value: object
) -> None:
    """With another one no run would come back as it was."""

    def settings(**changes: object) -> Config:
        return from_mapping({"model.name": "base", "lora.rank": 8, **changes})

    _record_settings(settings(), _SETUP, tmp_path)
    before = json.loads((tmp_path / "settings.json").read_bytes())
    with raises(ConfigError, field=name):
        _record_settings(settings(**{name: value}), _SETUP, tmp_path)
    assert json.loads((tmp_path / "settings.json").read_bytes()) == before
    _record_settings(settings(seed=3), _SETUP, tmp_path)
    assert json.loads((tmp_path / "settings.json").read_bytes())["config"]["seed"] == 3
