"""`python -m services.environment`: an environment-server of a job group, or of this machine."""

import os
import sys

from common.clients.rollout import RolloutClient
from common.process import topology
from common.process.logs import setup_logging
from common.process.metrics import Metrics
from common.settings import config
from services.environment.app import create_environment_app
from services.environment.service import EpisodeService
from services.environment.supervisor import VARIABLE, end_with_parent, keep_alive
from services.environment.template import load_template
from services.http.app import serve


def run(settings: config.Config) -> None:
    """Serves until SIGTERM. Raises ConfigError for a model or an environment that cannot be
    used.
    """
    place = topology.Topology.from_env()
    section = settings.environment
    setup_logging(
        place.own_name(topology.ENVIRONMENT),
        settings.state_dir / "logs",
        service=topology.ENVIRONMENT,
    )

    if VARIABLE in os.environ:
        end_with_parent()
    elif place.num_nodes > 1:
        sys.exit(keep_alive([sys.executable, "-m", "services.environment", *sys.argv[1:]]))

    template, stop_token_ids = load_template(settings.model, settings.sampling.chat_template_kwargs)
    router_url = place.url(topology.ROLLOUT, settings.rollout.router_port)
    metrics = Metrics(topology.ENVIRONMENT)
    service = EpisodeService(
        section,
        template,
        router=RolloutClient(
            "rollout-server", router_url, deadline_s=settings.limits.service_timeout_s
        ),
        stop_token_ids=stop_token_ids,
        metrics=metrics,
        gateway=place.url(topology.ENVIRONMENT, section.port, place.node_rank),
        runtime=settings.runtime,
    )
    app = create_environment_app(
        service, settings.max_body_mb << 20, metrics, nodes=place.num_nodes
    )
    host, port = place.bind(topology.ENVIRONMENT, section.port)
    tools = ",".join(service.runner.tools)
    serve(app, host, port, f"environment={section.name} tools={tools}")


if __name__ == "__main__":
    config.main(run, "services.environment")
