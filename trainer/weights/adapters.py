"""Weight versions that are LoRA adapters: their files, and the name that requests carry."""

import shutil
from pathlib import Path
from typing import Any

from common.config import Config
from common.rollout_client import RolloutClient
from common.schemas import adapter_name
from trainer.policy.lora import adapter_config
from trainer.policy.scorer import ADAPTER_CONFIG, load_model
from trainer.weights.publisher import Weights, write_static_files
from trainer.weights.sync import Publishes


def static_files(config: Config, policy: Any, tokenizer: Any, directory: Path) -> list[Path]:
    """The files that make published tensors a complete version: written once, as `publisher.py` does for a model."""
    if not config.lora.publishes_adapter:
        return write_static_files(policy, tokenizer, directory)
    shutil.rmtree(directory, ignore_errors=True)
    tokenizer.save_pretrained(directory)  # for checkpoints; engines have it from the model
    (directory / ADAPTER_CONFIG).write_text(adapter_config(policy))
    return [directory / ADAPTER_CONFIG]


def base_directory(config: Config, tokenizer: Any, directory: Path) -> Path:
    """The model without the adapter as a local directory: where it is, or written to `directory`."""
    local = Path(config.model.name)
    if (local / "config.json").is_file():
        return local
    model: Any = load_model(config.model)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


class AdapterPublisher:
    """Publishes adapters: once the engines have one, requests name it.

    An engine answers a request with the adapter that it names or not at all, so what was sampled by which version does not
    depend on what an engine holds at that moment.

    Args:
        publisher: brings the adapters to the engines.
        client: whose requests name them.
        run_id: under which `publisher` publishes.
        sglang: whether the engines are SGLang.
    """

    def __init__(self, publisher: Publishes, client: RolloutClient, run_id: str, sglang: bool) -> None:
        self._publisher, self._client, self._run_id = publisher, client, run_id
        client.repeats_prompt = sglang

    def publish(self, weights: Weights, version: int) -> None:
        """Returns when the rollout nodes have exactly this adapter."""
        self._publisher.publish(weights, version)
        self._client.adapter = (adapter_name(self._run_id, version), version)
