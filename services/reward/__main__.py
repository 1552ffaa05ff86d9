"""`python -m services.reward`: the reward-server of a job group, or of this machine."""

from common import config, topology
from common.observe import setup_logging
from services.http.app import serve
from services.http.story import starts, told
from services.reward.app import create_reward_app


def run(settings: config.Config) -> None:
    """Serves until SIGTERM."""
    setup_logging(topology.REWARD, settings.state_dir / "logs", service=topology.REWARD)
    starts(topology.REWARD, told(settings, "reward.functions", "reward.tasks", "reward.workers", "reward.math_timeout_s"))
    host, port = topology.Topology.from_env().bind(topology.REWARD, settings.reward.port)
    serve(create_reward_app(settings.reward, settings.max_body_mb << 20), host, port)


if __name__ == "__main__":
    config.main(run, "services.reward")
