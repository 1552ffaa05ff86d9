"""What every worker imports: loaded once in the process that they are forked from."""

import torch.distributed.fsdp
import transformers.models.qwen2.modeling_qwen2

import services.critic.critic
import trainer.policy.policy

__all__ = ["services", "torch", "trainer", "transformers"]
