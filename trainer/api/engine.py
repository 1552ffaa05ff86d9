"""Chooses the engine that generates completions."""

from collections.abc import Sequence
from pathlib import Path

from common.errors import ConfigError
from common.process.topology import Topology
from services.rollout.engine_client import engine_command
from trainer.api.settings import OWN_SGLANG, TrainerConfig


def choose_engine(engine: str | Sequence[str], config: TrainerConfig) -> str | list[str]:
    """Returns `embedded`, `sglang` or a list of URLs. Raises ConfigError when engine and settings
    conflict.
    """
    if engine != "sglang":
        for name in OWN_SGLANG:
            setting = f"rollout.{name}"
            if setting in config.settings:
                raise ConfigError(
                    "this setting applies only to an SGLang server that the trainer itself starts",
                    field="settings",
                    value={setting: config.settings[setting]},
                    remedy="leave it out, or give engine='sglang'",
                )
    if engine == "embedded":
        return "embedded"
    if engine == "sglang":
        system = config.to_config(
            config.problems_per_step, 0, config.output_dir or Path("outputs"), engine="sglang"
        )
        engine_command(system, Topology(), system.model.name, "0")
        return "sglang"

    urls = [url.rstrip("/") for url in ([engine] if isinstance(engine, str) else engine)]
    for url in urls or [""]:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(
                "this is not an engine",
                field="engine",
                value=url,
                remedy="give embedded, sglang, or the URLs of SGLang servers that have the model, "
                "such as http://127.0.0.1:30000",
            )
        if urls.count(url) > 1:
            raise ConfigError(
                "this server is named twice",
                field="engine",
                value=url,
                remedy="name every server only once",
            )
    rank = config.settings.get("lora.rank") or 0
    if int(rank) and config.settings.get("lora.publish") != "merged":  # a number or its text
        raise ConfigError(
            "a server that this trainer did not start may not accept adapters",
            field="engine",
            value=urls[0],
            remedy="set settings={'lora.publish': 'merged'}: it then receives the whole model with "
            "the adapter merged",
        )
    return urls
