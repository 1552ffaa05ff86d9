"""Evaluates a model on math problems, alone or in comparison with another model."""

import json
import os
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.errors import ConfigError
from common.models.hub import check_model
from common.process.cli import CommandParser, positive, run
from common.process.imports import heavy_imports
from common.process.storage import make_directory
from common.settings.config import from_mapping
from common.settings.sections import DataSection
from trainer.cli.commands import DATASETS, argument_names, data_section, problems, setting

if TYPE_CHECKING:
    from trainer.evaluation.results import EvaluationResults
    from trainer.evaluation.uncertainty import PairedDifference

_EPILOG = """\
examples:
  python -m trainer.evaluate_model --model outputs/my_model --num-samples 50
  python -m trainer.evaluate_model --model outputs/my_model --compare Qwen/Qwen2.5-0.5B-Instruct \
--k 8 --output-file r.json
  python -m trainer.evaluate_model --model http://localhost:8000/v1 --dataset math
  python -m trainer.evaluate_model --model outputs/tiny/final --compare .cache/tiny-base \
--dataset tiny   # offline

A comparison is paired: both models answer the same problems, and only those on which they differ \
count. When the
interval does not contain 0, the difference is more than chance.
"""
_SHOWN = 10
"""Problems that are shown of those that only one model has right."""
_OWN_ARGUMENTS = (
    "sampling.group_size",
    "sampling.max_new_tokens",
    "sampling.temperature",
    "sampling.system_prompt",
)
"""Settings of `sampling` that have arguments of their own, or no meaning here."""
_ARGUMENTS = {
    "model": "--model",
    "api_key": "--api-key-env",
    "model_id": "--model-id",
    "dataset": "--dataset",
    "data.source": "--dataset",
    "data.num_samples": "--num-samples",
    "sampling.system_prompt": "--system-prompt",
    "model.name": "--model",
    "device": "--device",
}
"""The argument for each name that the Python API and the loaders use."""


def parser() -> CommandParser:
    """Returns the command line."""
    usage = (
        "--model MODEL [--compare OTHER] [--dataset NAME] [--num-samples N] [--k K] "
        "[--output-file FILE] …"
    )
    made = CommandParser("trainer.evaluate_model", __doc__ or "", usage, _EPILOG)
    made.add_argument(
        "--model",
        required=True,
        help="a local directory, a name on the hub, or the URL of an OpenAI-compatible server",
    )
    made.add_argument(
        "--compare", metavar="OTHER", help="another model, same problems; difference: MODEL - OTHER"
    )
    data = made.add_argument_group("data")
    data.add_argument(
        "--dataset", default="gsm8k", metavar="NAME", help=f"{DATASETS} (default gsm8k)"
    )
    data.add_argument("--split", default="test", help="split of the data set (default test)")
    data.add_argument(
        "--num-samples",
        type=positive,
        metavar="N",
        help="use the first N problems (default: up to 50)",
    )
    data.add_argument(
        "--set",
        type=setting,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a setting of data, sampling or chat template, such as data.prompt_field=question or "
        "sampling.top_p=0.95",
    )
    answers = made.add_argument_group("answers")
    answers.add_argument(
        "--k",
        type=positive,
        default=1,
        help="also sample k answers: pass@k, avg@k, maj@k (default 1: greedy only)",
    )
    answers.add_argument(
        "--temperature", type=float, default=1.0, help="temperature of these samples (default 1.0)"
    )
    answers.add_argument(
        "--max-new-tokens",
        type=positive,
        default=512,
        metavar="N",
        help="longest answer (default 512)",
    )
    answers.add_argument(
        "--system-prompt", default="", metavar="TEXT", help="system message before every problem"
    )
    answers.add_argument("--seed", type=int, default=0, help="seed of the samples")
    local = made.add_argument_group("local model")
    local.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="auto (default): a GPU if there is one",
    )
    local.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="bfloat16",
        help="precision on a GPU (default bfloat16)",
    )
    server = made.add_argument_group("server (if a model is a URL)")
    server.add_argument(
        "--concurrency",
        type=positive,
        default=64,
        metavar="N",
        help="requests in flight (default 64)",
    )
    server.add_argument(
        "--tokenizer",
        metavar="NAME",
        help="the model's tokenizer: calls SGLang's /generate, tokens in and out",
    )
    server.add_argument(
        "--model-id", metavar="NAME", help="name of the model, on a server with several"
    )
    server.add_argument(
        "--api-key-env",
        metavar="VARIABLE",
        help="environment variable that holds the key of the server",
    )
    made.add_argument(
        "--output-file",
        type=Path,
        metavar="FILE",
        help="write figures, answers and differences as JSON",
    )
    return made


def main(argv: list[str] | None = None) -> None:
    """Evaluates, compares and prints. Raises ServiceError when that fails."""
    arguments = vars(parser().parse_args(argv))
    with argument_names(_ARGUMENTS):
        _compare(arguments)


def _compare(arguments: dict[str, Any]) -> None:
    """Checks the arguments before anything heavy is imported, then evaluates."""
    output: Path | None = arguments["output_file"]
    if output is not None:
        _check_output(output)
    if arguments["temperature"] <= 0:
        raise ConfigError(
            "this number is too small",
            field="--temperature",
            value=arguments["temperature"],
            remedy="give a number above 0; every evaluation has greedy answers too",
        )
    _check_models(arguments)

    settings: dict[str, Any] = {}
    data_settings: dict[str, Any] = {}
    for name, value in dict(arguments["set"]).items():
        (data_settings if name.startswith("data.") else settings)[name] = value
    data = data_section(arguments["dataset"], data_settings)
    arguments["settings"] = _generation_settings(settings, data)
    dataset = problems(data, arguments["split"], arguments["num_samples"], at_most=50)
    first = _evaluate(arguments["model"], dataset, arguments)
    report: dict[str, Any] = {**first}
    texts = [_summary(first)]
    if arguments["compare"]:
        from trainer.evaluation.results import compare_evaluations

        second = _evaluate(arguments["compare"], dataset, arguments)
        difference = compare_evaluations(first, second)
        texts.append(_summary(second))
        texts.append(_comparison(difference, first, second))
        report["compare"] = {**second}
        report["comparison"] = asdict(difference)
    if output is not None:
        output.write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        texts.append(f"written to {output}")
    print("\n\n".join(texts))


def _check_output(path: Path) -> None:
    if path.is_dir() or not path.parent.is_dir():
        raise ConfigError(
            "this is a directory" if path.is_dir() else "there is no such directory",
            field="--output-file",
            value=str(path),
            remedy="name a file in an existing directory",
        )
    make_directory(path.parent, "--output-file")


def _check_models(arguments: dict[str, Any]) -> None:
    """Checks that local models exist, and that nothing is given which needs a server."""
    local = {}
    for flag, model in (("--model", arguments["model"]), ("--compare", arguments["compare"])):
        if model and not _served(model):
            local[flag] = model
    if local and arguments["compare"] is None:
        of_server = {
            "--tokenizer": arguments["tokenizer"],
            "--model-id": arguments["model_id"],
            "--api-key-env": arguments["api_key_env"],
        }
        for flag, value in of_server.items():
            if value is not None:
                raise ConfigError(
                    "this argument is only for a server, and the model is local",
                    field=flag,
                    value=value,
                    remedy="leave it out, or give the URL of a server as --model",
                )
    if arguments["tokenizer"]:
        local["--tokenizer"] = arguments["tokenizer"]
    for flag, model in local.items():
        check_model(model, flag)


def _evaluate(model: str, dataset: list[Any], arguments: dict[str, Any]) -> "EvaluationResults":
    with heavy_imports():
        from services.reward.functions import MathRewardFunction
        from trainer.api.evaluator import ModelEvaluator

    served = _served(model)
    evaluator = ModelEvaluator(
        model,
        system_prompt=arguments["system_prompt"],
        max_new_tokens=arguments["max_new_tokens"],
        temperature=arguments["temperature"],
        seed=arguments["seed"],
        concurrency=arguments["concurrency"],
        device=arguments["device"],
        dtype=arguments["dtype"],
        tokenizer=arguments["tokenizer"] if served else None,
        model_id=arguments["model_id"] if served else None,
        api_key=_key(arguments["api_key_env"]) if served else None,
        settings=arguments["settings"],
    )
    with closing(MathRewardFunction()) as reward:
        return evaluator.evaluate(dataset, reward, arguments["k"])


def _generation_settings(settings: dict[str, Any], data: DataSection) -> dict[str, Any]:
    """Returns the settings of prompts and sampling. Raises ConfigError for any other setting or a
    wrong value.
    """
    read = ("sampling.", "model.chat_template", "model.trust_remote_code")
    for name, value in settings.items():
        if name in _OWN_ARGUMENTS or not name.startswith(read):
            raise ConfigError(
                "an evaluation does not read this setting",
                field=name,
                value=value,
                remedy="give a setting of data, sampling or the chat template, such as "
                "data.prompt_field=question",
            )
    from_mapping({"rollout.engine": "embedded", **settings})
    if data.prompt_template:
        return settings | {"data.prompt_template": data.prompt_template}
    return settings


def _served(model: str) -> bool:
    return model.startswith(("http://", "https://"))


def _key(variable: str | None) -> str | None:
    if variable is None:
        return None
    key = os.environ.get(variable)
    if not key:
        raise ConfigError(
            "there is no such environment variable, or it is empty",
            field="--api-key-env",
            value=variable,
            remedy="set the variable",
        )
    return key


def _summary(results: "EvaluationResults") -> str:
    assert results["confidence_interval"] is not None, "MathRewardFunction verifies"
    low, high = results["confidence_interval"]
    lines = [
        results["model"],
        f"  accuracy     {results['accuracy']:.3f} ± {results['standard_error']:.3f}   "
        f"95 % interval {low:.3f} to {high:.3f}   {results['num_samples']} problems, greedy",
        f"  mean reward  {results['mean_reward']:.3f}",
    ]
    figures = {
        f"pass@{results['k']}": results["pass_at_k"],
        f"avg@{results['k']}": results["avg_at_k"],
        f"maj@{results['k']}": results["maj_at_k"],
    }
    for name, value in figures.items():
        if value is not None:
            lines.append(f"  {name:<11}  {value:.3f}")
    lengths = results["lengths"]
    if lengths:
        lines.append(
            f"  tokens       mean {lengths['mean']:.1f}, median {lengths['median']:.0f}, "
            f"95th percentile {lengths['p95']:.0f}, longest {lengths['longest']:.0f}, "
            f"{lengths['truncated']:.1%} cut"
        )
    if results["num_ungraded"]:
        lines.append(f"  {results['num_ungraded']} answers could not be graded and do not count")
    return "\n".join(lines)


def _comparison(
    found: "PairedDifference", first: "EvaluationResults", second: "EvaluationResults"
) -> str:
    judgement = "more than chance" if found.low > 0 or found.high < 0 else "may be chance"
    alike = found.num_samples - len(found.gained) - len(found.lost)
    lines = [
        f"difference  {found.difference:+.3f}   "
        f"95 % interval {found.low:+.3f} to {found.high:+.3f}   "
        f"p = {found.p_value:.2g} (McNemar, exact): {judgement}",
        f"{len(found.gained)} problems only the first has right, {len(found.lost)} only the "
        f"second, {alike} alike",
    ]
    changed = {
        "right by the first only:": found.gained,
        "right by the second only:": found.lost,
    }
    for title, problems_changed in changed.items():
        if problems_changed:
            lines += ["", title]
        for i in problems_changed[:_SHOWN]:
            answer = _one_line(first["ground_truths"][i], 40)
            lines.append(f"  {_one_line(first['prompts'][i])}  (answer {answer})")
            lines.append(f"    first:  {_one_line(first['responses'][i])}")
            lines.append(f"    second: {_one_line(second['responses'][i])}")
        if len(problems_changed) > _SHOWN:
            lines.append(f"… and {len(problems_changed) - _SHOWN} more")
    return "\n".join(lines)


def _one_line(text: str, limit: int = 200) -> str:
    line = " ⏎ ".join(text.split("\n"))
    return line if len(line) <= limit else f"{line[: limit - 1]}…"


if __name__ == "__main__":
    run(main, "; nothing was written")
