"""`python -m services.replay`: the replay-buffer task."""

from common.process.logs import setup_logging
from common.process.topology import REPLAY, Topology
from common.settings.config import Config, main
from services.http.app import serve
from services.replay.app import create_replay_app


def run(config: Config) -> None:
    """Serves until SIGTERM."""
    host, port = Topology.from_env().bind(REPLAY, config.replay.port)
    setup_logging(REPLAY, config.state_dir / "logs", service=REPLAY)
    app = create_replay_app(config.replay, config.state_dir, config.max_body_mb << 20)
    replay = config.replay
    settings = (
        f"capacity={replay.capacity} reuse_ratio={replay.reuse_ratio} state_dir={config.state_dir}"
    )
    serve(app, host, port, settings)


if __name__ == "__main__":
    main(run, "services.replay")
