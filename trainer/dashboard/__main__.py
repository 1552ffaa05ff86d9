"""Shows run directories in a browser, during and after training: one, several overlaid, or all
below a directory.
"""

from pathlib import Path

from common.errors import ConfigError
from common.process.cli import CommandParser, run
from common.process.logs import setup_logging
from common.process.security import TOKEN, tls, token
from services.http.app import serve
from trainer.dashboard.app import create_dashboard_app
from trainer.dashboard.run_list import RunList

_EPILOG = """\
examples:
  rlhf dashboard runs/my-run
  rlhf dashboard runs                                # all runs below, to choose from
  rlhf dashboard runs/first runs/second --port 9000  # overlaid

A running trainer serves the same page itself, with the health of all services: \
http://ITS-NODE:8004/dashboard/.
With API_TOKEN in the environment the page asks for it.
"""


def parser() -> CommandParser:
    """Returns the command line."""
    made = CommandParser(
        "rlhf dashboard",
        __doc__,
        "RUN_DIR [RUN_DIR ...] [--port PORT] [--host ADDRESS]",
        _EPILOG,
    )
    made.add_argument(
        "run_dir",
        nargs="+",
        type=Path,
        metavar="RUN_DIR",
        help="directory of a run, or one above several",
    )
    made.add_argument("--port", type=int, default=8004, help="port (default 8004)")
    made.add_argument(
        "--host",
        default="127.0.0.1",
        metavar="ADDRESS",
        help="address (default 127.0.0.1, this machine)",
    )
    return made


def main(argv: list[str] | None = None) -> None:
    """Serves the page until it is stopped. Raises ConfigError for a missing directory or an
    unusable port.
    """
    arguments = parser().parse_args(argv)
    if not 0 < arguments.port < 65536:
        raise ConfigError(
            "there is no such port",
            field="--port",
            value=arguments.port,
            remedy="give a port from 1 to 65535",
        )
    app = create_dashboard_app(RunList(arguments.run_dir))
    setup_logging("dashboard")
    access = f"#token=${TOKEN}" if token() else ""
    url = f"{tls().scheme}://{arguments.host}:{arguments.port}/dashboard/{access}"
    print(f"dashboard {url}", flush=True)
    serve(app, arguments.host, arguments.port)


if __name__ == "__main__":
    run(main, "")
