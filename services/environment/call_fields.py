"""What the fields of a call do in each API: what cannot be honoured is refused, never ignored.

docs/how-to/agents.md has the table for users.
"""

from typing import Any, NamedTuple

from common import Json
from common.errors import InvalidInput
from services.environment.session import CallOptions

MAX_STOP_CHARS = 1000
"""Longest stop text that the embedded engine takes."""

_OPENAI = {
    "metadata",
    "model",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "stream",
    "stream_options",
    "temperature",
    "tools",
    "top_p",
    "user",
}
_ACCEPTED = {
    "chat/completions": {
        "max_completion_tokens",
        "max_tokens",
        "messages",
        "prediction",
        "reasoning_effort",
        "stop",
        "verbosity",
    }
    | _OPENAI,
    "responses": {
        "input",
        "instructions",
        "max_output_tokens",
        "max_tool_calls",
        "reasoning",
        "text",
    }
    | _OPENAI,
    "messages": {
        "cache_control",
        "inference_geo",
        "max_tokens",
        "messages",
        "metadata",
        "model",
        "output_config",
        "service_tier",
        "speed",
        "stop_sequences",
        "stream",
        "system",
        "temperature",
        "tools",
        "top_k",
        "top_p",
    },
}
"""By API, the fields that may have any value: they are honoured, give way to the run's settings, or
change no answer of the provider's either."""
_LENGTHS = ("max_completion_tokens", "max_tokens", "max_output_tokens")
_STOPS = {"stop": 4, "stop_sequences": 256}
"""The fields with stop texts, and how many texts they may have."""


class _Rule(NamedTuple):
    """A field of which only some values are accepted: those that ask for nothing."""

    accepts: tuple[Any, ...]
    """The values, or the types of a mapping."""
    reason: str
    remedy: str


def _kind(choice: Any) -> object:
    """Returns the type of a mapping; other values as they are."""
    return choice.get("type") if isinstance(choice, dict) else choice


_OTHERWISE = "leave it out"
_NO_LOGPROBS = "the gateway returns no log-probabilities"
_WHOLE_INPUT = "send the whole conversation as `input`"
_FORMAT = _Rule(
    ("text",),
    "a grammar would make the model sample from another distribution than the one that is trained",
    "describe the format in the messages, and check the answer",
)
_BIAS = "it would make the model sample from another distribution than the one that is trained"
_RULES = {
    "background": _Rule((False,), "every call is answered at once", _OTHERWISE),
    "conversation": _Rule((), "this server does not store conversations", _WHOLE_INPUT),
    "frequency_penalty": _Rule((0,), _BIAS, _OTHERWISE),
    "function_call": _Rule(
        (),
        "functions are an old form of tools",
        "send them as `tools`, and `tool_choice`",
    ),
    "functions": _Rule(([],), "functions are an old form of tools", "send them as `tools`"),
    "include": _Rule(
        # Thoughts are always returned as text, which can be sent back.
        ([], ["reasoning.encrypted_content"]),
        "an answer has nothing else that could be included",
        _OTHERWISE,
    ),
    "logit_bias": _Rule(({},), _BIAS, _OTHERWISE),
    "logprobs": _Rule((False,), _NO_LOGPROBS, _OTHERWISE),
    "mcp_servers": _Rule(([],), "the gateway calls no tools", "call them in the program"),
    "modalities": _Rule((["text"],), "this model writes only text", _OTHERWISE),
    "n": _Rule((1,), "a call returns exactly one answer", "make one call for each answer"),
    "output_config.format": _FORMAT,
    "output_format": _FORMAT,
    "parallel_tool_calls": _Rule(
        (True,),
        "the model may make several tool calls in an answer",
        "leave it out, and accept several",
    ),
    "presence_penalty": _Rule((0,), _BIAS, _OTHERWISE),
    "previous_response_id": _Rule(("",), "this server does not store answers", _WHOLE_INPUT),
    "response_format": _FORMAT,
    "seed": _Rule(
        (),
        "one seed in all episodes of a group would make their answers equal",
        "leave it out: the run seeds every episode",
    ),
    "store": _Rule((False,), "this server does not store answers", _OTHERWISE),
    "text.format": _FORMAT,
    "thinking": _Rule(
        ("adaptive",),
        "the model itself decides how much it thinks",
        'leave it out, or send {"type": "adaptive"}',
    ),
    "tool_choice": _Rule(
        ("auto", "none"),
        "a forced call would be sampled from another distribution than the one that is trained, "
        "and the model may make several calls",
        "send auto or none, and ask again when an answer has no call",
    ),
    "top_logprobs": _Rule((0,), _NO_LOGPROBS, _OTHERWISE),
    "truncation": _Rule(
        ("disabled",),
        "the gateway drops no messages",
        "leave it out, and shorten the conversation in the program",
    ),
}


def check_fields(body: Json, path: str) -> None:
    """Raises InvalidInput for a field, or a value of it, that cannot be honoured."""
    accepted = _ACCEPTED[path]
    for name, value in body.items():
        if value is None or name in accepted:
            continue
        if name not in _RULES:
            # Not as the field: names of strangers would fill the metrics.
            raise InvalidInput(
                "the gateway cannot honour this field of the call",
                field="body",
                value=name,
                remedy=_OTHERWISE,
            )
        _check(name, value)
    for parent in ("text", "output_config"):
        if isinstance(body.get(parent), dict):
            _check(f"{parent}.format", body[parent].get("format"))


def _check(name: str, value: Any) -> None:
    rule = _RULES[name]
    # Anthropic's option of a free tool choice, which forbids a second call.
    takes_one_call = isinstance(value, dict) and value.get("disable_parallel_tool_use")
    is_accepted = value is None or value in rule.accepts or _kind(value) in rule.accepts
    if takes_one_call or not is_accepted:
        raise InvalidInput(rule.reason, field=name, value=value, remedy=rule.remedy)


def leaves_tools_out(body: Json) -> bool:
    """Returns whether the tool choice is `none`."""
    return _kind(body.get("tool_choice")) == "none"


def read_options(body: Json) -> CallOptions:
    """Returns what a checked call asks of its answer. Raises InvalidInput."""
    lengths = {name: body[name] for name in _LENGTHS if body.get(name) is not None}
    for name, length in lengths.items():
        if not isinstance(length, int) or isinstance(length, bool) or length < 1:
            raise InvalidInput(
                "an answer has at least one token",
                field=name,
                value=length,
                remedy="send a whole number from 1, or leave it out",
            )
    stops: list[str] = []
    for name, limit in _STOPS.items():
        if body.get(name) is not None:
            stops += _stop_texts(name, body[name], limit)
    return CallOptions(stop=tuple(stops), max_tokens=min(lengths.values(), default=None))


def _stop_texts(name: str, value: Any, limit: int) -> list[str]:
    texts = [value] if isinstance(value, str) else value
    are_texts = isinstance(texts, list) and all(
        isinstance(text, str) and 0 < len(text) <= MAX_STOP_CHARS for text in texts
    )
    if not are_texts or len(texts) > limit:
        raise InvalidInput(
            "these are not texts that can end an answer",
            field=name,
            value=value,
            remedy=f"send up to {limit} texts of 1 to {MAX_STOP_CHARS} characters",
        )
    return list(texts)
