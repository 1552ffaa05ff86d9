"""Builds the tiny base model of the built-in task, a Hugging Face directory, in about a minute on
two CPU cores.
"""

from pathlib import Path

from common.errors import ConfigError
from common.process.cli import CommandParser, run
from common.process.imports import heavy_imports
from common.process.storage import make_directory


def parser() -> CommandParser:
    """Returns the command line."""
    made = CommandParser("rlhf tiny-model", __doc__, "DIRECTORY [--seed N]")
    made.add_argument(
        "directory",
        type=Path,
        metavar="DIRECTORY",
        help="where to write the model; kept if it exists",
    )
    made.add_argument(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="seed of data, weights and batches (default 0)",
    )
    return made


def main(argv: list[str] | None = None) -> None:
    """Builds the model. Raises ConfigError for an unusable directory."""
    arguments = parser().parse_args(argv)
    directory: Path = arguments.directory
    if directory.exists() and not (directory / "config.json").exists():
        raise ConfigError(
            "this exists and is not a model directory",
            field="DIRECTORY",
            value=str(directory),
            remedy="remove it, or name another directory",
        )
    if directory.exists():
        print(f"{directory} has a model already, which is kept")
        return
    make_directory(directory.parent, "DIRECTORY")
    with heavy_imports():
        from trainer.cli.tiny_base import build

    build(directory, arguments.seed)


if __name__ == "__main__":
    run(main, "; nothing was written")
