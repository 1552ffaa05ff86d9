"""`python -m services.data`: loads the data set, then serves it. A data set that does not load ends
it with status 2.
"""

from common.process.logs import setup_logging
from common.process.topology import DATA, Topology
from common.settings.config import Config, main
from services.data.app import create_data_app
from services.data.loaders import load_split
from services.http.app import serve


def run(config: Config) -> None:
    """Loads, then serves until SIGTERM. Raises ConfigError when data, state directory or port
    cannot be used.
    """
    topology = Topology.from_env()
    log = setup_logging(topology.own_name(DATA), config.state_dir / "logs", service=DATA)
    log.info("loading %s", config.data.source)
    train = load_split(config.data, "train", config.seed)
    evaluation = load_split(config.data, "eval", config.seed)
    log.info(
        "loaded %s: %d training and %d held-out problems",
        config.data.source,
        len(train),
        len(evaluation),
    )
    settings = (
        f"source={config.data.source} curriculum={config.data.curriculum} "
        f"state_dir={config.state_dir}"
    )
    host, port = topology.bind(DATA, config.data.port)
    serve(create_data_app(config, train, evaluation), host, port, settings)


if __name__ == "__main__":
    main(run, "services.data")
