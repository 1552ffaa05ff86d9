"""The imports of every worker, loaded once in the process from which workers are forked."""

import torch.distributed.fsdp
import transformers.models.qwen2.modeling_qwen2

import services.critic.critic
import trainer.policy.policy

__all__ = ["services", "torch", "trainer", "transformers"]
