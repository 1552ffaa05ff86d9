"""Every causal language model type of transformers, tiny and random: each is trained for two steps
or refused with the reason.

docs/reference/models.md has one line for each, and a test fails when its line is not what happens.
`python -m tests.trainer.api.test_architectures` writes the lines, or those of the named types.
"""

import asyncio
import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

from common.errors import ConfigError, ServiceError
from learning.attention import unpackable
from learning.layout import Packed
from services.engine.adapters import AdapterRegistry
from services.engine.model import Model
from tests.support.batches.groups import off_policy_groups, prepared
from tests.support.models.every_type import NO_MODEL, TYPES, write_type
from tests.support.models.two_updates import policy_of, two_updates
from tests.support.paths import ROOT
from trainer.policy.policy import Policy

pytestmark = pytest.mark.integration

PAGE = ROOT / "docs/reference/models.md"
UNFIT = "the embedded engine cannot run this model: "
NEAR = 1e-5
TOKENS = torch.arange(20, 60)[None]
COMMON = (
    "deepseek_v3",
    "gemma2",
    "gemma3",
    "glm4_moe",
    "gpt_oss",
    "granite",
    "llama",
    "llama4",
    "mistral",
    "olmo3",
    "phi3",
    "qwen3_5",
    "qwen3_moe",
)
"""Types of families that are trained much."""


async def line_of(kind: str, workplace: Path) -> str:
    """Trains a model of this type and returns its line of the table."""
    if kind in NO_MODEL:
        write_type(kind, workplace / "model")
        with pytest.raises(ConfigError):
            policy_of(workplace / "model", {})
        return f"| `{kind}` | refused: {NO_MODEL[kind]} | – | – | – |"
    write_type(kind, workplace / "model")
    try:
        policy = policy_of(workplace / "model", {"data.prompt_template": "{question}"})
    except ConfigError as error:
        return f"| `{kind}` | refused: {reason_of(error)} | – | – | – |"
    trained = f"| `{kind}` | {rows_of(policy)} | {logits_of(policy)} |"
    try:
        updates = await two_updates(policy, workplace)
    except ConfigError as error:
        return f"{trained} refused (`{error.code}`): {reason_of(error)} | – |"
    for metrics in updates:
        assert metrics.delta_logprob < NEAR
        assert metrics.grad_norm > 0
    return f"{trained} trained | {adapter_of(workplace)} |"


def adapter_of(workplace: Path) -> str:
    """Trains an adapter for the model of this type, and merges it in the engine; returns the
    refusal, if it is one."""
    try:
        policy = policy_of(workplace / "model", {"lora.rank": 2})
        policy.update(prepared(policy, off_policy_groups()))
        policy.model.eval()
        policy.snapshots(gathered=True)["."].write(workplace / "adapter")

        engine = Model(workplace / "model", 256)
        engine.reserve(1)
        (before,) = engine.score(TOKENS.tolist())
        adapters = AdapterRegistry(engine.module)
        adapters.load("adapter", workplace / "adapter")
    except ServiceError as error:
        return f"refused: {reason_of(error)}"
    adapters.merge("adapter")
    (after,) = engine.score(TOKENS.tolist())
    with torch.no_grad():
        (own,) = policy.scorer.next_scores(TOKENS, None)
    change = (own - torch.tensor(before.logprobs)).abs().mean()
    assert change > 0.01
    assert (own - torch.tensor(after.logprobs)).abs().mean() < change / 1000
    return "trained"


def reason_of(error: ServiceError) -> str:
    """Returns the part of a message that does not depend on numbers or lines of code."""
    assert error.remedy
    words, found, _ = error.message.removeprefix(UNFIT).partition(" (in ")
    return words if found else words.partition(": ")[0].partition(" by ")[0]


def rows_of(policy: Policy) -> str:
    """Returns how the trainer lays out rows, and why not packed."""
    if policy.scorer.layout is Packed:
        return "packed"
    return f"padded: {unpackable(policy.model) or 'packed rows would change one another'}"


def logits_of(policy: Policy) -> str:
    """Returns what the model does to the output of its head."""
    final = policy.scorer._final_logits
    scale = f"{final.scale:.4g}"
    found = [] if scale == "1" else [f"× {scale}"]
    found += [] if final.cap is None else [f"capped at {final.cap:.4g}"]
    return ", ".join(found) or "as they are"


def table() -> list[str]:
    """Returns the lines of the table, without its head."""
    text = PAGE.read_text()
    start = text.index("| model type |")
    return text[start : text.index("\n\n", start)].splitlines()[2:]


def lines_of_page() -> dict[str, str]:
    """Returns the lines of the table, by model type."""
    return {line.split("`")[1]: line for line in table()}


@pytest.mark.parametrize("kind", COMMON)
async def test_a_common_type_is_trained_or_refused_as_the_table_says(
    kind: str, tmp_path: Path
) -> None:
    assert await line_of(kind, tmp_path) == lines_of_page()[kind]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in TYPES if kind not in COMMON])
async def test_a_type_is_trained_or_refused_as_the_table_says(kind: str, tmp_path: Path) -> None:
    assert await line_of(kind, tmp_path) == lines_of_page()[kind]


def test_the_table_has_every_type_of_transformers() -> None:
    assert list(lines_of_page()) == TYPES


def write(lines: Mapping[str, str]) -> None:
    """Writes these lines into the table of the page."""
    new = lines_of_page() | dict(lines)
    text = PAGE.read_text()
    ordered = [new[kind] for kind in TYPES if kind in new]
    PAGE.write_text(text.replace("\n".join(table()), "\n".join(ordered)))


if __name__ == "__main__":
    for chosen in sys.argv[1:] or TYPES:
        with TemporaryDirectory() as directory:
            line = asyncio.run(line_of(chosen, Path(directory)))
        print(line)
        write({chosen: line})
