"""Trains a model on math problems in this process."""

import shlex
from argparse import Namespace
from contextlib import closing
from pathlib import Path

from common import Json
from common.errors import ConfigError
from common.models.hub import check_model
from common.process.cli import CommandParser, count, positive, run
from common.process.imports import heavy_imports
from common.process.storage import make_directory
from common.process.topology import refuse_cpu_build
from common.settings.config import from_mapping
from services.data.loaders import load_split
from trainer.api.output import AUTO, check_output, decided
from trainer.api.refusals import Given
from trainer.api.settings import TrainerConfig
from trainer.api.trl import instead
from trainer.cli.commands import (
    DATASETS,
    add_fields,
    add_settings,
    argument_names,
)
from trainer.trackers.thread import exit_despite_hung_tracker

_EPILOG = """\
examples:
  # a model of half a billion parameters on 1000 problems of GSM8K, updated on the GPU
  rlhf train --model Qwen/Qwen2.5-0.5B-Instruct --trainer grpo \\
    --num-generations 4 --num-samples 1000 --use-gpu

  # the built-in task: two cores, no GPU, no network, a minute
  rlhf tiny-model .cache/tiny-base
  rlhf train --model .cache/tiny-base --dataset tiny --num-samples 640 \
--max-new-tokens 24 \\
    --learning-rate 5e-4 --per-device-train-batch-size 64 --num-generations 8 \
--output-dir outputs/tiny

  # your own problems (columns question and answer), and a setting that has no argument of its own
  rlhf train --trainer rloo --dataset problems.jsonl \
--set algorithm.entropy_coef=0.001

  # the hardest problems of MATH
  rlhf train --dataset math --set data.levels=4,5

  # one command for the first start of a spot job and for those after a preemption
  rlhf train --num-samples 1000 --use-gpu --output-dir /volume/run --resume auto

how good is it now?
  rlhf eval --model outputs/tiny/final --compare .cache/tiny-base \
--dataset tiny
"""
_FLAGS = {
    "model_name_or_path": "--model",
    "trainer_type": "--trainer",
    "ref_model_name_or_path": "--ref-model",
}
# Fields that have other arguments, concern several reward functions, or are secret.
_NOT_HERE = ("settings", "verbose", "reward_weights", "generation_kwargs", "hub_token")
_FIELDS = {
    name: field for name, field in TrainerConfig.model_fields.items() if name not in _NOT_HERE
}
# The argument for each name that the Python API and the loaders use.
_ARGUMENTS = {
    **{name: f"--{name.replace('_', '-')}" for name in _FIELDS},
    **_FLAGS,
    "resume_from_checkpoint": "--resume",
    "train_dataset": "--dataset",
    "eval_dataset": "--eval-samples",
    "data.source": "--dataset",
    "data.num_samples": "--num-samples",
}


def parser() -> CommandParser:
    """Returns the command line: every field of TrainerConfig, and the data."""
    usage = (
        "[--model MODEL] [--trainer grpo|rloo|ppo|…] [--dataset NAME] [--num-samples N] "
        "[--use-gpu] …"
    )
    description = f"{__doc__} The arguments under `training` are fields of TrainerConfig."
    made = CommandParser("rlhf train", description, usage, _EPILOG)
    made.elsewhere = instead(_ARGUMENTS)
    data = made.add_argument_group("data")
    data.add_argument(
        "--dataset", default="gsm8k", metavar="NAME", help=f"{DATASETS} (default gsm8k)"
    )
    data.add_argument(
        "--num-samples",
        type=positive,
        metavar="N",
        help="training problems, drawn with --seed; all when unset",
    )
    data.add_argument(
        "--eval-samples",
        type=count,
        default=50,
        metavar="N",
        help="maximum number of held-out problems to answer before and after training; 0: none "
        "(default 50)",
    )
    running = made.add_argument_group("run")
    running.add_argument(
        "--resume",
        nargs="?",
        const=True,
        default=False,
        choices=[AUTO],
        help="continue from the newest checkpoint in --output-dir, which must hold a run; with "
        "`auto` begin the run if it holds none: one command for every start of a spot job",
    )
    running.add_argument(
        "--save-to",
        type=Path,
        metavar="DIR",
        help="for the trained model (default OUTPUT_DIR/final)",
    )
    running.add_argument(
        "--quiet", action="store_true", help="print only the path of the trained model"
    )
    add_settings(
        running,
        "any other setting of the system, such as algorithm.entropy_coef=0.001 or "
        "data.levels=4,5; `python -m trainer --help-all` lists them",
    )
    add_fields(made.add_argument_group("training"), _FIELDS, _FLAGS)
    return made


def main(argv: list[str] | None = None) -> None:
    """Trains and saves a model. Raises ServiceError when that fails."""
    arguments = parser().parse_args(argv)
    with argument_names(_ARGUMENTS):
        _train(arguments)


def _train(arguments: Namespace) -> None:
    """Checks the arguments before anything heavy is imported, then trains."""
    settings: Json = {}
    data_settings: Json = {}
    for name, value in dict(arguments.set).items():
        # What `described` holds; the trainer itself reads the curriculum and the template.
        is_data = name.startswith("data.") and name != "data.curriculum"
        (data_settings if is_data else settings)[name] = value
    if "data.prompt_template" in data_settings:
        settings["data.prompt_template"] = data_settings["data.prompt_template"]
    fields = {name: value for name, value in vars(arguments).items() if name in _FIELDS}
    config = TrainerConfig(**fields, settings=settings, verbose=not arguments.quiet)
    described = {"data.source": arguments.dataset, "data.num_samples": arguments.num_samples}
    for name in described.keys() & data_settings:
        raise ConfigError(
            "--set does not take what has an argument of its own",
            field=name,
            value=data_settings[name],
            remedy="use that argument",
        )
    described |= data_settings
    data = from_mapping(described).data
    resume = _resumes(arguments.resume, config)
    if arguments.save_to is not None:
        make_directory(arguments.save_to, "--save-to")
    check_model(config.model_name_or_path, "model_name_or_path", is_policy=True)
    if config.ref_model_name_or_path:
        check_model(config.ref_model_name_or_path, "ref_model_name_or_path", needs_weights=True)
    if config.use_gpu:
        refuse_cpu_build("use_gpu", True, "leave it out to train on the CPU")
    train = load_split(data, "train", config.seed)
    config.check_steps(len(train))
    held_out = arguments.eval_samples
    test = load_split(data, "eval", config.seed)[:held_out] if held_out > 0 else None

    if config.verbose:
        print(
            f"{len(train)} training problems; loading torch and {config.model_name_or_path} …",
            flush=True,
        )
    with heavy_imports():
        from services.reward.functions import MathRewardFunction
        from trainer.api.online import OnlineRLTrainer

    with closing(MathRewardFunction()) as reward:
        trainer = OnlineRLTrainer(config, reward, train, test)
        trainer.described = described
        trainer.train(resume_from_checkpoint=resume)
    saved = trainer.save_model(arguments.save_to or trainer.output_dir / "final")
    print(f"model:      {saved}")
    if config.verbose:
        held_out = len(test or ())
        print(
            "evaluate:  ",
            evaluation(config, saved, arguments.dataset, data_settings, num_samples=held_out),
        )


def _resumes(given: bool | str, config: TrainerConfig) -> bool:
    """Returns whether a run is continued. Raises ConfigError if the output directory does not allow
    what was `given`.
    """
    directory = config.output_dir
    if directory is None:
        if given:
            raise ConfigError(
                "--resume needs the directory of the run",
                field="--resume",
                value=given,
                remedy="name it with --output-dir",
            )
        return False
    resumes = bool(decided(given, directory))
    if given and not resumes and config.verbose:
        print(f"there is no run in {directory}: a new one begins")
    check_output(directory, resumes or config.overwrite_output_dir, resume=resumes)
    return resumes


def evaluation(
    config: TrainerConfig,
    saved: Path,
    dataset: str,
    data_settings: Given,
    num_samples: int = 0,
) -> str:
    """Returns the command that evaluates the trained model on the first `num_samples` held-out
    problems, those of the evaluations during training; 0: on the command's own number.
    """
    words = [
        "--model",
        str(saved),
        "--compare",
        config.model_name_or_path,
        "--dataset",
        dataset,
        "--max-new-tokens",
        str(config.max_new_tokens),
    ]
    if num_samples:
        words += ["--num-samples", str(num_samples)]
    if config.system_prompt:
        words += ["--system-prompt", config.system_prompt]
    for name, value in data_settings.items():
        text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
        words += ["--set", f"{name}={text}"]
    return f"rlhf eval {shlex.join(words)}"


if __name__ == "__main__":
    with exit_despite_hung_tracker():
        run(
            main,
            "; the same command with --resume and --output-dir continues from the newest "
            "checkpoint",
        )
