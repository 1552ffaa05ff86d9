"""The calls of the data-server, made by its clients."""

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from common.clients.data import DataClient
from common.errors import ConfigError, ServiceError
from common.settings.config import Config
from common.settings.sections import DataSection
from common.wire.schemas import Prompt
from services.data.app import create_data_app
from tests.support.errors import raises

TRAIN = [Prompt(id=f"t/{n}", prompt=f"problem {n}", ground_truth=str(n)) for n in range(30)]
EVAL = [Prompt(id=f"e{n}", prompt=f"held-out {n}", ground_truth=str(n)) for n in range(5)]


def config(state_dir: Path) -> Config:
    return Config(state_dir=state_dir, data=DataSection(source="tiny"))


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[DataClient]:
    app = create_data_app(config(tmp_path), TRAIN, EVAL)
    async with (
        app.router.lifespan_context(app),
        DataClient(
            "data-server", "http://data", transport=httpx.ASGITransport(app), deadline_s=20
        ) as client,
    ):
        yield client


async def test_prompts_have_exactly_the_fields_that_existing_clients_read(
    client: DataClient,
) -> None:
    answer = (await client.http.get("/prompts")).json()
    assert len(answer["prompts"]) == 8
    assert answer["total_available"] == 30
    assert set(answer["prompts"][0]) == {"id", "prompt", "ground_truth"}
    ordered = (await client.http.get("/prompts?batch_size=2&shuffle=false")).json()
    assert [prompt["id"] for prompt in ordered["prompts"]] == ["t/0", "t/1"]
    assert (await client.http.get("/prompts?batch_size=256")).json()["position"] == 8


async def test_one_prompt_of_either_split(client: DataClient) -> None:
    assert (await client.http.get("/prompt/t/3")).json() == TRAIN[3].model_dump()
    assert (await client.http.get("/prompt/e1")).json() == EVAL[1].model_dump()
    answer = await client.http.get("/prompt/absent")
    assert answer.status_code == 404
    assert answer.json()["error"] | {"message": ""} == {
        "code": "not_found",
        "message": "",
        "field": "id",
        "value": "absent",
        "remedy": "ids are like t/0",
    }


async def test_the_client_walks_an_epoch_and_seeks(client: DataClient) -> None:
    batches = [await client.prompts(10, f"r{n}") for n in range(3)]
    assert sorted(prompt.id for batch in batches for prompt in batch.prompts) == sorted(
        prompt.id for prompt in TRAIN
    )
    assert await client.prompts(10, "r1") == batches[1]
    await client.seek(10, "back")
    assert (await client.prompts(10, "later")).prompts == batches[1].prompts
    await client.seek(10, "back")  # a copy that arrives late moves nothing
    assert await client.eval_prompts(3) == EVAL[:3]
    assert (await client.stats())["total_available"] == 30
    await client.flush()
    stats = (await client.http.get("/stats")).json()
    assert stats.pop("load")["requests"] == 1
    assert stats == {
        "total_available": 30,
        "total_eval": 5,
        "position": 20,
        "epoch": 0,
        "prompts_served": 40,
        "run": "",
    }
    await client.request("POST", "/reset")
    assert (await client.prompts(10, "r0")).prompts == batches[0].prompts


async def test_pages_of_the_held_out_split(client: DataClient) -> None:
    page = (await client.http.get("/eval_prompts?limit=2&offset=4")).json()
    assert page == {"prompts": [EVAL[4].model_dump()], "total_available": 5}
    assert len((await client.http.get("/eval_prompts")).json()["prompts"]) == 5


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/prompts?batch_size=0", "batch_size"),
        ("/prompts?batch_size=257", "batch_size"),
        ("/prompts?batch_size=nan", "batch_size"),
        ("/prompts?shuffle=perhaps", "shuffle"),
        ("/prompts?request_id=", "request_id"),
        ("/prompts?request_id=%ff", "request_id"),
        (f"/prompts?request_id={'x' * 129}", "request_id"),
        ("/eval_prompts?limit=-1", "limit"),
        ("/prompts?count=2", "count"),  # other names are not read: 8 prompts would be drawn
        ("/prompts?batch_size=2&batchsize=3", "batchsize"),
    ],
)
async def test_bad_queries_are_named_and_move_nothing(
    client: DataClient, path: str, field: str
) -> None:
    answer = await client.http.get(path)
    assert answer.status_code == 422
    assert answer.json()["error"]["field"] == field
    assert answer.json()["error"]["remedy"]
    assert (await client.prompts(1, "after")).position == 0


@pytest.mark.parametrize(
    "body",
    [
        '{"position": -1}',
        '{"position": NaN}',
        '{"position": 1e400}',
        '{"position": "x"}',
        "{}",
        "[]",
    ],
)
async def test_bad_positions_are_refused(client: DataClient, body: str) -> None:
    answer = await client.http.post(
        "/seek", content=body, headers={"content-type": "application/json"}
    )
    assert answer.status_code == 422
    assert (await client.prompts(1, "after")).position == 0


async def test_a_request_id_with_another_size_is_refused(client: DataClient) -> None:
    await client.prompts(4, "a")
    with raises(ServiceError, status=422, field="request_id", value="a"):
        await client.prompts(5, "a")


async def test_metrics_count_prompts(client: DataClient) -> None:
    await client.prompts(4, "a")
    page = (await client.http.get("/metrics")).text
    assert 'rlhf_data_prompts_total{shuffle="true"} 4.0' in page
    assert 'route="/prompts",status="200"' in page


async def test_task_and_columns_are_present_only_if_the_data_has_them(tmp_path: Path) -> None:
    mixed = [
        Prompt(id="a", prompt="p", ground_truth="1", task="code", columns={"tests": [1]}),
        TRAIN[0],
    ]
    app = create_data_app(config(tmp_path), mixed, EVAL)
    async with DataClient(
        "data-server", "http://data", transport=httpx.ASGITransport(app), deadline_s=20
    ) as client:
        answer = (await client.http.get("/prompts?batch_size=2&shuffle=false")).json()["prompts"]
        assert answer[0] == {
            "id": "a",
            "prompt": "p",
            "ground_truth": "1",
            "task": "code",
            "columns": {"tests": [1]},
        }
        assert set(answer[1]) == {"id", "prompt", "ground_truth"}
        assert sorted((await client.prompts(2, "r")).prompts, key=lambda prompt: prompt.id) == mixed


async def test_pass_rates_are_refused_without_a_curriculum(client: DataClient) -> None:
    with raises(ServiceError, field="data.curriculum") as caught:
        await client.report_pass_rates(["t/1"], [0.5], "r")
    assert caught.value.status == 422


def test_an_id_in_both_splits_is_refused(tmp_path: Path) -> None:
    with raises(ConfigError, field="data.source", value="tiny") as caught:
        create_data_app(config(tmp_path), TRAIN, [TRAIN[2]])
    assert "'t/2'" in caught.value.message


@pytest.mark.parametrize(("copies", "warned"), [(1, False), (3, True)])
async def test_problems_that_repeat_are_counted_at_the_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, copies: int, warned: bool
) -> None:
    repeated = [
        prompt.model_copy(update={"id": f"{prompt.id}-{copy}"})
        for prompt in TRAIN[:10]
        for copy in range(copies)
    ]
    create_data_app(config(tmp_path), repeated, EVAL)
    text = "20 of 30 training problems repeat another one: only 10 are different"
    assert (text in caplog.text) == warned
