"""Static files of weight versions, and the publisher of LoRA adapters.

The nodes' end is `services.rollout.engine_client.EngineClient.load_adapter`.
"""

import shutil
from pathlib import Path
from typing import Any

from common.clients.rollout import RolloutClient
from common.settings.config import Config
from common.wire.schemas import adapter_name
from trainer.policy.lora import adapter_config
from trainer.policy.scorer import ADAPTER_CONFIG
from trainer.weights.sync import WeightPublisher
from trainer.weights.versions import Weights


def static_files(config: Config, model: Any, tokenizer: Any, directory: Path) -> list[Path]:
    """Writes the tokenizer and the config files; returns the paths of those that complete a
    published version.
    """
    shutil.rmtree(directory, ignore_errors=True)
    tokenizer.save_pretrained(directory)
    if config.lora.publishes_adapter:
        (directory / ADAPTER_CONFIG).write_text(adapter_config(model))
        return [directory / ADAPTER_CONFIG]
    model.kept.saved_config(model.config).save_pretrained(directory)
    # An engine may start from a version, and wants those of a multimodal model.
    for name, text in model.kept.texts.items():
        (directory / name).write_text(text)
    if model.generation_config is not None:
        model.generation_config.save_pretrained(directory)
    return sorted(path for path in directory.iterdir() if path.is_file())


class AdapterPublisher:
    """Publishes adapters through `publisher`: once the engines have one, the requests of `client`
    name it.

    An engine uses the adapter that a request names or refuses the request, so the version that
    sampled a completion never depends on the adapters that an engine happens to hold.
    """

    def __init__(self, publisher: WeightPublisher, client: RolloutClient, run_id: str) -> None:
        self._publisher = publisher
        self._client = client
        self._run_id = run_id

    def publish(self, weights: Weights, version: int) -> None:
        """Returns when the rollout nodes have exactly this adapter."""
        self._publisher.publish(weights, version)
        self._client.adapter = (adapter_name(self._run_id, version), version)

    def sleep(self) -> None:
        """See `EngineMemory`."""
        self._publisher.sleep()

    def wake(self) -> None:
        """See `EngineMemory`."""
        self._publisher.wake()
