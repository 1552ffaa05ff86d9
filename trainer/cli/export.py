"""Exports a checkpoint as a plain Hugging Face directory; a LoRA adapter is merged into its
model.
"""

from pathlib import Path

from common.process.cli import CommandParser, run
from trainer.policy.export import DTYPES, export

_EPILOG = """\
examples:
  rlhf export runs/math/checkpoints/step_000500 models/math
  rlhf export outputs/final models/final --dtype bfloat16
"""


def parser() -> CommandParser:
    """Returns the command line."""
    made = CommandParser("rlhf export", __doc__, "CHECKPOINT OUT [--dtype TYPE]", _EPILOG)
    made.add_argument(
        "checkpoint",
        type=Path,
        metavar="CHECKPOINT",
        help="a directory with a model or with a LoRA adapter",
    )
    made.add_argument("out", type=Path, metavar="OUT", help="a directory that does not exist yet")
    made.add_argument(
        "--dtype", choices=DTYPES, default="float32", help="type of the weights (default float32)"
    )
    made.add_argument(
        "--trust-remote-code", action="store_true", help="run Python code that comes with the model"
    )
    return made


def main(argv: list[str] | None = None) -> None:
    """Runs the command line."""
    arguments = parser().parse_args(argv)
    written = export(
        arguments.checkpoint,
        arguments.out,
        dtype=arguments.dtype,
        trust_remote_code=arguments.trust_remote_code,
    )
    print(f"written to {written}")


if __name__ == "__main__":
    run(main, "; nothing was written")
