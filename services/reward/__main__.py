"""`python -m services.reward`: the reward-server of a job group, or of this machine."""

from common.process import topology
from common.process.logs import setup_logging
from common.settings import config
from services.http.app import serve
from services.reward.app import create_reward_app


def run(settings: config.Config) -> None:
    """Serves until SIGTERM."""
    setup_logging(topology.REWARD, settings.state_dir / "logs", service=topology.REWARD)
    host, port = topology.Topology.from_env().bind(topology.REWARD, settings.reward.port)
    reward = settings.reward
    shown = f"functions={','.join(reward.weights)} workers={reward.workers}"
    serve(create_reward_app(reward, settings.max_body_mb << 20), host, port, shown)


if __name__ == "__main__":
    config.main(run, "services.reward")
