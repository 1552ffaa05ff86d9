"""Parameters that shape or end a completion have the same effect in every engine, directly and
through the router."""

import math
from typing import Any

import httpx
import numpy as np
import pytest

PROMPT = [20, 21, 22, 23, 24, 25]
pytestmark = pytest.mark.integration
GREEDY: dict[str, Any] = {"max_new_tokens": 12, "temperature": 0, "ignore_eos": True}


def generate(client: httpx.Client, **body: Any) -> Any:
    response = client.post("/generate", json=body)
    assert response.status_code == 200, response.text
    return response.json()


def test_contract_a_stop_text_ends_a_completion_and_is_not_in_the_text(
    target: httpx.Client,
) -> None:
    free = generate(target, input_ids=PROMPT, sampling_params=GREEDY)
    stop = free["text"][3:5]
    stopped = generate(
        target,
        input_ids=PROMPT,
        sampling_params=GREEDY | {"stop": ["never", stop]},
        return_logprob=True,
    )
    assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert stopped["text"] == free["text"].partition(stop)[0]
    length = len(stopped["output_ids"])
    assert stopped["output_ids"] == free["output_ids"][:length]
    assert length == len(stopped["meta_info"]["output_token_logprobs"]) <= 12


def test_contract_a_shortest_length_keeps_stop_tokens_away(target: httpx.Client) -> None:
    first = generate(target, input_ids=PROMPT, sampling_params=GREEDY)["output_ids"][0]
    sampling = {
        "max_new_tokens": 12,
        "temperature": 0,
        "stop_token_ids": [first],
        "min_new_tokens": 4,
    }
    found = generate(target, input_ids=PROMPT, sampling_params=sampling)["output_ids"]
    assert len(found) >= 4
    assert first not in found[:4]


@pytest.mark.parametrize(
    "bounds", [{"top_k": 3}, {"top_k": 50, "top_p": 0.5}, {"top_k": 50, "min_p": 0.3}]
)
def test_contract_tokens_come_with_the_set_that_truncation_left(
    target: httpx.Client, bounds: dict[str, float]
) -> None:
    sampling = {"max_new_tokens": 20, "ignore_eos": True, **bounds}
    body = {
        "input_ids": PROMPT,
        "sampling_params": sampling,
        "return_logprob": True,
        "return_sampling_mask": True,
    }
    answer = generate(target, **body)
    meta = answer["meta_info"]
    masks, among = meta["output_token_sampling_mask"], meta["output_token_sampling_logprobs"]
    assert len(masks) == len(among) == meta["output_token_sampling_mask_length"] == 20
    whole = [logprob for logprob, *_ in meta["output_token_logprobs"]]
    for token, mask, relative, absolute in zip(
        answer["output_ids"], masks, among, whole, strict=True
    ):
        assert token in mask
        assert len(mask) == len(set(mask)) <= bounds["top_k"]
        assert absolute - 1e-4 <= relative <= 1e-4
        if len(mask) == 1:
            assert math.isclose(relative, 0, abs_tol=1e-6)
    assert np.mean([len(mask) for mask in masks]) > 1
