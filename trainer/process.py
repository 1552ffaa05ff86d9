"""One process of the ppo-trainer task: the run on this rank, with the services of the job group."""

import gc
import logging
from contextlib import ExitStack, nullcontext

import torch

from common import VERSION, watchdog
from common import topology as names
from common.clients import Client, DataClient, ReplayClient, RewardClient
from common.config import Config
from common.critic_client import CriticClient
from common.observe import setup_logging
from common.rollout_client import RolloutClient
from common.run_lock import RunLock
from common.schemas import WorkerReport
from common.topology import Topology
from learning.liveness import Liveness
from learning.ranks import Ranks
from trainer.dashboard.health import Health
from trainer.dashboard.replay import LiveReplay
from trainer.loop import train
from trainer.observe.run_dir import console
from trainer.rollouts.services import Services
from trainer.run import Opening, Run
from trainer.server import BackgroundServer, create_trainer_app
from trainer.weights.adapters import AdapterPublisher
from trainer.weights.broadcast import Broadcaster
from trainer.weights.publisher import Publisher, WeightBoard
from trainer.weights.sync import WeightPublisher
from trainer.weights.transfer import BackendName, Rendezvous

log = logging.getLogger(__name__)


def run(config: Config, topology: Topology) -> None:
    """Trains on this rank until the last step."""
    settings = config.trainer
    if settings.num_threads:
        torch.set_num_threads(settings.num_threads)
    torch.manual_seed(config.seed)
    assert settings.run_dir is not None, "`load` sets it"
    patience = 2 * settings.wait_timeout_s + settings.publish_timeout_s
    ranks = Ranks.from_env(patience, settings.device, settings.shard_size)
    setup_logging(f"ppo-trainer-rank{ranks.rank}", config.state_dir / "logs", service=names.TRAINER, rank=ranks.rank)
    place = f"rank {ranks.rank} of {ranks.world_size} on {topology.own_name(names.TRAINER)} ({ranks.device})"
    model, algorithm = config.model.name, config.algorithm.name
    log.info("ppo-trainer %s starts: %s, model=%s algorithm=%s run_dir=%s", VERSION, place, model, algorithm, settings.run_dir)
    if ranks.world_size > 1:
        log.info("waiting for the other ranks at %s", topology.node_ips[0])
    watchdog.start()
    group, alive = topology.group or "local", Liveness(ranks, topology, settings.lost_after_s)
    mine = RunLock.of_new_run(settings.run_dir, group) if ranks.first else nullcontext()  # before the ranks meet
    with mine as lock, watchdog.stalls(), ranks, alive, ExitStack() as stack:
        training = Run.build(config, ranks, settings.run_dir, lock, JobGroupBackend(topology), stack)
        gc.freeze()  # libraries and models stay: the garbage collector need not pass over them
        train(training)
        training.finish()
        ranks.barrier()


class JobGroupBackend:
    """The `Backend` of a job group: services by name, weights pulled by or broadcast to the rollout nodes."""

    _config: Config
    _board: WeightBoard

    def __init__(self, topology: Topology) -> None:
        self.console, self._topology = console(), topology

    def start(self, opening: Opening) -> tuple[Services, WeightPublisher]:
        """See `Backend`. The trainer's own server is up when this returns."""
        config, topology = opening.config, self._topology
        services = _clients(config, topology, opening)
        self._config, self._board = config, (board := WeightBoard(opening.run_dir / "weights"))
        health = Health(config, topology, board.num_nodes, lambda: latest.version if (latest := board.latest()) else None)
        replay = LiveReplay(services.replay, opening.loop)
        app = create_trainer_app(board, opening.registry, health, replay)
        bind = topology.bind(names.TRAINER, config.trainer.port)
        opening.stack.enter_context(server := BackgroundServer(app, *bind))
        opening.stack.callback(board.close)
        opening.say(f"run {opening.run_id}; weights, health and metrics on {server.url}")
        opening.say(f"dashboard {topology.url(names.TRAINER, config.trainer.port)}/dashboard/")
        return services, self._publisher(opening, services)

    def agents(self) -> list[Client]:
        """The agents that are alive."""
        nodes = sorted(int(worker.name.rpartition("-")[2]) for worker in self._board.workers())
        port = self._config.rollout.agent_port
        return [Client(f"{names.ROLLOUT}-{node}", self._topology.url(names.ROLLOUT, port, node)) for node in nodes]

    def _publisher(self, opening: Opening, services: Services) -> WeightPublisher:
        config, run_id, board = opening.config, opening.run_id, self._board

        def fence(worker: WorkerReport) -> None:
            opening.loop.call(services.rollout.remove_worker(worker.url))

        timeout_s, sync = config.trainer.publish_timeout_s, config.trainer.weight_sync
        broadcaster = None
        if sync == "distributed":
            # NCCL needs a GPU at both ends; the embedded engine has none.
            engine_on_gpu = config.rollout.engine == "sglang" and config.rollout.device == "cuda"
            backend: BackendName = "nccl" if engine_on_gpu and opening.policy.ranks.device.type == "cuda" else "gloo"
            rendezvous = Rendezvous(self._topology.host(names.TRAINER), backend, exact=not engine_on_gpu)
            broadcaster = Broadcaster(board, opening.static_files, run_id, timeout_s, rendezvous)
            opening.stack.callback(broadcaster.close)
        publisher = Publisher(
            *(board, opening.static_files, run_id, timeout_s, fence, opening.say),
            published=opening.metrics.published,
            shared=sync == "shared",
            broadcaster=broadcaster,
        )
        if config.lora.publishes_adapter:
            return AdapterPublisher(publisher, services.rollout, run_id, sglang=config.rollout.engine == "sglang")
        return publisher


def _clients(config: Config, topology: Topology, opening: Opening) -> Services:
    patience = config.trainer.service_timeout_s
    services = Services(
        DataClient(names.DATA, topology.url(names.DATA, config.data.port), deadline_s=patience),
        RolloutClient(names.ROLLOUT, topology.url(names.ROLLOUT, config.rollout.router_port), deadline_s=patience),
        RewardClient(names.REWARD, topology.url(names.REWARD, config.reward.port), deadline_s=patience),
        ReplayClient(names.REPLAY, topology.url(names.REPLAY, config.replay.port), deadline_s=patience),
    )
    if config.algorithm.needs_critic and config.critic.location == "server":
        url = topology.url(names.CRITIC, config.critic.port)
        services.critic = CriticClient(names.CRITIC, url, deadline_s=patience)

    async def close() -> None:
        for client in services.all():
            await client.close()

    opening.stack.callback(lambda: opening.loop.call(close()))
    return services
