"""The imports of every worker, loaded once in the process from which workers are forked."""

import torch.distributed.fsdp
import transformers.models.qwen2.modeling_qwen2

from trainer.policy import critic, policy

__all__ = ["critic", "policy", "torch", "transformers"]
