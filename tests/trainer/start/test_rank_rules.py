"""Where a run starts: with which status a rank ends, what is entered in which order and left again,
when rewards are tried, and what a run in one process is made of; with stand-ins for the parts.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from common.errors import ConfigError, ServiceError
from common.process import garbage, watchdog
from common.process import topology as names
from common.process.topology import Topology
from common.settings.config import Config
from learning import ranks as of_ranks
from trainer.start import in_process, job_group, program, rank


class Steps:
    """What happened, in order."""

    def __init__(self) -> None:
        self.done: list[Any] = []

    @contextmanager
    def inside(self, name: str, value: Any = None) -> Iterator[Any]:
        self.done.append(f"+{name}")
        yield value
        self.done.append(f"-{name}")


@pytest.mark.parametrize("in_group", [False, True])
@pytest.mark.parametrize(
    ("error", "status"),
    [
        (None, None),
        (ConfigError("wrong"), "setting"),
        (ServiceError("lost"), 1),
        (KeyboardInterrupt(), 130),
        (RuntimeError("a bug"), "raised"),
        (SystemExit(4), 4),
    ],
)
def test_the_status_of_a_rank(
    error: BaseException | None,
    status: object,
    in_group: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if in_group:
        monkeypatch.setenv("SKYPILOT_JOBGROUP_NAME", "demo")
    else:
        monkeypatch.delenv("SKYPILOT_JOBGROUP_NAME", raising=False)
    ended: list[str] = []
    handlers: list[Any] = []
    monkeypatch.setattr(of_ranks, "end", lambda: ended.append("end"))
    monkeypatch.setattr(signal, "signal", lambda *given: handlers.append(given))
    monkeypatch.setattr(program, "exit_despite_hung_tracker", nullcontext)

    def main() -> None:
        if error is not None:
            raise error

    if error is None:
        program.run_rank(main)
    elif status == "raised":
        with pytest.raises(RuntimeError):
            program.run_rank(main)
    else:
        with pytest.raises(SystemExit) as ends:
            program.run_rank(main)
        wrong_setting = names.WRONG_SETTING if in_group else 2
        assert ends.value.code == (wrong_setting if status == "setting" else status)
    assert handlers == [(signal.SIGTERM, signal.default_int_handler)]
    assert bool(ended) is (error is None)
    if isinstance(error, ServiceError):
        assert error.message in capsys.readouterr().err


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("task", [names.TRAINER, "sft"])
def test_rank_0_has_the_lock_before_the_ranks_meet_and_gives_it_back_last(
    number: int, task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = Steps()
    config = Config(state_dir=tmp_path / "state", seed=7)
    config.trainer.run_dir = tmp_path / "run"
    topology = Topology(group="demo")

    class Ranks:
        rank = number
        world_size = 2
        is_rank_zero = number == 0
        device = "cpu"

        @classmethod
        def from_env(cls, stuck_s: float, given: Config) -> Any:
            steps.done.append(("ranks", stuck_s, given is config))
            return cls()

        def __enter__(self) -> None:
            steps.done.append("+ranks")

        def __exit__(self, *_: object) -> None:
            steps.done.append("-ranks")

    class Liveness:
        before_end: Any = None

        def __init__(self, ranks: Any, given: Any, lost_s: float, stuck_after_s: float) -> None:
            limits = config.limits
            assert given is topology
            assert (lost_s, stuck_after_s) == (limits.lost_after_s, limits.stuck_after_s)

        def __enter__(self) -> None:
            steps.done.append("+liveness")
            assert self.before_end.args == (config.trainer.run_dir, config, services)

        def __exit__(self, *_: object) -> None:
            steps.done.append("-liveness")

    services = topology if task == names.TRAINER else None
    monkeypatch.setattr(rank, "Ranks", Ranks)
    monkeypatch.setattr(rank, "Liveness", Liveness)

    def locked(folder: Path, name: str) -> Any:
        steps.done.append(("lock", folder, name))
        return steps.inside("lock", "the lock")

    monkeypatch.setattr(rank, "RunLock", SimpleNamespace(of_new_run=locked))
    monkeypatch.setattr(watchdog, "start", lambda: steps.done.append("watchdog"))
    monkeypatch.setattr(watchdog, "stalls", lambda: steps.inside("stalls"))
    monkeypatch.setattr(rank, "diagnosed", lambda *given: steps.inside("diagnosed"))
    monkeypatch.setattr(
        rank, "reproducible_numbers", lambda given: steps.inside(f"numbers {given}")
    )
    monkeypatch.setattr(
        rank, "write_topology", lambda *given: steps.done.append(("topology", *given))
    )
    logs: list[Any] = []
    monkeypatch.setattr(
        rank, "setup_logging", lambda *given, **options: logs.append((given, options))
    )
    seeds: list[int] = []
    monkeypatch.setattr(torch, "manual_seed", seeds.append)
    held: Any
    with rank.started(config, topology, task) as (_, held):
        steps.done.append("work")
        assert held == ("the lock" if number == 0 else None)
    assert seeds == [7]
    folder = config.state_dir / "logs"
    assert logs == [((f"{task}-rank{number}", folder), {"service": task, "rank": number})]
    first = [
        ("ranks", config.limits.stuck_after_s, True),
        "watchdog",
    ]
    of_zero = [("lock", config.trainer.run_dir, "demo"), "+lock"]
    written = [("topology", config.trainer.run_dir, services, 2), "+diagnosed"]
    inner = [
        "+numbers False",
        "+ranks",
        "+liveness",
        "work",
        "-liveness",
        "-ranks",
        "-numbers False",
    ]
    if number == 0:
        expected = [*first, *of_zero, "+stalls", *written, *inner, "-diagnosed", "-stalls", "-lock"]
    else:
        expected = [*first, "+stalls", *inner, "-stalls"]
    assert steps.done == expected


@pytest.mark.parametrize(
    ("resume", "has_checkpoints", "is_rank_zero"), list(product([False, True], repeat=3))
)
def test_rewards_are_tried_by_rank_0_of_a_run_that_begins(
    resume: bool,
    has_checkpoints: bool,
    is_rank_zero: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps = Steps()
    config = Config()
    config.trainer.run_dir = tmp_path
    config.checkpoint.resume = resume
    if has_checkpoints:
        (tmp_path / "checkpoints").mkdir()
    topology = Topology()
    ranks = SimpleNamespace(barrier=lambda: steps.done.append("barrier"))
    lock = "the lock" if is_rank_zero else None
    training = SimpleNamespace(finish=lambda: steps.done.append("finish"))

    def build(given: Any, of: Any, folder: Path, **options: Any) -> Any:
        backend = options["backend"]
        assert (given, of, folder, options["lock"]) == (config, ranks, tmp_path, lock)
        steps.done.append(f"build, tried {backend._rewards_tried}")
        options["stack"].callback(lambda: steps.done.append("closed"))
        return training

    def tried(given: Config, here: Topology) -> bool:
        assert (given, here) == (config, topology)
        steps.done.append("try")
        return True

    monkeypatch.setattr(
        job_group, "started", lambda *given: steps.inside(f"started {given[2]}", (ranks, lock))
    )
    monkeypatch.setattr(job_group, "_try_rewards", tried)
    monkeypatch.setattr(job_group, "build_run", build)
    monkeypatch.setattr(job_group, "train", lambda run: steps.done.append(run is training))
    monkeypatch.setattr(garbage, "collect_less_often", lambda how: None)
    job_group.run(config, topology)
    is_tried = is_rank_zero and not (resume and has_checkpoints)
    assert steps.done == [
        "+started ppo-trainer",
        *(["try"] if is_tried else []),
        f"build, tried {is_tried}",
        True,
        "finish",
        "barrier",
        "closed",
        "-started ppo-trainer",
    ]


@pytest.mark.parametrize("outcome", ["tried", "not healthy", "no prompts", "a wrong function"])
def test_a_trial_of_the_rewards_needs_both_services(
    outcome: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    config = Config()
    config.data.port = 18001
    config.reward.port = 18002
    topology: Any = SimpleNamespace(url=lambda task, port: f"http://{task}:{port}")
    made: list[Any] = []
    tried: list[Any] = []

    class Service:
        def __init__(self, name: str, url: str) -> None:
            self.name = name
            self.url = url
            self.closed = False
            made.append(self)

        async def __aenter__(self) -> None:
            pass

        async def __aexit__(self, *_: object) -> None:
            self.closed = True

        async def train_prompts(self, limit: int, offset: int) -> list[str]:
            assert (self.name, limit, offset) == ("data-server", 1, 0)
            if outcome == "no prompts":
                raise ServiceError("none")
            return ["a prompt"]

    async def healthy(services: Any, limit_s: float, say: Any) -> None:
        assert [each.name for each in services] == ["data-server", "reward-server"]
        assert limit_s == 10.0
        if outcome == "not healthy":
            raise ServiceError("starts")

    async def rewards(service: Any, prompt: Any) -> None:
        tried.append((service.name, prompt))
        if outcome == "a wrong function":
            raise ConfigError("wrong")

    monkeypatch.setattr(job_group, "DataClient", Service)
    monkeypatch.setattr(job_group, "RewardClient", Service)
    monkeypatch.setattr(job_group, "wait_healthy", healthy)
    monkeypatch.setattr(job_group, "try_rewards", rewards)
    if outcome == "a wrong function":
        with pytest.raises(ConfigError):
            job_group._try_rewards(config, topology)
    else:
        assert job_group._try_rewards(config, topology) is (outcome == "tried")
    is_said = any("are not tried before" in line for line in caplog.messages)
    assert is_said is (outcome in ("not healthy", "no prompts"))
    assert bool(tried) is (not is_said)
    assert tried in ([], [("reward-server", "a prompt")])
    urls = ["http://data-server:18001", "http://reward-server:18002"]
    assert [each.url for each in made] == urls
    assert all(each.closed for each in made)


@pytest.mark.parametrize("given_dir", [None, "mine"])
def test_a_run_in_one_process_is_made_of_what_it_was_given(
    given_dir: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    steps = Steps()
    config = Config(seed=5, reproducible=True)
    config.trainer.run_dir = Path(given_dir) if given_dir else None
    folder = Path(given_dir or "runs/local")
    built: list[Any] = []
    alone = object()

    def build(*given: Any, **options: Any) -> Any:
        built.append((given, options))
        steps.done.append("build")
        options["stack"].callback(lambda: steps.done.append("closed"))
        return SimpleNamespace(finish=finish)

    def finish() -> Path:
        steps.done.append("finish")
        return Path("last")

    def locked(*given: Any) -> Any:
        steps.done.append(given)
        return steps.inside("lock", "the lock")

    monkeypatch.setattr(in_process, "RunLock", SimpleNamespace(of_new_run=locked))
    monkeypatch.setattr(in_process, "only_run", lambda where: steps.inside(f"only {where}"))
    monkeypatch.setattr(in_process, "diagnosed", lambda *given: steps.inside("diagnosed"))
    monkeypatch.setattr(
        in_process, "reproducible_numbers", lambda given: steps.inside(f"numbers {given}")
    )
    monkeypatch.setattr(of_ranks.Ranks, "alone", lambda given: alone)
    monkeypatch.setattr(in_process, "build_run", build)
    monkeypatch.setattr(watchdog, "interpreter_guarded", lambda: steps.inside("guard"))
    monkeypatch.setattr(in_process, "train", lambda run: steps.done.append("train"))
    seeds: list[int] = []
    monkeypatch.setattr(torch, "manual_seed", seeds.append)
    console: Any = object()
    transport: Any = object()
    problems: Any = object()
    rewards: Any = [object()]
    listener: Any = object()
    environment: Any = object()
    path = in_process.train_in_process(
        config,
        console,
        transport,
        problems=problems,
        rewards=rewards,
        listener=listener,
        engine=["http://a", "http://b"],
        environment=environment,
    )
    assert (path, seeds) == (Path("last"), [5])
    [(given, options)] = built
    assert given == (config, alone, folder)
    assert (options["lock"], options["listener"]) == ("the lock", listener)
    backend = options["backend"]
    assert backend.console is console
    assert backend.rollout_transport is transport
    assert backend.problems is problems
    assert backend.rewards is rewards
    assert backend.environment is environment
    assert backend.engine == ["http://a", "http://b"]
    assert backend.given == ["prompts", "rewards", "environment"]
    assert (backend.data, backend.engine_kind) == ("rows of the caller", "sglang")
    assert steps.done == [
        f"+only {folder}",
        (folder, "in-process"),
        "+lock",
        "+diagnosed",
        "+numbers True",
        "build",
        "+guard",
        "train",
        "finish",
        "-guard",
        "closed",
        "-numbers True",
        "-diagnosed",
        "-lock",
        f"-only {folder}",
    ]
    in_process.train_in_process(config)
    backend = built[1][1]["backend"]
    assert (backend.engine, backend.given, backend.data) == ("embedded", [], "")
    assert backend.engine_kind == "embedded"
