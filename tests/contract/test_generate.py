"""Answers of every rollout endpoint: the embedded engine, the router in front of it, and real
SGLang."""

from typing import Any

import httpx
import pytest

from common.clients.rollout import completion_from_answer

pytestmark = pytest.mark.integration

PROMPT = [20, 21, 22, 23, 24, 25]
LONG = {"max_new_tokens": 12, "ignore_eos": True}


def generate(client: httpx.Client, **body: Any) -> Any:
    response = client.post("/generate", json=body)
    assert response.status_code == 200, response.text
    return response.json()


def test_contract_one_prompt_gives_an_object_with_tokens_logprobs_and_version(
    target: httpx.Client,
) -> None:
    answer = generate(target, input_ids=PROMPT, sampling_params=LONG, return_logprob=True)
    meta = answer["meta_info"]
    assert len(answer["output_ids"]) == meta["completion_tokens"] == 12
    assert meta["prompt_tokens"] == len(PROMPT)
    assert meta["finish_reason"] == {"type": "length", "length": 12}
    assert [token for _, token, _ in meta["output_token_logprobs"]] == answer["output_ids"]
    assert all(logprob <= 0 for logprob, *_ in meta["output_token_logprobs"])
    assert isinstance(meta["weight_version"], str)
    assert meta["weight_versions"] == [{"version": meta["weight_version"], "start": 0, "end": 12}]
    assert meta["num_retractions"] == 0
    assert isinstance(meta["id"], str)
    assert isinstance(answer["text"], str)


def test_contract_n_gives_a_list_of_different_completions_the_client_reads(
    target: httpx.Client,
) -> None:
    found = generate(target, input_ids=PROMPT, sampling_params=LONG | {"n": 4}, return_logprob=True)
    assert len(found) == 4
    assert len({tuple(answer["output_ids"]) for answer in found}) > 1
    assert len({answer["meta_info"]["id"] for answer in found}) == 4
    for answer in found:
        if answer["meta_info"]["weight_version"].isdigit():
            completion = completion_from_answer(answer)
            assert list(completion.token_ids) == answer["output_ids"]


def test_contract_a_batch_is_flat_and_grouped_by_prompt(target: httpx.Client) -> None:
    prompts = [PROMPT, PROMPT[:3]]
    found = generate(
        target, input_ids=prompts, sampling_params={"max_new_tokens": 2, "n": 2, "ignore_eos": True}
    )
    assert [answer["meta_info"]["prompt_tokens"] for answer in found] == [6, 6, 3, 3]


def test_contract_a_batch_of_one_is_a_list(target: httpx.Client) -> None:
    assert len(generate(target, input_ids=[PROMPT], sampling_params={"max_new_tokens": 1})) == 1


def test_contract_greedy_repeats(target: httpx.Client) -> None:
    greedy = LONG | {"temperature": 0}
    first, second = (generate(target, input_ids=PROMPT, sampling_params=greedy) for _ in range(2))
    assert first["output_ids"] == second["output_ids"]


def test_contract_the_stop_token_is_in_the_ids_and_not_in_the_text(target: httpx.Client) -> None:
    greedy = {"max_new_tokens": 12, "temperature": 0, "ignore_eos": True}
    free = generate(target, input_ids=PROMPT, sampling_params=greedy)["output_ids"]
    stop = free[4]
    sampling = {"max_new_tokens": 12, "temperature": 0, "stop_token_ids": [stop]}
    stopped = generate(target, input_ids=PROMPT, sampling_params=sampling, return_logprob=True)
    end = stopped["output_ids"].index(stop) + 1
    assert stopped["output_ids"] == free[:end]
    assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert len(stopped["meta_info"]["output_token_logprobs"]) == end


def test_contract_too_long_prompts_are_400(target: httpx.Client) -> None:
    response = target.post(
        "/generate", json={"input_ids": [5] * 100_000, "sampling_params": {"max_new_tokens": 1}}
    )
    assert response.status_code == 400, response.text
    assert response.json()["error"]["message"]


def test_contract_more_new_tokens_than_the_context_has_are_400_and_the_default_is_cut_to_it(
    worker: httpx.Client,
) -> None:
    context = worker.get("/v1/models").json()["data"][0]["max_model_len"]
    prompt = [5] * (context - 20)
    response = worker.post(
        "/generate", json={"input_ids": prompt, "sampling_params": {"max_new_tokens": 21}}
    )
    assert response.status_code == 400, response.text
    answer = generate(worker, input_ids=prompt, sampling_params={"ignore_eos": True})
    assert answer["meta_info"]["finish_reason"]["type"] == "length"
    assert 15 <= len(answer["output_ids"]) <= 20


def test_contract_an_unknown_sampling_parameter_is_refused(worker: httpx.Client) -> None:
    response = worker.post(
        "/generate", json={"input_ids": PROMPT, "sampling_params": {"temprature": 1}}
    )
    assert response.status_code in (
        400,
        500,
    )  # SGLang 0.5.21 answers a bare 500; later versions name it with 400


def test_contract_the_router_drops_an_unknown_sampling_parameter(router: httpx.Client) -> None:
    """The unknown field never reaches the engine, so the settings of a run must catch a typing
    error."""
    answer = generate(
        router, input_ids=PROMPT, sampling_params={"max_new_tokens": 1, "temprature": 1}
    )
    assert answer["meta_info"]["completion_tokens"] == 1


def test_contract_unknown_top_level_keys_are_ignored(worker: httpx.Client) -> None:
    answer = generate(
        worker, input_ids=PROMPT, sampling_params={"max_new_tokens": 1}, model=None, some_new_flag=3
    )
    assert answer["meta_info"]["completion_tokens"] == 1


def test_contract_the_router_keeps_the_sampling_seed(engine_url: str, router_url: str) -> None:
    """Only the embedded engine is tested, as SGLang ignores the seed on a CPU."""
    body = {"input_ids": PROMPT, "sampling_params": LONG | {"sampling_seed": 11}}
    direct, routed = (
        httpx.post(f"{url}/generate", json=body, trust_env=False, timeout=60).json()["text"]
        for url in (engine_url, router_url)
    )
    assert direct == routed != ""
