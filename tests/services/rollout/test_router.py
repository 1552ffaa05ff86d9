"""The router features that this system relies on: the real routers, started as an agent starts
them."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from common.clients.base import Client
from common.clients.rollout import RolloutClient
from common.process.logs import REQUEST_HEADER, request, usable_id
from common.settings.config import from_mapping
from common.wire.schemas import Completion, Prompt
from services.rollout.router import RouterClient
from tests.support.engines.engines import (
    ROUTERS,
    engine_process,
    routed,
    router_process,
    write_model,
)
from tests.support.engines.recording_engines import recorders
from tests.support.processes.forks import Forked
from tests.support.processes.lossy_proxy import LossyProxy
from tests.support.processes.waits import comes
from trainer.evaluation.generators import ChatGenerator

CONTROL = [
    *("pause_generation", "continue_generation", "abort_request", "weights_checker"),
    *(
        "update_weights_from_disk",
        "update_weights_from_distributed",
        "update_weights_from_tensor",
        "update_weight_version",
    ),
    *(
        "init_weights_update_group",
        "destroy_weights_update_group",
        "begin_weight_update",
        "end_weight_update",
    ),
    *(
        "load_lora_adapter",
        "unload_lora_adapter",
        "release_memory_occupation",
        "resume_memory_occupation",
    ),
]
pytestmark = [pytest.mark.integration, pytest.mark.parametrize("router", ROUTERS, scope="module")]


async def generate(client: RolloutClient, n: int = 2, tokens: int = 4) -> list[Completion]:
    return await client.generate(
        [5, 6, 7], n=n, max_new_tokens=tokens, temperature=0.7, stop_token_ids=[1]
    )


async def reconciled(registry: RouterClient, url: str, wanted: bool) -> None:
    while not await registry.reconcile(url, lambda: wanted):  # noqa: ASYNC110
        await asyncio.sleep(0.05)


# ------------------------------------------------------------ in front of recording engines


class Watching(httpx.AsyncBaseTransport):
    """Records the body of every POST and every answer, retries included."""

    def __init__(self, transport: httpx.AsyncBaseTransport) -> None:
        self._transport = transport
        self.sent: list[dict[str, Any]] = []
        self.answers: list[httpx.Response] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if request.method == "POST":
            self.sent.append(json.loads(request.content))
        answer = await self._transport.handle_async_request(request)
        self.answers.append(answer)
        return answer


def watched(client: Client) -> tuple[list[dict[str, Any]], list[httpx.Response]]:
    """Records every body that the client sends and every answer that it receives."""
    watching = Watching(client._transport)
    client._transport = watching
    return watching.sent, watching.answers


def arrived(sent: dict[str, Any], received: dict[str, Any]) -> dict[str, Any]:
    """Returns the part of a sent body that arrived."""
    found = {key: received[key] for key in sent if key in received}
    if "sampling_params" in found:
        found["sampling_params"] = {
            key: value
            for key, value in found["sampling_params"].items()
            if key in sent["sampling_params"]
        }
    return found


async def test_every_field_that_is_sent_arrives(router: str, tmp_path: Path) -> None:
    """The router rewrites every body and silently drops fields it does not know."""
    common: dict[str, Any] = {
        "n": 3,
        "max_new_tokens": 4,
        "temperature": 0.7,
        "stop_token_ids": [1, 2],
        "sampling_seed": 11,
    }
    with (
        recorders(1) as ((engine,), urls),
        router_process(urls, tmp_path / "log", router=router) as url,
    ):
        async with (
            RolloutClient("router", url, deadline_s=60) as client,
            Client("router", url, deadline_s=60) as plain,
        ):
            (sent, _), (asked, _) = watched(client), watched(plain)
            await client.generate([5, 6, 7], **common)
            await client.answers([5, 6, 7], **common, logprobs=False, lora_path="run-2")
            client.adapter = ("run-3", 3)
            await client.generate([5, 6, 7], **common)
            client.repeats_prompt = True
            await client.generate([5, 6, 7], **common)
            if router == "smg":
                client.adapter = None
                await client.answers([5, 6, 7], **common, parameters={"top_p": 0.8, "top_k": 40})
                assert sent[-1]["return_sampling_mask"] is True
            assert [arrived(*pair) for pair in zip(sent, engine.bodies, strict=True)] == sent
            assert sent[-1]["input_ids"] == [[5, 6, 7]] * 3

            chat = ChatGenerator(
                plain,
                "m",
                from_mapping(
                    {
                        "sampling.system_prompt": "Think.",
                        "sampling.max_new_tokens": 8,
                        "sampling.temperature": 0.7,
                    }
                ),
                nullcontext(),
            )
            await chat.generate(
                Prompt(id="1", prompt="1 + 1?", ground_truth="2"), 0, 1, greedy=False
            )
            engine.bodies[-1].setdefault(
                "max_tokens", engine.bodies[-1].get("max_completion_tokens")
            )  # its newer name
            assert arrived(asked[0], engine.bodies[-1]) == asked[0]

            lost = {
                "input_ids": [5],
                "sampling_params": {"n": 1, "logit_bias": {"5": 1.0}, "temprature": 1},
            }
            await client.request("POST", "/generate", json=lost)
            assert arrived(lost, engine.bodies[-1])["sampling_params"] == {
                "n": 1
            }  # such a loss is detectable


async def test_groups_at_once_are_spread_evenly_and_each_stays_whole(
    router: str, tmp_path: Path
) -> None:
    with (
        recorders(4) as (engines, urls),
        router_process(urls, tmp_path / "log", router=router) as url,
    ):
        async with RolloutClient("router", url, deadline_s=120) as client:
            groups = await asyncio.gather(*(generate(client, n=8) for _ in range(256)))
        assert [len(group) for group in groups] == [8] * 256
        assert [len(engine.bodies) for engine in engines] == [64] * 4  # round robin splits exactly
        assert {body["sampling_params"]["n"] for engine in engines for body in engine.bodies} == {8}


async def test_the_request_id_reaches_the_engine_and_comes_back(
    router: str, tmp_path: Path
) -> None:
    with (
        recorders(1) as ((engine,), urls),
        router_process(urls, tmp_path / "log", router=router) as url,
    ):
        async with RolloutClient("router", url, deadline_s=60) as client:
            _, answers = watched(client)
            with request("4f1c3a52-group"):
                await generate(client)
            await generate(client)
        assert engine.ids[0] == "4f1c3a52-group"
        assert usable_id(engine.ids[1] or "")
        assert [answer.headers[REQUEST_HEADER] for answer in answers] == engine.ids


async def test_control_calls_are_not_forwarded(router: str, tmp_path: Path) -> None:
    """A forwarded call would reach only one of several engines, so a misdirected one must fail."""
    with (
        recorders(2) as (engines, urls),
        router_process(urls, tmp_path / "log", router=router) as url,
    ):
        fresh = httpx.Limits(
            max_keepalive_connections=0
        )  # smg may close a connection without reading its body
        async with httpx.AsyncClient(
            base_url=url, trust_env=False, timeout=60, limits=fresh
        ) as client:
            statuses = {
                path: (await client.post(f"/{path}", json={})).status_code for path in CONTROL
            }
        assert statuses == dict.fromkeys(CONTROL, 404)
        assert [engine.other for engine in engines] == [[], []]


async def test_a_request_waits_for_the_first_engine(router: str, tmp_path: Path) -> None:
    with (
        recorders(1) as ((engine,), (engine_url,)),
        router_process([], tmp_path / "log", router=router) as url,
    ):
        async with (
            RolloutClient("router", url, deadline_s=120) as client,
            RouterClient("router", url) as registry,
        ):
            _, answers = watched(client)
            group = asyncio.create_task(generate(client))
            await comes(lambda: len(answers) > 1, "refused without an engine")
            await asyncio.gather(
                *(registry.reconcile(engine_url, lambda: True) for _ in range(5))
            )  # smg: 409
            assert len(await group) == 2
            await reconciled(registry, engine_url, wanted=True)
        assert answers[0].status_code == {"sglang-router": 503, "smg": 404}[router]
        assert len(engine.bodies) == 1


# ------------------------------------------------------------ in front of real engines


@dataclass
class Engine:
    """An embedded engine; `client` calls it directly."""

    url: str
    process: Forked
    client: httpx.Client

    def waiting(self) -> int:
        """Returns the number of completions it has begun or queued."""
        return int(self.client.get("/v1/loads").json()["aggregate"]["num_total_reqs"])

    def answered(self, route: str = "/generate") -> int:
        """Returns the number of requests answered since the start."""
        lines = [
            line
            for line in self.client.get("/metrics").text.splitlines()
            if "http_requests_total{" in line
        ]
        return int(
            sum(float(line.rsplit(" ", 1)[1]) for line in lines if f'route="{route}"' in line)
        )

    def kill(self) -> None:
        """Sends SIGKILL."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def control(self, path: str, **body: Any) -> None:
        self.client.post(path, json=body).raise_for_status()


@dataclass
class Pool:
    """Engines of one model behind a router."""

    directory: Path
    stack: ExitStack
    router_url: str = ""
    starts: int = 0
    engines: list[Engine] = field(default_factory=list)

    def start(self, port: int | None = None) -> Engine:
        """Starts an engine, on the port of a killed one if given."""
        self.starts += 1
        words = ("--weight-version", "3", "--max-context-tokens", "64")
        log = self.directory / f"engine-{self.starts}.log"
        url, process = self.stack.enter_context(
            engine_process(self.directory / "model", log, *words, port=port)
        )
        client = self.stack.enter_context(httpx.Client(base_url=url, trust_env=False, timeout=60))
        return Engine(url, process, client)

    def routed(self) -> set[str]:
        return routed(self.router_url)


@pytest.fixture(scope="module")
def pool(router: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """Starts two engines and the router; a test that stops an engine must replace it."""
    directory = tmp_path_factory.mktemp(router)
    write_model(directory / "model", seed=0)
    with ExitStack() as stack:
        made = Pool(directory, stack)
        made.engines = [made.start(), made.start()]
        urls = [engine.url for engine in made.engines]
        made.router_url = stack.enter_context(
            router_process(urls, directory / "router.log", router=router)
        )
        yield made


@pytest.fixture
async def client(pool: Pool) -> AsyncIterator[RolloutClient]:
    async with RolloutClient("router", pool.router_url, deadline_s=240) as made:
        yield made


def groups(client: RolloutClient, count: int) -> list["asyncio.Task[list[Completion]]"]:
    """Starts `count` concurrent requests of two completions each."""
    return [asyncio.create_task(generate(client)) for _ in range(count)]


async def whole(requests: list["asyncio.Task[list[Completion]]"]) -> None:
    assert [len(group) for group in await asyncio.gather(*requests)] == [2] * len(requests)


async def test_a_paused_engine_stays_and_its_requests_wait(
    pool: Pool, client: RolloutClient
) -> None:
    paused, _ = pool.engines
    paused.control("/pause_generation", mode="retract")
    before = paused.answered("/health")
    running = groups(client, 8)
    await comes(
        lambda: paused.answered("/health") >= before + 5, "five health checks"
    )  # three failures remove it
    assert pool.routed() == {engine.url for engine in pool.engines}
    running += groups(client, 8)  # the router also keeps an engine that finishes nothing
    await comes(
        lambda: paused.waiting() == 16,
        "half of the requests, of two completions each, wait in the paused engine",
    )
    paused.control("/continue_generation")
    await whole(running)


async def test_engines_come_and_go_while_requests_run(pool: Pool, client: RolloutClient) -> None:
    first, second = pool.engines
    begun = second.answered()
    first.control("/pause_generation", mode="retract")
    running = groups(client, 8)
    await comes(
        lambda: first.waiting() == 8, "four requests of two completions wait in the first engine"
    )
    third = pool.start()
    async with RouterClient("router", pool.router_url) as registry:
        await reconciled(registry, third.url, wanted=True)
        running += groups(client, 12)
        await comes(
            lambda: (second.answered(), third.answered()) == (begun + 8, 4),
            "every third request in the third engine",
        )

        await reconciled(registry, first.url, wanted=False)
    await comes(lambda: pool.routed() == {second.url, third.url}, "the first engine is out")
    before = (first.waiting(), second.answered(), third.answered())
    await whole(groups(client, 8))
    assert (first.waiting(), second.answered(), third.answered()) == (
        before[0],
        before[1] + 4,
        before[2] + 4,
    )
    first.control("/continue_generation")
    await whole(running)
    assert first.answered() >= 8  # it finished its own requests after its removal
    assert second.answered() + third.answered() == before[1] + before[2] + 8
    pool.engines = [second, third]


async def test_no_request_is_lost_with_a_killed_engine_and_it_comes_back(
    pool: Pool, client: RolloutClient
) -> None:
    kept, killed = pool.engines
    killed.control("/pause_generation", mode="retract")
    running = groups(client, 32)
    await comes(
        lambda: killed.waiting() == 32,
        "sixteen requests of two completions in the engine that is killed",
    )
    killed.kill()
    await whole(running + groups(client, 32))

    back = pool.start(port=httpx.URL(killed.url).port)
    pool.engines = [kept, back]
    await comes(lambda: pool.routed() == {kept.url, back.url}, "both are healthy again")
    await whole(groups(client, 8))
    assert back.answered() == 4


async def test_engines_that_failed_often_get_traffic_at_once_when_they_are_back(
    pool: Pool, client: RolloutClient
) -> None:
    """With the circuit breaker on, the tenth failure would block both engines for a minute."""
    _, answers = watched(client)
    for engine in pool.engines:
        engine.kill()
    running = groups(client, 20)
    await comes(
        lambda: sum(answer.status_code == 500 for answer in answers) >= 20,
        "each of 20 requests failed, after six tries of the router",
    )
    pool.engines = [pool.start(port=httpx.URL(engine.url).port) for engine in pool.engines]
    await comes(
        lambda: pool.routed() == {engine.url for engine in pool.engines}, "both are healthy again"
    )
    before = [engine.answered() for engine in pool.engines]
    await whole(running)
    await whole(groups(client, 8))
    assert all(
        engine.answered() > count for engine, count in zip(pool.engines, before, strict=True)
    )


async def test_lost_answer_about_an_engine_changes_nothing(pool: Pool) -> None:
    """This test is last because it changes the list of engines that the tests share."""
    first, second = (engine.url for engine in pool.engines)
    proxy = LossyProxy(int(pool.router_url.rpartition(":")[2]))
    async with proxy.running() as url, RouterClient("router", url) as registry:
        await reconciled(registry, first, wanted=False)
        await comes(lambda: pool.routed() == {second}, "the first engine is out")
        await reconciled(registry, first, wanted=True)
        await comes(lambda: pool.routed() == {first, second}, "the first engine is in")
    removals = [
        count for call, count in proxy.forwarded.items() if call.startswith("DELETE /workers/")
    ]
    assert removals[0] >= 2
    assert proxy.forwarded["POST /workers"] >= 2
