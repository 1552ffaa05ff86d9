"""`torchrun … -m trainer`: one process per GPU (or per node on CPUs) of the ppo-trainer task."""

import gc
import logging
import signal
from contextlib import ExitStack
from pathlib import Path

import torch

from common import topology as names
from common import watchdog
from common.clients import Client, DataClient, ReplayClient, RewardClient
from common.config import Config, fail, load, program
from common.critic_client import CriticClient
from common.errors import ConfigError, ServiceError
from common.logs import last_words, set_run
from common.observe import Metrics, setup_logging
from common.rollout_client import RolloutClient
from common.schemas import WorkerReport
from common.topology import Topology
from learning.liveness import Liveness
from learning.ranks import Ranks, end
from services.http.story import starts, told
from trainer.background import LoopThread
from trainer.dashboard.health import Health
from trainer.dashboard.replay import LiveReplay
from trainer.lead import Lead, new_run_id, open_checkpoints, resumed_learner
from trainer.loop import save_last, train
from trainer.observe.prometheus import TrainerMetrics
from trainer.observe.run_dir import Recorder, console
from trainer.policy.critic import ValueFunction, value_function
from trainer.policy.policy import Learner
from trainer.policy.scorer import load_tokenizer, stop_token_ids
from trainer.rollouts.collector import Progress, Services
from trainer.rollouts.prompts import Prompter
from trainer.server import BackgroundServer, create_trainer_app
from trainer.trackers.check import check
from trainer.weights.adapters import AdapterPublisher, static_files
from trainer.weights.broadcast import Broadcaster
from trainer.weights.delivery import Publishes
from trainer.weights.publisher import Publisher, WeightBoard
from trainer.weights.transfer import BackendName, Meeting

log = logging.getLogger(__name__)


def main() -> None:
    """Runs this rank; a wrong setting ends with status 2, any other named error with 1, Ctrl-C with 130."""
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        config = load(prog=program("trainer"))
        run(config, Topology.from_env())
    except ConfigError as error:
        fail(error)
    except ServiceError as error:
        fail(error, status=1)
    except KeyboardInterrupt:
        last_words("interrupted; start again with the same run directory to go on from its newest checkpoint")
        raise SystemExit(130) from None


def _interrupt(_sig: int, _frame: object) -> None:
    raise KeyboardInterrupt


def run(config: Config, topology: Topology) -> None:
    """Trains on this rank until the last step; rank 0 also leads."""
    settings = config.trainer
    if settings.num_threads:
        torch.set_num_threads(settings.num_threads)
    torch.manual_seed(config.seed)
    run_dir = settings.run_dir or Path("runs") / (topology.group or "local")
    patience = 2 * settings.wait_timeout_s + settings.publish_timeout_s
    ranks = Ranks.from_env(patience, settings.device, settings.shard_size)
    setup_logging(f"ppo-trainer-rank{ranks.rank}", config.state_dir / "logs", service=names.TRAINER, rank=ranks.rank)
    _say_start(config, ranks, topology, run_dir)
    watchdog.start()
    with (
        watchdog.stalls(settings.stall_dump_s),
        ranks,
        Liveness(ranks, topology, settings.lost_after_s),
        ExitStack() as stack,
    ):
        if ranks.first:
            check(config.trackers)
        watchdog.at("loading the model")
        learner, progress, saved = resumed_learner(config, ranks, run_dir)
        checkpoints = open_checkpoints(config, ranks, run_dir)
        lead, board, services, loop = None, None, None, None
        run_id = new_run_id(topology.group or "local")
        if ranks.first:
            set_run(run_id)
            loop = stack.enter_context(LoopThread())
            services = _services(config, topology, loop, stack)
        critic = value_function(config, ranks, services.critic if services else None, loop.call if loop else None, run_id)
        watchdog.at("waiting for the services and the first publishing")
        if services and loop:
            lead, board = _lead(config, topology, learner, critic, services, loop, run_dir, progress, run_id, stack)
            lead.prepare()
        else:
            learner.share_weights()
        if critic:
            critic.restore(saved)
        total_steps = int(ranks.broadcast(str(lead.total_steps).encode() if lead else b""))
        learner.total_steps = total_steps
        if lead is None:
            train(learner, critic, ranks, None, total_steps, checkpoints)
            watchdog.at("the end of the run")
            save_last(checkpoints, learner, critic, None)
        else:
            gc.freeze()  # libraries and model stay: the search for cycles need not pass over them again and again
            with lead.collecting():
                train(learner, critic, ranks, lead, total_steps, checkpoints)
            watchdog.at("the end of the run")
            lead.conclude(lambda: save_last(checkpoints, learner, critic, lead))
            assert board is not None
            lead.goodbye(_agents(config, topology, board))
        ranks.barrier()


def _say_start(config: Config, ranks: Ranks, topology: Topology, run_dir: Path) -> None:
    """The first lines of the log. Every rank has one; that the ranks meet can take as long as the slowest of their nodes."""
    settings = ("model.name", "algorithm.name", "trainer.batch_size", "sampling.group_size", "trainer.max_staleness", "seed")
    place = f"rank {ranks.rank} of {ranks.world_size} on {topology.own_name(names.TRAINER)} ({ranks.device})"
    starts(names.TRAINER, f"{place}, run directory {run_dir}, {told(config, *settings)}")
    if ranks.world_size > 1:
        log.info("waiting for the other ranks to meet at %s", topology.node_ips[0])


def _services(config: Config, topology: Topology, loop: LoopThread, stack: ExitStack) -> Services:
    """The clients of rank 0; `stack` closes them."""
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
    for client in services.all():
        stack.callback(_close, loop, client)
    return services


def _lead(
    config: Config,
    topology: Topology,
    learner: Learner,
    critic: ValueFunction | None,
    services: Services,
    loop: LoopThread,
    run_dir: Path,
    progress: Progress,
    run_id: str,
    stack: ExitStack,
) -> tuple[Lead, WeightBoard]:
    """HTTP server and publisher of rank 0; `stack` ends them."""
    metrics = Metrics("ppo-trainer")
    numbers = TrainerMetrics(metrics)
    recorder = stack.enter_context(Recorder(run_dir, config, console(), learner.step, numbers.tracked))
    recorder.say(f"run directory {run_dir}" + (f", going on after step {learner.step}" if learner.step else ""))
    board = WeightBoard(run_dir / "weights")
    health = Health(config, topology, board.num_nodes, lambda: latest.version if (latest := board.latest()) else None)
    app = create_trainer_app(board, metrics, config.trainer.max_requests, health, LiveReplay(services.replay, loop))
    stack.enter_context(server := BackgroundServer(app, *topology.bind(names.TRAINER, config.trainer.port)))
    recorder.say(f"run {run_id}; weights, health and metrics on {server.url}")
    stack.callback(board.close)
    recorder.say(f"dashboard {topology.url(names.TRAINER, config.trainer.port)}/dashboard/")
    tokenizer = load_tokenizer(config.model)
    prompter = Prompter(tokenizer, config.sampling.system_prompt, stop_token_ids(learner.policy, tokenizer))

    def fence(worker: WorkerReport) -> None:
        loop.call(services.rollout.remove_worker(worker.url))

    static = static_files(config, learner.policy, tokenizer, run_dir / "model")
    timeout_s, sync = config.trainer.publish_timeout_s, config.trainer.weight_sync
    broadcaster = None
    if sync == "distributed":
        broadcaster = Broadcaster(board, static, run_id, timeout_s, _meeting(config, topology, learner.ranks.device))
        stack.callback(broadcaster.close)
    publisher: Publishes = Publisher(
        *(board, static, run_id, timeout_s, fence, recorder.say),
        published=numbers.published,
        shared=sync == "shared",
        broadcaster=broadcaster,
    )
    if config.lora.publishes_adapter:
        publisher = AdapterPublisher(publisher, services.rollout, run_id, sglang=config.rollout.engine == "sglang")
    lead = Lead(
        config,
        learner,
        critic,
        tokenizer,
        services,
        prompter,
        publisher,
        loop,
        recorder,
        numbers,
        progress,
        run_id,
    )
    return lead, board


def _meeting(config: Config, topology: Topology, device: torch.device) -> Meeting:
    """NCCL needs a GPU at both ends; the embedded engine has none."""
    engine_on_gpu = config.rollout.engine == "sglang" and config.rollout.device == "cuda"
    backend: BackendName = "nccl" if engine_on_gpu and device.type == "cuda" else "gloo"
    return Meeting(topology.host(names.TRAINER), backend, exact=not engine_on_gpu)


def _close(loop: LoopThread, client: Client) -> None:
    loop.call(client.close())


def _agents(config: Config, topology: Topology, board: WeightBoard) -> list[Client]:
    """A client for the agent of every rollout node that is alive."""
    nodes = sorted(int(worker.name.rpartition("-")[2]) for worker in board.workers())
    port = config.rollout.agent_port
    return [Client(f"{names.ROLLOUT}-{node}", topology.url(names.ROLLOUT, port, node)) for node in nodes]


if __name__ == "__main__":
    main()
    end()
