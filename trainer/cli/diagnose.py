"""Says what is wrong with a run, living or dead: what, since when, the evidence and the remedy.

A run that stops by itself writes the same report into its directory (diagnosis.txt).
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from common.process.cli import CommandParser, run
from common.process.security import SecretRedactor
from trainer.cli.commands import run_parser
from trainer.diagnosis.find import find
from trainer.diagnosis.live import collect
from trainer.diagnosis.report import as_json, lines, text
from trainer.observe.run_dir import is_run, no_run

_EPILOG = """\
examples:
  rlhf diagnose runs/demo-seed0
  rlhf diagnose runs/demo-seed0 --all     # with the stacks of every rank
  rlhf diagnose runs/demo-seed0 --json

Exit status 0: nothing is wrong, 1: something is, 2: wrong usage. A living run is asked with the
API_TOKEN of the environment, or the one that jobgroup.local wrote beside its logs.
"""


def parser() -> CommandParser:
    """Returns the command line."""
    usage = "RUN_DIR [--all] [--json] [--logs DIR]"
    made = run_parser("rlhf diagnose", __doc__, usage, _EPILOG)
    made.add_argument("--all", action="store_true", help="also every rank's stacks and the logs")
    made.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    made.add_argument(
        "--logs",
        type=Path,
        metavar="DIR",
        help="directory of jobgroup.local --log-dir, if it is not RUN_DIR/logs",
    )
    return made


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the report; exits with 1 if something is wrong. Raises ConfigError for a path
    without a run.
    """
    arguments = parser().parse_args(argv)
    facts = collect(arguments.run_dir, arguments.logs)
    # A run that could not begin may have written nothing but logs.
    if facts.state == "empty" and not facts.lines and not is_run(arguments.run_dir):
        raise no_run(arguments.run_dir)
    findings = find(facts)
    if arguments.json:
        said = json.dumps(as_json(facts, findings), indent=1, ensure_ascii=False)
    elif arguments.all:
        said = text(facts, findings).rstrip("\n")
    else:
        said = "\n".join(lines(facts, findings))
    print(SecretRedactor().redact(said))
    sys.exit(1 if findings else 0)


if __name__ == "__main__":
    run(main, "")
