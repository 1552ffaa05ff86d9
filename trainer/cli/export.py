"""Exports a checkpoint as a plain Hugging Face directory; a LoRA adapter is merged into its
model.
"""

import shutil
from pathlib import Path
from typing import Any

from common.errors import ConfigError
from common.models.hub import check_model
from common.process.cli import CommandParser, run
from common.process.imports import heavy_imports
from common.process.storage import make_directory

DTYPES = ("float32", "bfloat16", "float16")
_EPILOG = """\
examples:
  python -m trainer.export runs/math/checkpoints/step_000500 models/math
  python -m trainer.export outputs/final models/final --dtype bfloat16
"""


def parser() -> CommandParser:
    """Returns the command line."""
    made = CommandParser("trainer.export", __doc__ or "", "CHECKPOINT OUT [--dtype TYPE]", _EPILOG)
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
    print(f"written to {export(**vars(arguments))}")


def export(
    checkpoint: Path, out: Path, dtype: str = "float32", trust_remote_code: bool = False
) -> Path:
    """Writes the model of `checkpoint` and its tokenizer to `out`, atomically, and returns that
    path.

    Raises ConfigError when `out` exists or the checkpoint cannot be loaded.
    """
    if out.exists():
        raise ConfigError(
            "this directory already exists",
            field="OUT",
            value=str(out),
            remedy="name a directory that does not exist yet",
        )
    if not checkpoint.is_dir():
        raise ConfigError(
            "there is no such directory",
            field="CHECKPOINT",
            value=str(checkpoint),
            remedy="name a checkpoint",
        )
    check_model(str(checkpoint), "CHECKPOINT")
    make_directory(out.parent, "OUT")
    with heavy_imports():
        import torch

        from common.settings.sections import ModelSection
        from trainer.policy.scorer import load_model, load_tokenizer

    section = ModelSection(name=str(checkpoint), trust_remote_code=trust_remote_code)
    model: Any = load_model(section).to(getattr(torch, dtype))
    partial = out.with_name(f"{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    model.save_pretrained(partial)
    load_tokenizer(section).save_pretrained(partial)
    partial.rename(out)
    return out


if __name__ == "__main__":
    run(main, "; nothing was written")
