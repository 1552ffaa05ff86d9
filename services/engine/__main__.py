"""`python -m services.engine --model-path DIR`: an engine for a CPU or a GPU that answers SGLang's
HTTP API.
"""

import argparse
import logging
import os
from pathlib import Path

from common.errors import ConfigError, NotReady
from common.process.cli import CommandParser, fail, positive
from common.process.imports import heavy_imports
from common.process.logs import setup_logging
from common.process.topology import setting_status

_CRASHED = 70  # EX_SOFTWARE


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Parses the command line."""
    parser = CommandParser("services.engine", __doc__)
    parser.add_argument(
        "--model-path", type=Path, required=True, help="local Hugging Face directory"
    )
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=30001)
    parser.add_argument(
        "--weight-version", default="default", help="label of these weights in every answer"
    )
    parser.add_argument(
        "--max-running-requests", type=positive, default=256, help="completions decoded at once"
    )
    parser.add_argument(
        "--max-context-tokens", type=positive, default=2048, help="prompt plus completion"
    )
    parser.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="auto: a GPU where there is one",
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="bfloat16",
        help="precision on a GPU; a CPU computes in float32",
    )
    parser.add_argument(
        "--enable-fp32-lm-head",
        action="store_true",
        help="logits in float32 whatever the model computes in",
    )
    parser.add_argument(
        "--enable-deterministic-inference",
        action="store_true",
        help="an answer depends on nothing but weights, prompt, sampling parameters and seed",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of requests without sampling_seed"
    )
    return parser.parse_args(argv)


def _die() -> None:
    """Ends the process, so that the node's agent starts a new engine."""
    logging.shutdown()
    os._exit(_CRASHED)


def main() -> None:
    """Serves until SIGTERM."""
    arguments = parse()
    with heavy_imports():
        import torch
        import transformers

        from learning.device import choose_device
        from services.engine.app import make_app
        from services.engine.decoder import UnfitModel
        from services.engine.engine import Engine
        from services.engine.model import Model
        from services.http.app import serve

    transformers.utils.logging.disable_progress_bar()
    try:
        device = choose_device(arguments.device, "--device")
    except ConfigError as error:
        # A restart would not help, unlike with a port that is not free yet.
        fail(error, setting_status())
    try:
        log = setup_logging("rollout-engine")
        model = Model(
            arguments.model_path,
            arguments.max_context_tokens,
            device=device,
            dtype=arguments.dtype,
            fp32_head=arguments.enable_fp32_lm_head,
            deterministic=arguments.enable_deterministic_inference,
        )
        engine = Engine(
            model,
            max_running=arguments.max_running_requests,
            seed=arguments.seed,
            weight_version=arguments.weight_version,
            on_crash=_die,
        )
        log.info("loaded %s on %s, %d threads", model.path, device, torch.get_num_threads())
        options = vars(arguments).items()
        settings = " ".join(f"{name}={value}" for name, value in options if name != "host")
        serve(make_app(engine), arguments.host, arguments.port, settings)
    except UnfitModel as error:
        fail(error, setting_status())
    except (ConfigError, NotReady) as error:
        fail(error)


if __name__ == "__main__":
    main()
