"""The experts in an engine's answer are requested by name, read whole, or refused with the reason."""

import base64
from typing import Any

import httpx
import numpy as np
import orjson
import pytest

from common.clients.rollout import GenerationFailed, RolloutClient
from common.wire.schemas import Completion

PROMPT = [7, 8, 9]
IDS = [5, 6]
_COMPUTED = len(PROMPT) + len(IDS) - 1


def encoded(numbers: list[int]) -> str:
    return base64.b64encode(np.array(numbers, "<i4").tobytes()).decode()


async def generated(experts: str | None, routed: bool = True) -> tuple[Completion, dict[str, Any]]:
    """Returns the completion in an engine's answer with these experts, and the request."""
    requests: list[dict[str, Any]] = []

    async def answer(request: httpx.Request) -> httpx.Response:
        requests.append(orjson.loads(request.content))
        meta: dict[str, Any] = {
            "finish_reason": {"type": "stop"},
            "prompt_tokens": len(PROMPT),
            "output_token_logprobs": [[-1.0, token, None] for token in IDS],
            "weight_version": "3",
        }
        if experts is not None:
            meta["routed_experts"] = experts
        return httpx.Response(200, json={"text": "", "output_ids": IDS, "meta_info": meta})

    client = RolloutClient("router", "http://router", transport=httpx.MockTransport(answer))
    async with client:
        (completion,) = await client.generate(
            PROMPT,
            n=1,
            max_new_tokens=2,
            temperature=1.0,
            stop_token_ids=[6],
            routed_experts=routed,
        )
    return completion, requests[0]


async def test_experts_are_read_in_the_order_of_tokens() -> None:
    numbers = [300, 2, 3, 4, 5, 6, 7, 8]  # two of each computed token
    completion, request = await generated(encoded(numbers))
    assert request["return_routed_experts"] is True
    assert completion.routed_experts.view("<u2").tolist() == numbers


async def test_experts_are_not_requested_otherwise() -> None:
    """As by an evaluation; an engine that sends them nevertheless changes nothing."""
    completion, request = await generated(encoded([1] * _COMPUTED), routed=False)
    assert "return_routed_experts" not in request
    assert len(completion.routed_experts) == 0


@pytest.mark.parametrize(
    ("experts", "reason"),
    [
        (None, "does not say which experts"),
        ("", f"0 numbers for {_COMPUTED} tokens"),
        (encoded([1] * (_COMPUTED + 1)), f"{_COMPUTED + 1} numbers for {_COMPUTED} tokens"),
        (encoded([1, 2, 3, -1]), "numbers from -1 to 3"),
        (encoded([1, 2, 3, 1 << 16]), "numbers from 1 to 65536"),
        ("no base64", "unusable experts"),
        (encoded([0] * 2 * _COMPUTED), "did not record the experts"),
    ],
)
async def test_unusable_experts_are_refused(experts: str | None, reason: str) -> None:
    with pytest.raises(GenerationFailed, match=reason):
        await generated(experts)
