"""Compares packed rows of models whose layers need more than plain attention with padded rows in
float32.
"""

import importlib.util

from benchmarks.update import full_groups
from checks.gpu_check.harness import Findings
from checks.gpu_check.precision import cosine, scored
from checks.gpu_check.setting import Setting
from learning.layout import Packing

_SHAPES = {
    "small-hybrid": "the gated delta rule of Qwen3.5",
    "small-mamba": "Mamba 2 of Bamba",
    "small-sinks": "the sinks of gpt-oss",
    "small-caps": "the capped scores of Gemma 2",
    "small-mla": "the small values of DeepSeek-V3",
}
_KERNELS = ("fla", "causal_conv1d", "mamba_ssm")


def correctness(found: Findings, setting: Setting) -> None:
    """Checks scores and gradients in bfloat16, with prompts that eight completions share."""
    has = [package for package in _KERNELS if importlib.util.find_spec(package)]
    found.claim("packages with kernels of linear layers", "", ", ".join(has) or "none")
    tokens = 256 if setting.small else 8192
    for shape, name in _SHAPES.items():
        config = setting.config(setting.model(shape), "--trainer.micro_batch_tokens", str(tokens))
        rows = [
            (group.prompt_token_ids, completion.token_ids)
            for group in full_groups(config)[:4]
            for completion in group.completions
        ]
        exact = scored(setting, config, rows, bfloat16=False, packing="off")
        layouts: tuple[Packing, ...] = ("on", "off")
        for packing in layouts:
            low = scored(setting, config, rows, bfloat16=True, packing=packing)
            about = f"{name}, {'packed' if packing == 'on' else 'padded'}"
            apart = (low["logprobs"] - exact["logprobs"]).abs()
            found.at_most(f"{about}: mean |Δ log-probability|", float(apart.mean()), 0.02)
            found.at_least(
                f"{about}: cosine of the gradients",
                cosine(low["gradients"], exact["gradients"]),
                0.98,
            )
