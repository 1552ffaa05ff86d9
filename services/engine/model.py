"""A model and its tokenizer from a directory."""

import logging
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from common.errors import ConfigError
from common.models.hub import BUILDING, check_model, refuse_random
from learning.batch_independence import fix_rotary_factors
from learning.device import dtype_on
from learning.head import make_float32_logits
from learning.hub_names import LANGUAGE_PART, set_conversions
from learning.loading import SafetensorsReader, find_decoder, only_logits
from learning.untrained_parts import language_part
from services.engine.decoder import Decoder

log = logging.getLogger(__name__)


class Model(Decoder):
    """A causal language model of transformers from a local directory, with its tokenizer.

    Raises ConfigError when the directory holds no such model.
    """

    def __init__(
        self,
        path: Path,
        max_context_tokens: int,
        device: torch.device | None = None,
        *,
        dtype: str = "float32",
        fp32_head: bool = True,
        deterministic: bool = False,
    ) -> None:
        device = device or torch.device("cpu")
        if not (path / "config.json").is_file():
            raise ConfigError(
                "there is no model in this directory",
                field="--model-path",
                value=str(path),
                remedy="name a directory with config.json",
            )
        check_model(str(path), "--model-path")
        try:
            self.tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
            whole = AutoConfig.from_pretrained(path, local_files_only=True)
            config = language_part(whole)
            fix_rotary_factors(config, max_context_tokens)
            with BUILDING:
                loaded, found = AutoModelForCausalLM.from_pretrained(
                    path,
                    config=config,
                    key_mapping=None if config is whole else LANGUAGE_PART,
                    local_files_only=True,
                    use_safetensors=True,
                    dtype=dtype_on(device, dtype),
                    output_loading_info=True,
                )
            refuse_random(found["missing_keys"])
            set_conversions(loaded, loaded.state_dict(), SafetensorsReader(path).shapes())
            find_decoder(loaded)
            loaded = loaded.to(device)
        except (
            AttributeError,
            OSError,
            ValueError,
            ImportError,
            RuntimeError,
            KeyError,
            TypeError,
        ) as error:
            raise ConfigError(
                f"the model cannot be loaded: {error}",
                field="--model-path",
                value=str(path),
                remedy="name a causal language model with its tokenizer, "
                "as transformers saves them with safetensors",
            ) from error
        only_logits(loaded.config)
        self.path = path
        positions = getattr(loaded.config.get_text_config(), "max_position_embeddings", None)
        longest = positions or max_context_tokens
        if longest < max_context_tokens:
            log.info(
                "the context is limited to %d tokens, the number of positions of the model", longest
            )
        super().__init__(
            loaded.eval().requires_grad_(False), min(longest, max_context_tokens), deterministic
        )
        self.vocab_size = int(loaded.get_input_embeddings().weight.shape[0])
        eos_ids: set[int] = set()
        for holder in (self.tokenizer, self.config, loaded.generation_config):
            listed = getattr(holder, "eos_token_id", None)
            eos_ids.update([listed] if isinstance(listed, int) else listed or [])
        self.eos_ids = sorted(eos_ids)
        if fp32_head:
            make_float32_logits(loaded)
