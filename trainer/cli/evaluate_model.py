"""Evaluates a model on math problems, alone or in comparison with another model."""

import json
import os
import socket
from argparse import Namespace
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from common import Json
from common.errors import ConfigError, shorten
from common.models.hub import check_model
from common.process.cli import CommandParser, output_file, positive, run
from common.process.imports import heavy_imports
from common.process.topology import refuse_cpu_build
from common.prompts.templates import check_prompts
from common.settings.config import from_mapping
from common.settings.sections import DataSection
from services.data.loaders import loader_of
from trainer.cli.commands import DATASETS, add_settings, argument_names

if TYPE_CHECKING:
    from trainer.evaluation.results import EvaluationResults
    from trainer.evaluation.uncertainty import PairedDifference

_EPILOG = """\
examples:
  rlhf eval --model outputs/my_model --num-samples 50
  rlhf eval --model outputs/my_model --compare Qwen/Qwen2.5-0.5B-Instruct \
--k 8 --output-file r.json
  rlhf eval --model http://localhost:8000/v1 --dataset math
  rlhf eval --model outputs/tiny/final --compare .cache/tiny-base \
--dataset tiny   # offline

A comparison is paired: both models answer the same problems, and only those on which they differ \
count. When the
interval does not contain 0, the difference is more than chance.
"""
# Seconds to wait for a connection to the server.
_CONNECT_S = 4.0
# Problems that are shown of those that only one model has right.
_SHOWN = 10
# The argument for each name that the Python API and the loaders use.
_ARGUMENTS = {
    "model": "--model",
    "api_key": "--api-key-env",
    "model_id": "--model-id",
    "tokenizer": "--tokenizer",
    "dataset": "--dataset",
    "data.source": "--dataset",
    "data.num_samples": "--num-samples",
    "sampling.system_prompt": "--system-prompt",
    "sampling.max_new_tokens": "--max-new-tokens",
    "sampling.temperature": "--temperature",
    "model.name": "--model",
    "device": "--device",
}
# Settings that an evaluation reads besides those of the data.
_READ = ("sampling.", "model.chat_template", "model.trust_remote_code")


# Problems that are answered when their number is not given.
_AT_MOST = 50


def parser() -> CommandParser:
    """Returns the command line."""
    usage = (
        "--model MODEL [--compare OTHER] [--dataset NAME] [--num-samples N] [--k K] "
        "[--output-file FILE] …"
    )
    made = CommandParser("rlhf eval", __doc__, usage, _EPILOG)
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
        help=f"use the first N problems (default: up to {_AT_MOST})",
    )
    add_settings(
        data,
        "a setting of data, sampling or chat template, such as data.prompt_field=question or "
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
        type=output_file,
        metavar="FILE",
        help="write figures, answers and differences as JSON",
    )
    return made


def main(argv: list[str] | None = None) -> None:
    """Evaluates, compares and prints. Raises ServiceError when that fails."""
    arguments = parser().parse_args(argv)
    with argument_names(_ARGUMENTS):
        _compare(arguments)


def _compare(arguments: Namespace) -> None:
    """Checks the arguments before anything heavy is imported, then evaluates."""
    output: Path | None = arguments.output_file
    data = _read_settings(arguments)
    _check_models(arguments)
    found = loader_of(data).load(arguments.split, arguments.num_samples)
    check_prompts(data.prompt_template, found)
    dataset = found if arguments.num_samples else found[:_AT_MOST]
    if len(dataset) < len(found):
        told = f"the first {len(dataset)} of {len(found)} held-out problems"
        print(f"{told}; --num-samples {len(found)} answers all", flush=True)

    first = _evaluate(arguments.model, dataset, arguments)
    report: Json = {**first}
    texts = [_summary(first)]
    if arguments.compare:
        from trainer.evaluation.results import compare_evaluations

        second = _evaluate(arguments.compare, dataset, arguments)
        difference = compare_evaluations(first, second)
        texts += [_summary(second), _comparison(difference, first, second)]
        report["compare"] = {**second}
        report["comparison"] = asdict(difference)
    if output is not None:
        output.write_text(json.dumps(report, indent=2, ensure_ascii=False), encoding="utf-8")
        texts.append(f"written to {output}")
    print("\n\n".join(texts))


def _check_models(arguments: Namespace) -> None:
    """Checks that models and servers exist, and that nothing is given which needs a server."""
    models = {"--model": arguments.model, "--compare": arguments.compare}
    given = {flag: model for flag, model in models.items() if model}
    local = {flag: model for flag, model in given.items() if not _served(model)}
    for flag, model in given.items():
        if _served(model):
            _key(arguments.api_key_env)
            _check_server(flag, model)
        elif "://" in model:
            raise ConfigError(
                "this is not the address of a server",
                field=flag,
                value=model,
                remedy="write http://HOST:PORT/v1 or https://HOST:PORT/v1, or name a directory",
            )
    if local and arguments.device == "cuda":
        refuse_cpu_build("--device", "cuda", "set it to cpu to compute on the CPU")
    for name in ("tokenizer", "model_id", "api_key_env"):
        if getattr(arguments, name) is not None and len(local) == len(given):
            raise ConfigError(
                "this argument is only for a server, and the model is local",
                field=f"--{name.replace('_', '-')}",
                value=getattr(arguments, name),
                remedy="leave it out, or give the URL of a server as --model",
            )
    for flag, model in local.items():
        check_model(model, flag, is_policy=True)
    if arguments.tokenizer:
        check_model(arguments.tokenizer, "--tokenizer")


def _check_server(flag: str, url: str) -> None:
    """Raises ConfigError when nothing listens at this address. No proxy is asked, as later."""
    parts = urlsplit(url)
    try:
        address = (parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80))
        socket.create_connection(address, timeout=_CONNECT_S).close()
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"the server cannot be reached: {error}",
            field=flag,
            value=url,
            remedy="check that it is running, and that host and port are right",
        ) from None


def _read_settings(arguments: Namespace) -> DataSection:
    """Returns the settings of the data, and leaves those of prompts and sampling in `arguments`.
    Raises ConfigError for any other setting or a wrong value.
    """
    data: Json = {}
    settings: Json = {}
    for name, value in arguments.set:
        if name in _ARGUMENTS or not name.startswith(("data.", *_READ)):
            raise ConfigError(
                "an evaluation does not read this setting",
                field=name,
                value=value,
                remedy="give a setting of data, sampling or the chat template, such as "
                "data.prompt_field=question",
            )
        (data if name.startswith("data.") else settings)[name] = value
    temperature = {"sampling.temperature": arguments.temperature}
    from_mapping({"rollout.engine": "embedded", **settings, **temperature})
    section = from_mapping({"data.source": arguments.dataset, **data}).data
    if section.prompt_template:
        settings["data.prompt_template"] = section.prompt_template
    arguments.settings = settings
    return section


def _evaluate(model: str, dataset: list[Any], arguments: Namespace) -> "EvaluationResults":
    with heavy_imports():
        from services.reward.functions import MathRewardFunction
        from trainer.api.evaluator import ModelEvaluator

    same = ("system_prompt", "max_new_tokens", "temperature", "seed", "concurrency", "device")
    of_server: Json = {}
    if _served(model):
        of_server = {
            "tokenizer": arguments.tokenizer,
            "model_id": arguments.model_id,
            "api_key": _key(arguments.api_key_env),
        }
    evaluator = ModelEvaluator(
        model,
        **{name: getattr(arguments, name) for name in (*same, "dtype", "settings")},
        **of_server,
    )
    with closing(MathRewardFunction()) as reward:
        return evaluator.evaluate(dataset, reward, arguments.k)


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


_SUMMARY = """\
{model}{leak}
  accuracy     {accuracy:.3f}{spread}   95 % interval {low:.3f} to {high:.3f}   \
{num_samples} problems, greedy
  mean reward  {mean_reward:.3f}"""
_LENGTHS = """
  tokens       mean {mean:.1f}, median {median:.0f}, 95th percentile {p95:.0f}, \
longest {longest:.0f}, {truncated:.1%} cut"""


def _summary(results: "EvaluationResults") -> str:
    from trainer.evaluation.results import leak

    assert results["confidence_interval"] is not None, "MathRewardFunction verifies"
    low, high = results["confidence_interval"]
    found = leak(results["trained_on"])
    error = results["standard_error"]
    spread = f" ± {error:.3f}" if error else ""  # 0 where all answers are alike
    leaked = found and f": {found}"
    text = _SUMMARY.format(**results, leak=leaked, spread=spread, low=low, high=high)
    for name in ("pass", "avg", "maj"):
        value = results.get(f"{name}_at_k")
        if value is not None:
            text += f"\n  {name + '@' + str(results['k']):<11}  {value:.3f}"
    if results["lengths"]:
        text += _LENGTHS.format(**results["lengths"])
    if results["num_ungraded"]:
        text += f"\n  {results['num_ungraded']} answers could not be graded and do not count"
    return text


_COMPARISON = """\
difference  {found.difference:+.3f}   95 % interval {found.low:+.3f} to {found.high:+.3f}   \
p = {found.p_value:.2g} (McNemar, exact): {judgement}
{gained} problems only the first has right, {lost} only the second, {alike} alike"""
_PROBLEM = """
  {prompt}  (answer {truth})
    first:  {first}
    second: {second}"""


def _comparison(
    found: "PairedDifference", first: "EvaluationResults", second: "EvaluationResults"
) -> str:
    text = _COMPARISON.format(
        found=found,
        judgement="more than chance" if found.low > 0 or found.high < 0 else "may be chance",
        gained=len(found.gained),
        lost=len(found.lost),
        alike=found.num_samples - len(found.gained) - len(found.lost),
    )
    for which, changed in (("first", found.gained), ("second", found.lost)):
        if changed:
            text += f"\n\nright by the {which} only:"
        for i in changed[:_SHOWN]:
            text += _PROBLEM.format(
                prompt=_one_line(first["prompts"][i]),
                truth=_one_line(first["ground_truths"][i]),
                first=_one_line(first["responses"][i]),
                second=_one_line(second["responses"][i]),
            )
        if len(changed) > _SHOWN:
            text += f"\n… and {len(changed) - _SHOWN} more"
    return text


def _one_line(text: str) -> str:
    return shorten(" ⏎ ".join(text.split("\n")))


if __name__ == "__main__":
    run(main, "; nothing was written")
