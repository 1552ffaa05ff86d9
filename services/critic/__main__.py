"""`python -m services.critic`: the critic-server task."""

import signal

from common.models.hub import check_model
from common.process.logs import setup_logging
from common.process.topology import CRITIC, Topology
from common.settings.config import Config, main


def run(config: Config) -> None:
    """Serves until SIGTERM."""
    model = config.critic.model or config.model.name
    check_model(model, "critic.model" if config.critic.model else "model.name")
    # Slow to import, like torch.
    from learning.device import reproducible_numbers
    from services.critic.app import create_critic_app
    from services.http.app import serve

    host, port = Topology.from_env().bind(CRITIC, config.critic.port)
    setup_logging(CRITIC, config.state_dir / "logs", service=CRITIC)
    errors: list[Exception] = []

    def failed(error: Exception) -> None:
        errors.append(error)
        signal.raise_signal(signal.SIGTERM)

    app = create_critic_app(config, failed)
    with reproducible_numbers(config.reproducible):
        serve(app, host, port, f"model={model} state_dir={config.state_dir}")
    if errors:
        raise errors[0]


if __name__ == "__main__":
    main(run, "services.critic")
