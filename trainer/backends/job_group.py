"""The backend of a job group: the services are tasks of it, and engines pull their weights."""

from functools import partial
from typing import Any, Literal, TypeVar

from common.clients.base import Client
from common.clients.data import DataClient
from common.clients.environment import EnvironmentClient
from common.clients.replay import ReplayClient
from common.clients.reward import RewardClient
from common.clients.rollout import RolloutClient
from common.process import topology as names
from common.process.helpers import helper_processes
from common.process.security import TOKEN, token
from common.process.topology import Topology
from common.settings.config import Config
from common.wire.schemas import WorkerReport
from learning.weight_group import nccl_version
from trainer.algorithms.spool import EXPERTS
from trainer.backends.backend import Backend, BackendContext
from trainer.backends.server import BackgroundServer, add_experts, create_trainer_app
from trainer.diagnosis.health import Health
from trainer.observe.run_dir import console
from trainer.rollouts.services import Services
from trainer.weights.adapters import AdapterPublisher
from trainer.weights.board import WeightBoard
from trainer.weights.broadcast import Broadcaster
from trainer.weights.layouts import Sharding
from trainer.weights.publisher import Publisher
from trainer.weights.sync import WeightPublisher
from trainer.weights.transfer import BackendName, Rendezvous

_C = TypeVar("_C", bound=Client)
_READERS = 4
"""Most processes that read answers, which start as they are needed: many answers end together."""
_READ_APART_TOKENS = 1 << 20
"""A process of its own reads the engines' answers if those of a step have this many tokens: in
rank 0 they would take Python's lock for .3 s, and the update beside it would wait."""


class JobGroupBackend(Backend):
    """The `Backend` of a job group: services found by name, weights pulled by or broadcast to the
    rollout nodes.
    """

    _config: Config
    _board: WeightBoard

    def __init__(self, topology: Topology, rewards_tried: bool) -> None:
        self.console = console()
        self._topology = topology
        self._rewards_tried = rewards_tried

    def start(self, context: BackendContext) -> tuple[Services, WeightPublisher]:
        """See `Backend`. The trainer's own server is up when this returns."""
        config = context.config
        topology = self._topology
        services = _clients(config, topology, context)
        services.rewards_tried = self._rewards_tried
        board = WeightBoard(context.run_dir / "weights")
        self._config = config
        self._board = board

        health = Health(config, topology, board.num_nodes, board.latest_version)
        app = create_trainer_app(board, context.registry, health)
        add_experts(app, config.state_dir / EXPERTS)
        host, port = topology.bind(names.TRAINER, config.trainer.port)
        server = BackgroundServer(app, host, port, died=board.server_died)
        context.stack.enter_context(server)
        context.stack.callback(board.close)
        context.say(f"run {context.run_id}; weights, health and metrics on {server.url}")
        access = f"#token=${TOKEN}" if token() else ""
        url = topology.url(names.TRAINER, config.trainer.port)
        context.say(f"dashboard {url}/dashboard/{access}")
        return services, self._publisher(context, services)

    @property
    def engine_kind(self) -> Literal["embedded", "sglang"]:
        return self._config.rollout.engine

    def agents(self) -> list[Client]:
        """Returns clients for the agents of the rollout nodes that are alive."""
        # Only the first node of an engine reports; the others have the numbers after it.
        nodes = sorted(
            int(worker.name.rpartition("-")[2]) + number
            for worker in self._board.workers()
            for number in range(worker.nodes_per_engine)
        )
        port = self._config.rollout.agent_port
        return [
            Client(f"{names.ROLLOUT}-{node}", self._topology.url(names.ROLLOUT, port, node))
            for node in nodes
        ]

    @property
    def engine_gpus(self) -> int | None:
        if self._config.rollout.colocate:
            return 0
        return sum(worker.gpus for worker in self._board.workers())

    def _publisher(self, context: BackendContext, services: Services) -> WeightPublisher:
        config = context.config

        def fence(worker: WorkerReport) -> None:
            context.loop.call(services.rollout.remove_worker(worker.url))

        sync = config.trainer.weight_sync
        # A file need not be sent where it can be read.
        is_one_disk = self._topology.is_one_machine
        publisher = Publisher(
            self._board,
            context.static_files,
            context.run_id,
            limit_s=config.limits.fence_after_s,
            fence=fence,
            say=context.say,
            published=context.metrics.published,
            shared=sync == "shared" or is_one_disk,
            has_deltas=not is_one_disk,
            broadcaster=self._broadcaster(context) if sync == "distributed" else None,
        )
        if config.lora.publishes_adapter:
            return AdapterPublisher(publisher, services.rollout, context.run_id)
        return publisher

    def _broadcaster(self, context: BackendContext) -> Broadcaster:
        config = context.config
        # NCCL refuses two ranks on one GPU, and the embedded engine may share the trainer's: it
        # uses gloo.
        engine_on_gpu = config.rollout.is_sglang_on_gpus
        trainer_on_gpu = context.policy.ranks.device.type == "cuda"
        backend: BackendName = "nccl" if engine_on_gpu and trainer_on_gpu else "gloo"
        broadcaster = Broadcaster(
            self._board,
            context.static_files,
            context.run_id,
            limit_s=config.limits.fence_after_s,
            rendezvous=Rendezvous(
                self._topology.host(names.TRAINER),
                backend,
                gpu_checksums=engine_on_gpu,
                sharding=Sharding(
                    expert_groups=config.rollout.expert_groups,
                    attention_groups=config.rollout.attention_groups,
                ),
                nccl=nccl_version() if backend == "nccl" else "",
            ),
        )
        context.stack.callback(broadcaster.close)
        return broadcaster


def _clients(config: Config, topology: Topology, context: BackendContext) -> Services:
    """Returns a client for each service of the job group, all closed with the run."""
    patience = config.limits.service_timeout_s

    def client(kind: type[_C], task: str, port: int, rank: int = 0, **options: Any) -> _C:
        service = f"{task}-{rank}" if rank else task
        return kind(service, topology.url(task, port, rank), deadline_s=patience, **options)

    services = Services(
        data=client(DataClient, names.DATA, config.data.port),
        rollout=client(RolloutClient, names.ROLLOUT, config.rollout.router_port),
        reward=client(RewardClient, names.REWARD, config.reward.port),
        replay=client(ReplayClient, names.REPLAY, config.replay.port),
    )
    # With the experts of its tokens an answer is a hundred times as long.
    replays = config.trainer.routing_replay
    if config.step_tokens >= (_READ_APART_TOKENS // 100 if replays else _READ_APART_TOKENS):
        readers = helper_processes(_READERS)
        services.rollout.directory = config.state_dir / EXPERTS
        services.rollout.readers = context.stack.enter_context(readers)
    services.rollout.repeats_prompt = config.rollout.engine == "sglang"
    services.rollout.seeds_apart = config.reproducible and config.rollout.engine == "sglang"
    if config.environment.name:
        port = config.environment.port
        node = partial(client, Client, names.ENVIRONMENT, port)
        services.environment = client(EnvironmentClient, names.ENVIRONMENT, port, node=node)

    async def close() -> None:
        for client in services.all():
            await client.close()

    context.stack.callback(lambda: context.loop.call(close()))
    return services
