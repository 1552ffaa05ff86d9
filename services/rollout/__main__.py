"""`python -m services.rollout`: the agent of a rollout node, with its engine, and on node
0 the router, until SIGTERM. With `rollout.nodes_per_engine` several nodes form one engine.

Exit status `setting_status()` means a wrong setting, including one that the engine refuses; 1 means
that the engine failed several times in a row, at its start or soon after it.
"""

from common.clients.rollout import BASE_VERSION
from common.errors import ConfigError
from common.models.hub import text_config
from common.process.cli import fail
from common.process.logs import setup_logging
from common.process.metrics import Metrics
from common.process.topology import ROLLOUT, Topology, setting_status
from common.settings.config import Config, main
from services.http.app import serve
from services.rollout.app import create_agent_app
from services.rollout.engine_client import engine_command, first_node
from services.rollout.first_node import FirstNodeAgent
from services.rollout.further_node import FurtherNodeAgent
from services.rollout.router import chosen_router, router_command


def run(config: Config) -> None:
    """Serves until SIGTERM. Raises ConfigError when a setting or a port cannot be used."""
    topology = Topology.from_env()
    setup_logging(topology.own_name(ROLLOUT), config.state_dir / "logs", service=ROLLOUT)
    if config.rollout.engine == "sglang":
        text_config(config.model.name, ask_hub=True)  # the command depends on it

    # Making the commands checks the settings before anything starts.
    engine_command(config, topology, model_path=config.model.name, weight_version=BASE_VERSION)
    if topology.node_rank == 0:
        router_command(config, topology)

    metrics = Metrics("rollout-server")
    agent: FirstNodeAgent | FurtherNodeAgent
    role = ""
    if topology.node_rank == first_node(config, topology):
        agent = FirstNodeAgent(config, topology, metrics)
    else:
        agent = FurtherNodeAgent(config, topology, metrics)
        role = f" of the engine of {agent.first_node}"
    router, reason = chosen_router(config)
    because = f" ({reason})" if reason else ""
    settings = (
        f"node={topology.node_rank}/{topology.num_nodes} model={config.model.name} "
        f"engine={config.rollout.engine} router={router}{because}{role}"
    )
    host, port = topology.bind(ROLLOUT, config.rollout.agent_port)
    serve(create_agent_app(agent, metrics), host, port, settings)

    if agent.fatal is not None:
        fail(agent.fatal, setting_status() if isinstance(agent.fatal, ConfigError) else 1)


if __name__ == "__main__":
    main(run, "services.rollout")
