"""One process of the ppo-trainer task: the run on this rank, with the services of the job group."""

import gc
from contextlib import ExitStack

from common.clients.base import Client
from common.clients.critic import CriticClient
from common.clients.data import DataClient
from common.clients.environment import EnvironmentClient
from common.clients.replay import ReplayClient
from common.clients.reward import RewardClient
from common.clients.rollout import RolloutClient
from common.process import topology as names
from common.process.topology import Topology
from common.settings.config import Config
from common.wire.schemas import WorkerReport
from trainer.loop import train
from trainer.observe.run_dir import console
from trainer.rank import started
from trainer.rollouts.services import Services
from trainer.run import Opening, Run
from trainer.server import BackgroundServer, create_trainer_app, dashboard_module
from trainer.weights.adapters import AdapterPublisher
from trainer.weights.broadcast import Broadcaster
from trainer.weights.publisher import Publisher, WeightBoard
from trainer.weights.sync import WeightPublisher
from trainer.weights.transfer import BackendName, Rendezvous


def run(config: Config, topology: Topology) -> None:
    """Trains on this rank until the last step."""
    run_dir = config.trainer.run_dir
    assert run_dir is not None, "`load` sets it"
    with started(config, topology, names.TRAINER) as (ranks, lock), ExitStack() as stack:
        training = Run.build(config, ranks, run_dir, lock, JobGroupBackend(topology), stack)
        gc.freeze()  # libraries and models stay: the garbage collector need not scan them
        train(training)
        training.finish()
        ranks.barrier()


class JobGroupBackend:
    """The `Backend` of a job group: services found by name, weights pulled by or broadcast to the
    rollout nodes.
    """

    _config: Config
    _board: WeightBoard

    def __init__(self, topology: Topology) -> None:
        self.console, self._topology = console(), topology

    def start(self, opening: Opening) -> tuple[Services, WeightPublisher]:
        """See `Backend`. The trainer's own server is up when this returns."""
        config, topology = opening.config, self._topology
        services = _clients(config, topology, opening)
        self._config, self._board = config, (board := WeightBoard(opening.run_dir / "weights"))

        def newest_version() -> int | None:
            latest = board.latest()
            return latest.version if latest else None

        dashboard = dashboard_module().dashboard_of_job_group(
            opening.run_dir,
            config,
            topology,
            nodes=board.num_nodes,
            version=newest_version,
            replay=services.replay,
            loop=opening.loop,
        )
        app = create_trainer_app(board, opening.registry, dashboard)
        bind = topology.bind(names.TRAINER, config.trainer.port)
        opening.stack.enter_context(server := BackgroundServer(app, *bind, died=board.server_died))
        opening.stack.callback(board.close)
        opening.say(f"run {opening.run_id}; weights, health and metrics on {server.url}")
        opening.say(f"dashboard {topology.url(names.TRAINER, config.trainer.port)}/dashboard/")
        return services, self._publisher(opening, services)

    def agents(self) -> list[Client]:
        """Returns clients for the agents of the rollout nodes that are alive."""
        nodes = sorted(int(worker.name.rpartition("-")[2]) for worker in self._board.workers())
        port = self._config.rollout.agent_port
        return [
            Client(f"{names.ROLLOUT}-{node}", self._topology.url(names.ROLLOUT, port, node))
            for node in nodes
        ]

    def engine_gpus(self) -> int | None:
        """See `Backend`."""
        return (
            0
            if self._config.rollout.colocate
            else sum(worker.gpus for worker in self._board.workers())
        )

    def _publisher(self, opening: Opening, services: Services) -> WeightPublisher:
        config, run_id, board = opening.config, opening.run_id, self._board

        def fence(worker: WorkerReport) -> None:
            opening.loop.call(services.rollout.remove_worker(worker.url))

        timeout_s, sync = config.trainer.publish_timeout_s, config.trainer.weight_sync
        broadcaster = None
        if sync == "distributed":
            # NCCL refuses two ranks on one GPU, and the embedded engine may share the trainer's: it
            # uses gloo.
            engine_on_gpu = config.rollout.engine == "sglang" and config.rollout.device != "cpu"
            backend: BackendName = (
                "nccl" if engine_on_gpu and opening.policy.ranks.device.type == "cuda" else "gloo"
            )
            rendezvous = Rendezvous(
                self._topology.host(names.TRAINER), backend, gpu_checksums=engine_on_gpu
            )
            broadcaster = Broadcaster(board, opening.static_files, run_id, timeout_s, rendezvous)
            opening.stack.callback(broadcaster.close)
        publisher = Publisher(
            board,
            opening.static_files,
            run_id,
            timeout_s,
            fence,
            opening.say,
            published=opening.metrics.published,
            shared=sync == "shared",
            broadcaster=broadcaster,
        )
        if config.lora.publishes_adapter:
            return AdapterPublisher(publisher, services.rollout, run_id)
        return publisher


def _clients(config: Config, topology: Topology, opening: Opening) -> Services:
    patience = config.trainer.service_timeout_s
    services = Services(
        DataClient(names.DATA, topology.url(names.DATA, config.data.port), deadline_s=patience),
        RolloutClient(
            names.ROLLOUT,
            topology.url(names.ROLLOUT, config.rollout.router_port),
            deadline_s=patience,
        ),
        RewardClient(
            names.REWARD, topology.url(names.REWARD, config.reward.port), deadline_s=patience
        ),
        ReplayClient(
            names.REPLAY, topology.url(names.REPLAY, config.replay.port), deadline_s=patience
        ),
    )
    services.rollout.repeats_prompt = config.rollout.engine == "sglang"
    if config.algorithm.needs_critic and config.critic.location == "server":
        url = topology.url(names.CRITIC, config.critic.port)
        services.critic = CriticClient(names.CRITIC, url, deadline_s=patience)
    if config.environment.name:
        port = config.environment.port

        def node(rank: int) -> Client:
            return Client(
                f"{names.ENVIRONMENT}-{rank}",
                topology.url(names.ENVIRONMENT, port, rank),
                deadline_s=patience,
            )

        url = topology.url(names.ENVIRONMENT, port)
        services.environment = EnvironmentClient(
            names.ENVIRONMENT, url, deadline_s=patience, node=node
        )

    async def close() -> None:
        for client in services.all():
            await client.close()

    opening.stack.callback(lambda: opening.loop.call(close()))
    return services
