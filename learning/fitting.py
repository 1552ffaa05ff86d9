"""Decides what an update keeps in GPU memory and what it makes again, before a model is loaded."""

import logging

from common.errors import ConfigError
from common.models import hub
from common.models.memory import FITS_SHARE, ModelShape, fastest_fit, form, trainer_memory
from common.settings.config import Config
from learning.ranks import Ranks

log = logging.getLogger(__name__)


def fitted(config: Config, ranks: Ranks, model: str) -> Config:
    """Returns the configuration with `auto` of `trainer.activation_checkpointing`,
    `parallel.reshard_after_forward` and `trainer.micro_batch_tokens` decided for the GPU of rank 0,
    by the estimated memory and time of an update of `model`, and logs the choice.

    On a CPU, and for a model whose memory cannot be estimated, it is left as it is: nothing is
    recomputed, and weights are gathered again. A collective.
    """
    decides = (
        config.trainer.activation_checkpointing,
        config.parallel.reshard_after_forward,
        config.trainer.micro_batch_tokens,
    )
    if "auto" not in decides:
        return config
    return ranks.broadcast(_decided(config, ranks, model) if ranks.is_rank_zero else config)


def _decided(config: Config, ranks: Ranks, model: str) -> Config:
    total = ranks.gpu_bytes
    if total is None:
        return config
    try:
        shape = ModelShape.of(hub.text_config(model, ask_hub=True))
    except ConfigError as error:
        log.info("nothing is recomputed: %s (%s)", error.message, error.value)
        return config
    decided = fastest_fit(shape, config, ranks.world_size, FITS_SHARE * total)
    needed = trainer_memory(shape, decided, ranks.world_size).total
    log.info(
        "%s: an update takes %.1f GB of %.1f, by the estimate",
        form(decided),
        needed / 1e9,
        total / 1e9,
    )
    return decided
