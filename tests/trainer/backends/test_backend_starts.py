"""What a run in one process, or in a job group, starts and connects: with stand-ins for engines,
services and publishers, which note what they were made of.
"""

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI

from common.errors import ConfigError
from common.settings.config import Config
from tests.support.errors import raises
from trainer.algorithms.spool import EXPERTS
from trainer.backends import in_process, job_group
from trainer.backends.in_process import InProcessBackend
from trainer.backends.job_group import JobGroupBackend
from trainer.observe.problems import Problems


class Noted:
    """What was made of which arguments, in order."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.given: dict[str, Any] = {}

    def maker(self, name: str, made: Any = None) -> Any:
        """Returns a function that notes its call and returns `made`, or a new object."""

        def make(*given: Any, **options: Any) -> Any:
            self.done.append(name)
            self.given[name] = (given, options)
            return made if made is not None else SimpleNamespace(name=name)

        return make

    def app(self, title: str) -> FastAPI:
        @asynccontextmanager
        async def lifespan(_: FastAPI) -> Any:
            self.done.append(f"+{title}")
            yield
            self.done.append(f"-{title}")

        return FastAPI(title=title, lifespan=lifespan)


class AClient:
    """Stands for a client."""

    def __init__(self, *given: Any, **options: Any) -> None:
        self.given = given
        self.options = options
        self.closed = False

    async def __aenter__(self) -> "AClient":
        return self

    async def __aexit__(self, *_: object) -> None:
        self.closed = True


@contextmanager
def context_of(config: Config, folder: Path) -> Iterator[Any]:
    with asyncio.Runner() as runner, ExitStack() as stack:
        yield SimpleNamespace(
            config=config,
            run_dir=folder,
            run_id="run-1",
            tokenizer="tokenizer",
            policy=SimpleNamespace(model="model", ranks=SimpleNamespace(device=None)),
            static_files=["config.json"],
            metrics=SimpleNamespace(published="published"),
            registry="registry",
            loop=SimpleNamespace(call=runner.run),
            stack=stack,
            say=lambda text: None,
        )


@pytest.mark.parametrize("plays", ["", "alone", "behind a gateway"])
@pytest.mark.parametrize("engine", ["embedded", "sglang", "http://a", ["http://a", "http://b"]])
@pytest.mark.parametrize("adapter", [False, True])
def test_a_run_in_one_process_connects_its_services_and_engines(
    engine: Any, plays: str, adapter: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted = Noted()
    config = Config(state_dir=tmp_path, max_body_mb=3)
    config.limits.service_timeout_s = 66.0
    config.environment.name = "calculator" if plays else ""
    config.rollout.tensor_parallel_size = 2
    config.rollout.device = "cpu" if plays == "alone" else "cuda"
    config.sampling.chat_template_kwargs = {"thinks": False}
    if adapter:
        config.lora.rank = 4
    config.reproducible = engine in ("embedded", "sglang")
    publisher = SimpleNamespace(
        starts_with=lambda: (tmp_path / "weights", "9"), engines=[], work=lambda: 0
    )

    async def begin(apps: Any) -> None:
        noted.done.append("engine starts")

    own = SimpleNamespace(start=begin, url="http://own", check="check", work="work", log_file="log")

    async def close() -> None:
        noted.done.append("episodes close")

    made = {
        "DirectPublisher": publisher,
        "embedded_engine": "engine",
        "make_app": noted.app("engine"),
        "OwnSGLang": own,
        "Template": "template",
        "AdapterPublisher": None,
        "create_data_app": noted.app("data-server"),
        "create_reward_app": noted.app("reward-server"),
        "create_replay_app": noted.app("replay-buffer"),
        "EpisodeService": SimpleNamespace(close=close),
        "create_environment_app": noted.app("environment-server"),
        "needs_gateway": plays == "behind a gateway",
        "listen": SimpleNamespace(getsockname=lambda: ("127.0.0.1", 8123)),
        "serving": nullcontext(),
        "stop_token_ids": [7],
        "keep_problems": None,
    }

    @asynccontextmanager
    async def serving(app: FastAPI, sock: Any) -> Any:
        assert sock is made["listen"]
        noted.done.append(f"+served {app.title}")
        yield
        noted.done.append(f"-served {app.title}")

    for name, value in made.items():
        monkeypatch.setattr(in_process, name, noted.maker(name, value))
    monkeypatch.setattr(in_process, "serving", serving)
    kinds = ("EngineClient", "OwnEngineClient", "RolloutClient", "ServersClient", "DataClient")
    for name in (*kinds, "RewardClient", "ReplayClient", "EnvironmentClient"):
        monkeypatch.setattr(in_process, name, type(name, (AClient,), {}))
    splits: list[Any] = []

    def split(data: Any, which: str, seed: int) -> Any:
        splits.append((which, seed))
        return [which]

    monkeypatch.setattr(in_process, "load_split", split)
    backend = InProcessBackend(
        console=None,  # type: ignore[arg-type]
        rollout_transport=lambda app: f"to {app.title}",  # type: ignore[arg-type, return-value]
        problems=None,
        rewards=None,
        engine=engine,
    )
    services: Any
    found: Any
    with context_of(config, tmp_path) as context:
        services, found = backend.start(context)
        is_own = engine == "sglang"
        kind = "embedded" if engine == "embedded" else "sglang"
        assert backend.engine_kind == kind
        gpus = 0 if plays == "alone" else 2
        assert backend.engine_gpus == {"embedded": 0, "sglang": gpus}.get(str(engine))
        assert ("engine starts" in noted.done) is is_own
        assert ("embedded_engine" in noted.done) is (engine == "embedded")
        if engine == "embedded":
            given, options = noted.given["embedded_engine"]
            assert given == (config, tmp_path / "weights", "9")
            assert options == {"beside_trainer": config.trainer.max_staleness > 0}
            assert noted.given["make_app"][0] == ("engine",)
            assert services.rollout.options == {"transport": "to engine", "deadline_s": 66.0}
            assert services.rollout.given == ("rollout-server", "http://in-process")
            assert "+engine" in noted.done
        else:
            urls = ["http://own"] if is_own else [engine] if isinstance(engine, str) else engine
            assert services.rollout.given == ((urls, "check") if is_own else (urls,))
            assert services.rollout.options == {"deadline_s": 66.0}
            assert publisher.work == "work" if is_own else publisher.work() == 0
        assert len(publisher.engines) == (2 if isinstance(engine, list) else 1)
        assert services.rollout.seeds_apart is is_own
        assert services.reward.gets_tokens is False
        assert services.rewards_tried is False
        assert splits == [("train", config.seed), ("eval", config.seed)]
        assert noted.given["create_data_app"][0] == (config, ["train"], ["eval"])
        assert noted.given["create_reward_app"][0] == (config.reward, 3 << 20, None)
        assert noted.given["create_replay_app"][0] == (config.replay, tmp_path, 3 << 20)
        names = ["data-server", "reward-server", "replay-buffer"]
        for each, name in zip(
            (services.data, services.reward, services.replay), names, strict=True
        ):
            assert each.given == (name, "http://in-process")
            assert each.options["deadline_s"] == 66.0
        if adapter:
            assert found.name == "AdapterPublisher"
            assert noted.given["AdapterPublisher"][0] == (publisher, services.rollout, "run-1")
        else:
            assert found is publisher
        started = [each for each in noted.done if each.startswith("+")]
        apps = [f"+{name}" for name in names]
        if engine == "embedded":
            apps.insert(0, "+engine")
        if plays == "alone":
            apps.append("+environment-server")
        elif plays:
            apps.insert(len(apps) - 3, "+served environment-server")
        assert started == apps
        if plays:
            assert services.environment.given == ("environment-server", "http://in-process")
            given, options = noted.given["EpisodeService"]
            assert given[:2] == (config.environment, "template")
            assert type(given[2]) is type(services.rollout)
            assert given[2] is not services.rollout
            gateway = "http://127.0.0.1:8123" if plays != "alone" else ""
            assert options == {
                "stop_token_ids": [7],
                "gateway": gateway,
                "environment": None,
                "runtime": config.runtime,
            }
            assert noted.given["Template"][0] == ("tokenizer", [7], {"thinks": False})
        else:
            assert services.environment is None
    ended = [each for each in noted.done if each.startswith(("-", "episodes"))]
    backwards = [f"-{each[1:]}" for each in reversed(apps)]
    if plays == "behind a gateway":
        backwards.insert(backwards.index("-served environment-server"), "episodes close")
    assert ended == backwards
    assert all(each.closed for each in services.all())


def test_what_the_caller_gives_is_used_and_kept_for_an_audit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = Config(reproducible=True)
    others = InProcessBackend(None, None, None, None, engine="http://a")  # type: ignore[arg-type]
    with (
        context_of(config, tmp_path) as context,
        raises(ConfigError, field="engine", value="http://a"),
    ):
        others.start(context)

    kept: list[Any] = []
    monkeypatch.setattr(in_process, "keep_problems", lambda *given: kept.append(given))

    def stops(context: Any) -> None:
        raise ConfigError("here")

    monkeypatch.setattr(in_process, "DirectPublisher", stops)
    problems = Problems([], [])
    for audit in (False, True):
        config.trainer.audit = audit
        backend = InProcessBackend(None, None, problems, [])  # type: ignore[arg-type]
        with context_of(config, tmp_path) as context, raises(ConfigError):
            backend.start(context)
    assert kept == [(tmp_path, problems)]


@pytest.mark.parametrize(
    ("wrong", "named"),
    [("--model-path", "model.name"), ("model.dtype", "model.dtype"), (None, None)],
)
def test_an_option_of_the_engine_is_named_as_the_setting(
    wrong: str | None, named: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*given: Any, **options: Any) -> None:
        raise ConfigError("no", field=wrong, value="v", remedy="r")

    monkeypatch.setattr(in_process, "embedded_engine", fails)
    with pytest.raises(ConfigError) as error:
        InProcessBackend._engine(Config(), tmp_path, "1")
    found = error.value
    assert (found.field, found.value, found.remedy) == (named, "v", "r")


@pytest.mark.parametrize("sync", ["http", "shared", "distributed"])
@pytest.mark.parametrize("one_machine", [False, True])
@pytest.mark.parametrize("gpus", [(False, False), (True, False), (False, True), (True, True)])
def test_a_job_group_publishes_as_its_machines_allow(
    sync: str,
    one_machine: bool,
    gpus: tuple[bool, bool],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    noted = Noted()
    engine_on_gpu, trainer_on_gpu = gpus
    config = Config(state_dir=tmp_path)
    config.trainer.weight_sync = sync  # type: ignore[assignment]
    monkeypatch.setattr(type(config.rollout), "is_sglang_on_gpus", engine_on_gpu)
    topology: Any = SimpleNamespace(
        is_one_machine=one_machine,
        host=lambda task: f"host of {task}",
        bind=lambda task, port: (f"bind {task}", port),
        url=lambda task, port, rank=0: f"url {task} {port}",
    )
    services: Any = SimpleNamespace(
        rollout=SimpleNamespace(remove_worker=noted.maker("remove", "removing"))
    )
    board: Any = SimpleNamespace(
        num_nodes="nodes", latest_version="latest", server_died="died", close=noted.maker("closed")
    )
    clients = noted.maker("clients", services)
    monkeypatch.setattr(job_group, "_clients", clients)
    makers = {
        "WeightBoard": board,
        "Health": "health",
        "create_trainer_app": "app",
        "add_experts": "added",
        "Publisher": None,
        "Broadcaster": SimpleNamespace(close=noted.maker("broadcaster closed")),
        "nccl_version": "2.1",
    }
    for name, value in makers.items():
        monkeypatch.setattr(job_group, name, noted.maker(name, value))
    monkeypatch.setattr(
        job_group, "BackgroundServer", lambda *given, **options: _Served(noted, given, options)
    )
    backend = JobGroupBackend(topology, rewards_tried=True)
    with context_of(config, tmp_path) as context:
        context.policy.ranks.device = SimpleNamespace(type="cuda" if trainer_on_gpu else "cpu")
        found, publisher = backend.start(context)
        assert found is services
        assert services.rewards_tried is True
        assert noted.given["clients"][0] == (config, topology, context)
        assert noted.given["WeightBoard"][0] == (tmp_path / "weights",)
        assert noted.given["Health"][0] == (config, topology, "nodes", "latest")
        assert noted.given["create_trainer_app"][0] == (board, "registry", "health")
        assert noted.given["add_experts"][0] == ("app", tmp_path / EXPERTS)
        given, options = noted.given["server"]
        assert given == ("app", "bind ppo-trainer", config.trainer.port)
        assert options == {"died": "died"}
        assert publisher.name == "Publisher"  # type: ignore[attr-defined]
        given, options = noted.given["Publisher"]
        assert given == (board, ["config.json"], "run-1")
        assert options["shared"] is (sync == "shared" or one_machine)
        assert options["has_deltas"] is not one_machine
        assert options["limit_s"] == config.limits.fence_after_s
        assert options["published"] == "published"
        assert (options["broadcaster"] is not None) is (sync == "distributed")
        if sync == "distributed":
            rendezvous = noted.given["Broadcaster"][1]["rendezvous"]
            is_nccl = engine_on_gpu and trainer_on_gpu
            assert rendezvous.backend == ("nccl" if is_nccl else "gloo")
            assert rendezvous.nccl == ("2.1" if is_nccl else "")
            assert rendezvous.gpu_checksums is engine_on_gpu
            assert rendezvous.address == "host of ppo-trainer"
        removed: list[Any] = []
        context.loop.call = removed.append
        options["fence"](SimpleNamespace(url="http://engine"))
        assert (noted.given["remove"][0], removed) == (("http://engine",), ["removing"])
    closed = [each for each in noted.done if "closed" in each]
    at_the_end = ["broadcaster closed"] if sync == "distributed" else []
    assert closed == [*at_the_end, "closed"]
    assert noted.done[-1] == "server ends"


class _Served:
    def __init__(self, noted: Noted, given: Any, options: Any) -> None:
        self.url = "http://here"
        self.noted = noted
        noted.given["server"] = (given, options)

    def __enter__(self) -> "_Served":
        return self

    def __exit__(self, *_: object) -> None:
        self.noted.done.append("server ends")
