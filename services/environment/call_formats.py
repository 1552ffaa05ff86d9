"""The formats in which the families of models write thoughts and tool calls.

`services.environment.template` chooses the format: the first that reads back what the model's own
chat template writes. Arguments that a format writes as bare text get the types of the tool's
schema.
"""

import ast
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from services.environment.messages import parsed_arguments

Call = tuple[str, Any]
"""The name of a tool and its arguments."""
Tools = Mapping[str, Mapping[str, Any]]
"""The properties in the schema of every offered tool, by its name."""
Read = Callable[[str, Tools], list[Call]]
"""Returns the calls in the text of one block. Raises ValueError for anything else."""


def _pattern(text: str) -> re.Pattern[str]:
    return re.compile(text, re.DOTALL)


# An answer may be anything: no pattern has two neighbours that take the same characters, which
# would take a time beyond all bounds. The opening mark of thoughts is often in the prompt, so the
# answer has only the closing one.
_THINK = _pattern(r"\A\s*+(?:<think>(.*?)(?:</think>|\Z)|(.*?)</think>)")


class CallFormat(NamedTuple):
    """How a family writes its answers. The first group of a pattern that took part is the text."""

    name: str
    block: re.Pattern[str]
    """One block, with one or more calls."""
    read: Read
    thought: re.Pattern[str] = _THINK
    markup: re.Pattern[str] | None = None
    """What neither a program nor a user should see of the rest."""


def properties_of(tools: Sequence[dict[str, Any]]) -> Tools:
    """Returns the properties of the offered tools, by name."""
    properties: dict[str, Mapping[str, Any]] = {}
    for tool in tools:
        parameters = tool["function"].get("parameters")
        of_tool = parameters.get("properties") if isinstance(parameters, dict) else None
        properties[tool["function"]["name"]] = of_tool if isinstance(of_tool, dict) else {}
    return properties


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the tool call is not JSON: {error}") from None


def _read_object(text: str, tools: Tools) -> list[Call]:
    """Reads `{"name": NAME, "arguments": {…}}`."""
    return [_call(_json(text))]


def _read_list(text: str, tools: Tools) -> list[Call]:
    """Reads `[{"name": NAME, "arguments": {…}}, …]`."""
    content = _json(text)
    if not isinstance(content, list):
        raise ValueError("the tool calls are not a list")
    return [_call(each) for each in content]


def _call(content: Any) -> Call:
    if not isinstance(content, dict):
        raise ValueError("the tool call has no name")
    name = content.get("name", content.get("tool_name"))
    if not isinstance(name, str):
        raise ValueError("the tool call has no name")
    arguments = parsed_arguments(content.get("arguments", content.get("parameters")))
    return name, _mapping(arguments)


def _mapping(arguments: Any) -> dict[str, Any]:
    if not isinstance(arguments, dict):
        raise ValueError("the arguments of the tool call are not a mapping")
    return arguments


def _named_json(head: str) -> Read:
    """Returns a reader of a name, as `head` finds it, and a JSON object after it."""
    pattern = re.compile(rf"\s*{head}\s*(\{{.*\}})(?:\s*```)?\s*\Z", re.DOTALL)

    def read(text: str, tools: Tools) -> list[Call]:
        match = pattern.match(text)
        if match is None:
            raise ValueError("the tool call is not a name and JSON")
        return [(match[1], _mapping(_json(match[2])))]

    return read


def _tagged(call: str, argument: str) -> Read:
    """Returns a reader of calls whose arguments are text between tags.

    Args:
        call: finds a whole call: its name and the text of its arguments.
        argument: finds an argument: its name and its value.
    """
    calls = re.compile(call, re.DOTALL)
    arguments = re.compile(argument, re.DOTALL)

    def read(text: str, tools: Tools) -> list[Call]:
        # What is left over was meant as something: a call without it is not what was asked for.
        if calls.sub("", text).strip():
            raise ValueError("the tool call is not closed, or something is beside it")
        found = []
        for match in calls.finditer(text):
            name, body = match.groups()
            if arguments.sub("", body).strip():
                raise ValueError(f"the arguments of {name} are not all closed")
            types = tools.get(name, {})
            values = {key: _typed(value, types.get(key)) for key, value in arguments.findall(body)}
            found.append((name, values))
        if not found:
            raise ValueError("the tool call has no name")
        return found

    return read


def _typed(text: str, schema: Any) -> Any:
    """Returns a value that was written as bare text, in a type that its schema allows.

    Text that is no such value stays text; the tool says what it thinks of it.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        # Templates that print Python's values write True, False and None.
        value = _PYTHON_WORDS.get(text.strip(), text)
    types = set(_types(schema))
    kinds = _KINDS.get(type(value), set())
    return value if kinds and (not types or kinds & types) else text


_PYTHON_WORDS = {"True": True, "False": False, "None": None}
_KINDS = {
    bool: {"boolean"},
    int: {"integer", "number"},
    float: {"number"},
    dict: {"object"},
    list: {"array"},
    type(None): {"null"},
}
"""The types of a schema that allow a value, by its class. Text is never read as JSON text."""


def _types(schema: Any) -> Iterator[str]:
    """Yields the types that a schema names; none, if it allows everything."""
    if isinstance(schema, str):
        yield schema
    elif isinstance(schema, list):
        for choice in schema:
            yield from _types(choice)
    elif isinstance(schema, dict):
        if schema.get("nullable"):
            yield "null"
        for name in ("type", "anyOf", "oneOf"):
            yield from _types(schema.get(name))


def _read_python(text: str, tools: Tools) -> list[Call]:
    """Reads `[name(key=value, …), …]`, with literals of Python or JSON."""
    source = text.strip()
    if not source.startswith("["):
        # One call on every line.
        source = "[" + ",".join(source.splitlines()) + "]"
    for attempt in (source, source.replace("\n", "\\n")):  # templates leave line ends in strings
        try:
            listed = ast.parse(attempt, mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue
        if isinstance(listed, ast.List):
            return [_python_call(each) for each in listed.elts]
    raise ValueError("the tool call is not a list of Python calls")


def _python_call(node: ast.expr) -> Call:
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("the tool call is not a Python call with named arguments")
    arguments = {str(each.arg): _literal(each.value) for each in node.keywords}
    return ast.unparse(node.func), arguments


def _literal(node: ast.expr) -> Any:
    for inner in ast.walk(node):
        if isinstance(inner, ast.Name) and inner.id in _JSON_WORDS:
            inner.id = _JSON_WORDS[inner.id]
    try:
        # By way of its text, so that the renamed words are read as Python's.
        value = ast.literal_eval(ast.unparse(node))
        return json.loads(json.dumps(value))
    except (ValueError, TypeError, SyntaxError, RecursionError):
        raise ValueError("an argument of the tool call is not a literal") from None


_JSON_WORDS = {"true": "True", "false": "False", "null": "None"}


def _read_gemma(text: str, tools: Tools) -> list[Call]:
    """Reads `call:NAME{key:<|"|>text<|"|>,…}`: JSON with bare keys and marks for quotes."""
    match = re.match(r"\s*call:([^{\s]+)(\{.*)\Z", text, re.DOTALL)
    if match is None:
        raise ValueError("the tool call has no name")
    parts = match[2].split('<|"|>')
    for i, part in enumerate(parts):
        if i % 2:
            parts[i] = json.dumps(part)
        else:
            parts[i] = re.sub(r'([{,]\s*)([^\s{}\[\],:"]+)(\s*:)', r'\1"\2"\3', part)
    return [(match[1], _mapping(_json("".join(parts))))]


_TAG = _pattern(r"<tool_call>(.*?)(?:</tool_call>|\Z)")
_CHANNEL = r"(?:<\|start\|>assistant)?"
_INVOKE = r"<(?:[^\s<>/]*?)invoke name=\"([^\"]+)\">(.*?)</(?:[^\s<>/]*?)invoke>"
_PARAMETER = r"<(?:[^\s<>/]*?)parameter name=\"([^\"]+)\"[^>]*>(.*?)</(?:[^\s<>/]*?)parameter>"

HERMES = CallFormat("Hermes", _TAG, _read_object)

FORMATS = (
    HERMES,
    CallFormat(
        "Qwen3-Coder",
        _TAG,
        _tagged(
            r"<function=([^\s>]+)>(.*?)</function>",
            r"<parameter=([^\s>]+)>\n?(.*?)\n?</parameter>",
        ),
    ),
    CallFormat(
        "GLM",
        # With its end: without it, a call that was cut looks like one with fewer arguments.
        _pattern(r"<tool_call>(.*?(?:</tool_call>|\Z))"),
        _tagged(
            r"\A\s*+([^\s<]++)(.*)</tool_call>\Z",
            r"<arg_key>([^<]*)</arg_key>\s*<arg_value>(.*?)</arg_value>",
        ),
    ),
    CallFormat(
        "Python calls",
        _pattern(r"<\|tool_call_start\|>(.*?)(?:<\|tool_call_end\|>|\Z)"),
        _read_python,
    ),
    CallFormat(
        "Python calls in tags",
        _pattern(r"<function_calls>(.*?)(?:</function_calls>|\Z)"),
        _read_python,
    ),
    CallFormat(
        "Gemma 4",
        _pattern(r"<\|tool_call>(.*?)(?:<tool_call\|>|\Z)"),
        _read_gemma,
        thought=_pattern(r"<\|channel>thought\n?(.*?)(?:<channel\|>|\Z)"),
    ),
    CallFormat(
        "Harmony",
        _pattern(rf"{_CHANNEL}(?:<\|channel\|>commentary)? ?to=functions\.(.*?)(?:<\|call\|>|\Z)"),
        _named_json(
            r"([^\s<]+)(?:<\|channel\|>commentary)?(?:\s*<\|constrain\|>)?\s*(?:json)?<\|message\|>"
        ),
        thought=_pattern(rf"{_CHANNEL}<\|channel\|>analysis<\|message\|>(.*?)(?:<\|end\|>|\Z)"),
        markup=_pattern(rf"{_CHANNEL}<\|channel\|>(?:final|commentary)<\|message\|>|<\|end\|>"),
    ),
    CallFormat(
        "DeepSeek",
        _pattern(r"<｜tool▁call▁begin｜>(.*?)(?:<｜tool▁call▁end｜>|\Z)"),
        _named_json(r"(?:function<｜tool▁sep｜>)?([^\s<{]+)(?:<｜tool▁sep｜>)?(?:\s*```json)?"),
        markup=_pattern(r"<｜tool▁calls▁(?:begin|end)｜>"),
    ),
    CallFormat(
        "Kimi",
        _pattern(r"<\|tool_call_begin\|>(.*?)(?:<\|tool_call_end\|>|\Z)"),
        _named_json(r"(?:functions\.)?([^\s<:]+)(?::\d+)?\s*<\|tool_call_argument_begin\|>"),
        markup=_pattern(r"<\|tool_calls_section_(?:begin|end)\|>"),
    ),
    CallFormat(
        "invoke",
        _pattern(r"(<[^\s<>/]*invoke name=.*?(?:</[^\s<>/]*invoke>|\Z))"),
        _tagged(_INVOKE, _PARAMETER),
        thought=_pattern(
            r"\A\s*+(?:<think>(.*?)(?:</think>|\Z)|(.*?)</think>"
            r"|to=self<\|message\|>(.*?)(?:<\|eom\|>|\Z))"
        ),
        markup=_pattern(
            r"</?[^\s<>/]*(?:function_calls|tool_calls?)>"
            rf"|{_CHANNEL} ?to=[^\s<]+<\|message\|>|<\|eom\|>"
        ),
    ),
    CallFormat(
        "Mistral",
        _pattern(r"\[TOOL_CALLS\]([^\[{].*?)(?=\[TOOL_CALLS\]|\Z)"),
        _named_json(r"([^\s\[{]+)(?:\[CALL_ID\][^\[]*)?(?:\[ARGS\])?"),
        thought=_pattern(r"\A\s*+\[THINK\](.*?)(?:\[/THINK\]|\Z)"),
    ),
    CallFormat("Mistral lists", _pattern(r"\[TOOL_CALLS\](.*)\Z"), _read_list),
    CallFormat(
        "lists after a mark",
        _pattern(r"(?:<\|tool_call\|>|<tool_calls>)(.*?)(?:<\|/tool_call\|>|</tool_calls>|\Z)"),
        _read_list,
    ),
    CallFormat(
        "Command",
        _pattern(r"<\|START_ACTION\|>(.*?)(?:<\|END_ACTION\|>|\Z)"),
        _read_list,
        thought=_pattern(r"<\|START_THINKING\|>(.*?)(?:<\|END_THINKING\|>|\Z)"),
        markup=_pattern(r"<\|(?:START|END)_(?:RESPONSE|TEXT)\|>"),
    ),
    CallFormat(
        "Llama 3",
        _pattern(r"\A\s*+(?:<\|python_tag\|>)?\s*+(\{\s*\"(?:name|type)\".*)\Z"),
        _read_object,
    ),
)
