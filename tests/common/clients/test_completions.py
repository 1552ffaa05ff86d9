"""What an engine's answer lacks is named: an empty completion is not one whose numbers are NaN."""

import json
from typing import Any

import pytest

from common.clients.rollout import GenerationFailed, completion_from_answer, read_completions
from tests.support.errors import raises


def answer(ids: list[int], pairs: list[list[Any]]) -> dict[str, Any]:
    """An answer of SGLang with these tokens."""
    meta = {
        "finish_reason": {"type": "stop"},
        "output_token_logprobs": pairs,
        "weight_version": "3",
        "weight_versions": [{"version": "3", "start": 0, "end": len(ids)}] if ids else [],
    }
    return {"text": "", "output_ids": ids, "meta_info": meta}


@pytest.mark.parametrize(
    ("ids", "pairs", "reason"),
    [
        ([], [], "the completion is empty: it has no tokens"),
        ([5], [[None, 5, None]], r"not a finite number \(NaN, infinite or null\)"),
        ([5], [[float("nan"), 5, None]], r"not a finite number \(NaN, infinite or null\)"),
        ([5, 6], [[-1.0, 5, None]], "tokens and logprobs of the completion do not match"),
        ([5], [[-1.0, 6, None]], "tokens and logprobs of the completion do not match"),
    ],
)
def test_the_reason_says_what_is_missing(
    ids: list[int], pairs: list[list[Any]], reason: str
) -> None:
    with pytest.raises(GenerationFailed, match=reason):
        completion_from_answer(answer(ids, pairs))


def test_truncated_sampling_needs_the_tokens_that_it_left() -> None:
    with raises(GenerationFailed, field="return_sampling_mask") as failed:
        completion_from_answer(answer([5], [[-1.0, 5, None]]), truncated=True)
    assert failed.value.field == "return_sampling_mask"
    assert "sglang-router drops that field" in str(failed.value.remedy)


def test_a_whole_answer_is_read() -> None:
    assert completion_from_answer(answer([5], [[-1.0, 5, None]])).token_ids.tolist() == [5]


@pytest.mark.parametrize("text", [None, "a", "]", '[1,"', "\\"])
@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")])
def test_an_answer_is_read_whatever_its_tokens_are_and_however_it_is_written(
    text: str | None, separators: tuple[str, str]
) -> None:
    pairs = [[-1.0, 5, text], [-2.5, 6, text]]
    body = json.dumps([answer([5, 6], pairs)] * 2, separators=separators).encode()
    for completion in read_completions([body], None, n=2, truncated=False, routed=False):
        assert completion.token_ids.tolist() == [5, 6]
        assert completion.logprobs.tolist() == [-1.0, -2.5]
        assert completion.weight_versions == [(3, 0, 2)]


@pytest.mark.parametrize("body", [b"<html>", b"[]", b"{}", b'[{"text": "a"}]', b"\xff"])
def test_what_is_no_answer_is_refused(body: bytes) -> None:
    with pytest.raises(GenerationFailed) as refused:
        read_completions([body], None, n=1, truncated=False, routed=False)
    assert refused.value.field == "/generate"
