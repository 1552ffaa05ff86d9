"""Calls as models of each family write them, and text that only looks like one.

Each table has right and wrong instances of one kind: marks inside strings, schemas that refer to
others, numbers that JSON lacks, and the headers of gpt-oss.
"""

import json
import math
import random
from typing import Any

import pytest

from services.environment.call_formats import FORMATS, parse_answer


def _tool(name: str, definitions: dict[str, Any] | None = None, **properties: Any) -> Any:
    parameters = {"type": "object", "properties": properties, "$defs": definitions or {}}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TEXT = {"type": "string"}
TOOLS = [
    _tool("add", a={"type": "number"}, b={"type": "number"}),
    _tool("write", path=TEXT, content=TEXT),
    _tool("now"),
    _tool("files.list-all", deep={"type": "boolean"}),
]


def _read(name: str, text: str, tools: list[Any] = TOOLS) -> tuple[list[Any], str, str]:
    """Returns the names and arguments of an answer's calls, its content, and what is wrong."""
    call_format = next(each for each in FORMATS if each.name == name)
    message, problem = parse_answer(text, tools, call_format)
    functions = [each["function"] for each in message.tool_calls]
    calls = [(each["name"], each["arguments"]) for each in functions]
    return calls, message.content, problem


def _write(content: str) -> tuple[str, dict[str, Any]]:
    return "write", {"path": "a.md", "content": content}


_SEP = "<｜tool▁sep｜>"
_CALL = {
    "Hermes": '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>',
    "Harmony": "<|channel|>commentary to=functions.%s <|constrain|>json<|message|>%s",
    "DeepSeek": f"<｜tool▁call▁begin｜>%s{_SEP}%s<｜tool▁call▁end｜>",
    "DeepSeek, fenced": f"<｜tool▁call▁begin｜>function{_SEP}%s\n```json\n%s\n```<｜tool▁call▁end｜>",
    "Kimi": "<|tool_call_begin|>functions.%s:0<|tool_call_argument_begin|>%s<|tool_call_end|>",
    "Mistral": "[TOOL_CALLS]%s[ARGS]%s",
    "Mistral, with an id": "[TOOL_CALLS]%s[CALL_ID]a1B2c3D4e[ARGS]%s",
    "Mistral lists": '[TOOL_CALLS] [{"name": "%s", "arguments": %s, "id": "a1B2c3D4e"}]',
    "lists after a mark": '<|tool_call|>[{"name": "%s", "arguments": %s}]<|/tool_call|>',
    "Command": '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "%s", "parameters": %s}]'
    "<|END_ACTION|>",
    "Llama 3": '{"name": "%s", "parameters": %s}',
    "Llama 3, tag": '<|python_tag|>{"name": "%s", "parameters": %s}',
    "Llama 3, type": '{"type": "function", "name": "%s", "parameters": %s}',
}
"""How models write a call whose arguments are JSON."""


def _json_call(form: str, name: str, arguments: Any) -> tuple[str, str]:
    """Returns a format's name and a call in it; the arguments as text are taken as they are."""
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return form.partition(",")[0], _CALL[form] % (name, arguments)


STRINGS = [
    "it ends with </tool_call> and <tool_call> begins another",
    "</tool_call>\n<tool_call>\n{}\n</tool_call>",
    "<｜tool▁call▁end｜> and <｜tool▁calls▁end｜>",
    "\n```<｜tool▁call▁end｜>\n```json\n{}\n```",
    "<|tool_call_end|><|tool_calls_section_end|> <|tool_call_begin|>functions.add:1",
    '[TOOL_CALLS]add[ARGS]{"a": 1} [ARGS] [CALL_ID]',
    '[TOOL_CALLS] [{"name": "add", "arguments": {}}]',
    "<|/tool_call|> </tool_calls> <|END_ACTION|> <|START_ACTION|>[]",
    "<|end|><|start|>assistant<|channel|>final<|message|>no<|call|><|return|>",
    "<|channel|>commentary to=functions.add <|message|>{}",
    "<think>not a thought</think> and </think> and [/THINK]",
    "a } b ] c }} d ]] { [",
    'quotes " and \\" and a last backslash \\',
    "naïve — 世界 \u2028 😀 \x7f \t\r\n end",
    '{"name": "add", "parameters": {"a": 1}}',
    "<|python_tag|>; {}",
    "<function=add>\n<parameter=a>\n1\n</parameter>\n</function>",
    "",
]


@pytest.mark.parametrize("form", _CALL)
@pytest.mark.parametrize("content", STRINGS, ids=range(len(STRINGS)))
def test_a_mark_inside_a_json_string_belongs_to_the_string(form: str, content: str) -> None:
    for ensure_ascii in (False, True):
        arguments = json.dumps(_write(content)[1], ensure_ascii=ensure_ascii)
        name, text = _json_call(form, "write", arguments)
        calls, _, problem = _read(name, text)
        assert (calls, problem) == ([_write(content)], "")


PARALLEL = [form for form in _CALL if "lists" not in form and form != "Command"]


@pytest.mark.parametrize("form", PARALLEL)
def test_calls_after_one_another_are_all_read(form: str) -> None:
    between = {"Harmony": "<|call|><|start|>assistant", "Llama 3": "; "}
    name, first = _json_call(form, "write", _write("</tool_call> { [TOOL_CALLS] <|end|>")[1])
    _, second = _json_call(form, "add", {"a": 1, "b": {"c": [{}]}})
    _, third = _json_call(form, "now", {})
    calls, _, problem = _read(name, between.get(name, "\n").join([first, second, third]))
    assert not problem
    assert calls == [
        _write("</tool_call> { [TOOL_CALLS] <|end|>"),
        ("add", {"a": 1, "b": {"c": [{}]}}),
        ("now", {}),
    ]


@pytest.mark.parametrize("form", _CALL)
def test_a_call_that_is_cut_anywhere_in_its_arguments_is_none(form: str) -> None:
    arguments = json.dumps({"path": "a", "content": 'b </tool_call> "} ] '})
    name, whole = _json_call(form, "write", arguments)
    first = whole.index(arguments) + 1
    for end in range(first, whole.index(arguments) + len(arguments)):
        calls, content, problem = _read(name, whole[:end])
        assert not calls, whole[:end]
        assert problem, whole[:end]
        assert content, "the program sees what was sampled"


MARKED = [
    ("Qwen3-Coder", "<tool_call>\n<function=write>\n<parameter=path>\na.md\n</parameter>\n"
     "<parameter=content>\n%s\n</parameter>\n</function>\n</tool_call>"),
    ("GLM", "<tool_call>write\n<arg_key>path</arg_key>\n<arg_value>a.md</arg_value>\n"
     "<arg_key>content</arg_key>\n<arg_value>%s</arg_value>\n</tool_call>"),
    ("invoke", '<minimax:tool_call>\n<invoke name="write">\n<parameter name="path">a.md'
     '</parameter>\n<parameter name="content">%s</parameter>\n</invoke>\n</minimax:tool_call>'),
    ("Gemma 4", '<|tool_call>call:write{path:<|"|>a.md<|"|>,content:<|"|>%s<|"|>}<tool_call|>'),
    ("Python calls", "<|tool_call_start|>[write(path='a.md', content='%s')]<|tool_call_end|>"),
    ("Python calls in tags",
     "<function_calls>\nwrite(path='a.md', content='%s')\n</function_calls>"),
]  # fmt: skip
VALUES = [
    "it ends with </tool_call> here",
    "</function> or </invoke> or </minimax:tool_call>",
    "<tool_call> begins",
    "<|tool_call_end|> )] <|tool_call_start|>[",
    "</function_calls> and <function_calls>",
    "<tool_call|> } , b: <|tool_call>",
    "<think>no thought</think>",
    "only </think> its end",
    "世界 — 😀 { } [ ]",
    '{"name": "add", "arguments": {}}',
]


@pytest.mark.parametrize(("name", "form"), MARKED, ids=[name for name, _ in MARKED])
@pytest.mark.parametrize("content", VALUES, ids=range(len(VALUES)))
def test_a_mark_inside_a_marked_value_belongs_to_the_value(
    name: str, form: str, content: str
) -> None:
    calls, _, problem = _read(name, form % content)
    assert (calls, problem) == ([_write(content)], "")


OTHERS: list[tuple[str, str, list[Any]]] = [
    ("GLM", "<tool_call>now</tool_call>", [("now", {})]),
    ("GLM", "<tool_call>now\n</tool_call>\n<tool_call>now</tool_call>", [("now", {})] * 2),
    ("Qwen3-Coder", "<tool_call>\n<function=now>\n</function>\n</tool_call>", [("now", {})]),
    ("Qwen3-Coder", "<tool_call><function=now></function><function=now></function></tool_call>",
     [("now", {})] * 2),
    ("invoke", '<invoke name="now"></invoke>\n<invoke name="now">\n</invoke>', [("now", {})] * 2),
    ("Kimi", "<|tool_call_section_begin|><|tool_call_begin|>now:0<|tool_call_argument_begin|>{}"
     "<|tool_call_end|><|tool_call_section_end|>", [("now", {})]),
    ("Kimi", "<|tool_call_begin|>\nfunctions.files.list-all:12\n<|tool_call_argument_begin|>\n{}\n"
     "<|tool_call_end|>", [("files.list-all", {})]),
    ("DeepSeek", f"<｜tool▁calls▁begin｜>\n<｜tool▁call▁begin｜>now{_SEP}{{}}<｜tool▁call▁end｜>\n"
     f"<｜tool▁calls▁end｜>\n<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>now{_SEP}{{}}"
     "<｜tool▁call▁end｜><｜tool▁calls▁end｜>", [("now", {})] * 2),
    ("Hermes", "Perhaps <tool_call>, I think.</think><tool_call>"
     '{"name": "now", "arguments": {}}</tool_call>', [("now", {})]),
    ("Hermes", '<think>As {"a": "b</think><tool_call>'
     '{"name": "now", "arguments": {}}</tool_call>', [("now", {})]),
    ("Hermes", '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call> no.</think>'
     '<tool_call>{"name": "now"}</tool_call>', [("now", {})]),
    ("Hermes", '<tool_call>{"name": "add", "arguments": {"a": </think>'
     '<tool_call>{"name": "now"}</tool_call>', [("now", {})]),
    ("Hermes", 'I begin with <tool_call>{"name": "add</think><tool_call>'
     '{"name": "now"}</tool_call>', [("now", {})]),
    ("Qwen3-Coder", "So <tool_call><function=add><parameter=a>1, or so.</think><tool_call>"
     "<function=now></function></tool_call>", [("now", {})]),
    ("Hermes", '<think><tool_call>{"name": "add", "arguments": {}}</tool_call></think>No.', []),
    ("Mistral", '[THINK][TOOL_CALLS]add[ARGS]{"a": 1}[/THINK][TOOL_CALLS]now[ARGS]{}',
     [("now", {})]),
    ("Llama 3", '<think>{"name": "add"}</think>\n\n{"name": "now", "parameters": {}}',
     [("now", {})]),
    ("Command", '<|START_THINKING|><|START_ACTION|>[]<|END_THINKING|><|START_ACTION|>'
     '[{"tool_name": "now", "parameters": {}}, {"tool_name": "now", "parameters": {}}]'
     "<|END_ACTION|>", [("now", {})] * 2),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "calls"), OTHERS, ids=range(len(OTHERS)))
def test_calls_without_arguments_and_calls_beside_thoughts(
    name: str, text: str, calls: Any
) -> None:
    found, content, problem = _read(name, text)
    assert (found, problem) == (calls, "")
    assert content == ("" if calls else "No.")


ADD = '{"a": 1, "b": 2}'
ADDED = [("add", {"a": 1, "b": 2})]
_NEXT = "<|end|><|start|>assistant"
_THOUGHT = f"<|channel|>analysis<|message|>Two numbers.{_NEXT}"
HARMONY = [
    (f"<|channel|>commentary to=functions.add <|constrain|>json<|message|>{ADD}", ADDED, ""),
    (f"<|channel|>commentary to=functions.add<|constrain|>json<|message|>{ADD}", ADDED, ""),
    (f"<|channel|>commentary to=functions.add json<|message|>{ADD}", ADDED, ""),
    (f"<|channel|>commentary to=functions.add code<|message|>{ADD}", ADDED, ""),
    (f"<|channel|>commentary to=functions.add<|message|>{ADD}", ADDED, ""),
    (f"<|channel|>commentary to=functions.add <|constrain|>code<|message|>{ADD}", ADDED, ""),
    (f"<|channel|>analysis to=functions.add code<|message|>{ADD}", ADDED, ""),
    (f"<|channel|>analysis to=functions.add json<|message|>{ADD}", ADDED, ""),
    (f"<|channel|>analysis to=functions.add <|constrain|>json<|message|>{ADD}", ADDED, ""),
    (f"<|channel|>analysis to=functions.add<|message|>{ADD}", ADDED, ""),
    (f"{_THOUGHT}<|channel|>analysis to=functions.add code<|message|>{ADD}", ADDED, ""),
    (f"{_THOUGHT}<|channel|>commentary to=functions.add code<|message|>{ADD}", ADDED, ""),
    (f"{_THOUGHT} to=functions.add<|channel|>commentary json<|message|>{ADD}", ADDED, ""),
    (f"{_THOUGHT} to=functions.add<|channel|>analysis code<|message|>{ADD}", ADDED, ""),
    (f" to=functions.add<|channel|>commentary<|constrain|>json<|message|>{ADD}", ADDED, ""),
    (f"<|channel|>commentary<|message|>I add.{_NEXT}<|channel|>analysis to=functions.add code"
     f"<|message|>{ADD}", ADDED, "I add."),
    (f"<|channel|>analysis to=functions.add code<|message|>{ADD}<|call|>", ADDED, ""),
    (f"<|channel|>analysis to=functions.add code<|message|>\n{ADD}\n", ADDED, ""),
    (f"<|channel|>analysis<|message|>No end.<|start|>assistant<|channel|>commentary"
     f" to=functions.add code<|message|>{ADD}", ADDED, ""),
    (f"<|channel|>analysis<|message|>No end.<|channel|>analysis to=functions.add code"
     f"<|message|>{ADD}", ADDED, ""),
    ("<|channel|>analysis to=functions.files.list-all code<|message|>{}",
     [("files.list-all", {})], ""),
    ("<|channel|>commentary to=functions.now code<|message|>{}", [("now", {})], ""),
    (f"<|channel|>analysis to=functions.add code<|message|>{ADD}<|call|><|start|>assistant"
     f"<|channel|>commentary to=functions.now code<|message|>{{}}", [*ADDED, ("now", {})], ""),
]  # fmt: skip
NO_HARMONY = [
    (f"<|channel|>analysis<|message|>Perhaps to=functions.add code {ADD}{_NEXT}"
     "<|channel|>final<|message|>Done.", "Done.", False),
    (f"<|channel|>analysis<|message|>commentary to=functions.add{_NEXT}"
     f"<|channel|>final<|message|>{ADD}", ADD, False),
    (f"<|channel|>final<|message|>to=functions.add code {ADD}",
     f"to=functions.add code {ADD}", False),
    (f"<|channel|>commentary<|message|>to=functions.add {ADD}", f"to=functions.add {ADD}", False),
    ("<|channel|>analysis<|message|>{}", "", False),
    (f"{_THOUGHT}<|channel|>final json<|message|>{ADD}", ADD, False),
    (f"{_THOUGHT}<|channel|>final <|constrain|>json<|message|>{ADD}", ADD, False),
    ("<|channel|>analysis to=functions.add code<|message|>print(1)", None, True),
    ('<|channel|>analysis to=functions.add code<|message|>{"a": 1, "b"', None, True),
    ('<|channel|>commentary to=functions.add code<|message|>{"a": 1}}', None, True),
    ("<|channel|>commentary to=functions.add code<|message|>[1, 2]", None, True),
    ("<|channel|>analysis to=functions.add code<|message|>", None, True),
    ("<|channel|>analysis to=functions.add code", None, True),
]  # fmt: skip


@pytest.mark.parametrize(("text", "calls", "content"), HARMONY, ids=range(len(HARMONY)))
def test_the_channels_in_which_gpt_oss_calls(text: str, calls: Any, content: str) -> None:
    assert _read("Harmony", text) == (calls, content, "")


@pytest.mark.parametrize(("text", "content", "told"), NO_HARMONY, ids=range(len(NO_HARMONY)))
def test_what_is_no_call_of_gpt_oss(text: str, content: str | None, told: bool) -> None:
    calls, rest, problem = _read("Harmony", text)
    assert not calls
    assert bool(problem) is told
    assert content is None or rest == content


PLAIN = [
    '{"name": "Alice", "age": 30}',
    '{"name": "Alice", "parameters": {"size": 3}}',
    '{"name": "summary", "parameters": {"a": 1}, "result": 2}',
    '{"name": "Add", "parameters": {"a": 1}}',
    '{"name": "", "parameters": {}}',
    '{"name": null, "parameters": {}}',
    '{"name": ["add"], "parameters": {}}',
    '{"answer": 42}',
    '{"parameters": {"a": 1}}',
    '{"function": "add", "parameters": {"a": 1}}',
    '[{"name": "Bob"}, {"name": "Eve"}]',
    "[1, 2, 3]",
    "42",
    '"add"',
    "{}",
    "{x | x > 3} is the set.",
    '{"name": "Alice", "children": [{"name": "add"}]',
    '{"name": "Alice", "age":',
    'The record is {"name": "Alice", "parameters": {}}.',
    'To add, one writes {"name": "Alice", "parameters": {"a": 1}} as text.',
    '{\n  "name": "Alice",\n  "parameters": {"a": 1}\n}\n',
    '```json\n{"name": "Alice", "parameters": {}}\n```',
]


@pytest.mark.parametrize("text", PLAIN, ids=range(len(PLAIN)))
def test_a_json_answer_that_names_no_tool_is_an_answer(text: str) -> None:
    for name in ("Llama 3", "Hermes", "Mistral", "Qwen3-Coder"):
        assert _read(name, text) == ([], text, "")


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "add", "parameters": {"a": 1, "b": 2}}',
        '  {"name": "add", "parameters": {"a": 1, "b": 2}}\n',
        '{"type": "function", "name": "add", "parameters": {"a": 1, "b": 2}}',
        '{"name": "add", "arguments": {"a": 1, "b": 2}}',
        '{"parameters": {"a": 1, "b": 2}, "name": "add"}',
        '<|python_tag|>{"name": "add", "parameters": {"a": 1, "b": 2}}',
        '<|python_tag|> {"type": "function", "name": "add", "parameters": {"a": 1, "b": 2}}',
        '{"name": "add", "parameters": "{\\"a\\": 1, \\"b\\": 2}"}',
    ],
)
def test_a_json_answer_that_names_a_tool_is_a_call(text: str) -> None:
    assert _read("Llama 3", text) == (ADDED, "", "")
    if "<|python_tag|>" not in text:
        assert _read("Llama 3", text, []) == ([], text, ""), "no tools, no calls"


DEFINITIONS = {
    "Code": {"type": "string"},
    "Count": {"type": "integer"},
    "Alias": {"$ref": "#/$defs/Code"},
    "Loop": {"$ref": "#/$defs/Loop"},
    "Point": {"type": "object", "properties": {"x": {"type": "integer"}}},
    "Choice": {"enum": ["1", "2", "3"]},
    "a/b": {"type": "string"},
}
SCHEMAS: list[tuple[Any, str, Any]] = [
    ({"$ref": "#/$defs/Code"}, "007", "007"),
    ({"$ref": "#/$defs/Code"}, "true", "true"),
    ({"$ref": "#/$defs/Alias"}, "12", "12"),
    ({"$ref": "#/$defs/Count"}, "12", 12),
    ({"$ref": "#/$defs/Point"}, '{"x": 1}', {"x": 1}),
    ({"$ref": "#/$defs/a~1b"}, "12", "12"),
    ({"$ref": "#/$defs/Choice"}, "2", "2"),
    ({"$ref": "#/$defs/Loop"}, "12", 12),
    ({"$ref": "#/$defs/Missing"}, "12", 12),
    ({"$ref": "https://example.com/code.json"}, "12", 12),
    ({"$ref": "#/$defs/Code", "description": "a code"}, "12", "12"),
    ({"allOf": [{"$ref": "#/$defs/Code"}]}, "12", "12"),
    ({"allOf": [{"$ref": "#/$defs/Count"}, {"minimum": 3}]}, "12", 12),
    ({"allOf": [{"type": "string"}, {"maxLength": 5}]}, "3.0", "3.0"),
    ({"allOf": [{"type": ["string", "integer"]}, {"type": "integer"}]}, "12", 12),
    ({"allOf": [{"type": ["string", "integer"]}, {"type": "string"}]}, "12", "12"),
    ({"anyOf": [{"$ref": "#/$defs/Code"}, {"type": "null"}]}, "12", "12"),
    ({"anyOf": [{"$ref": "#/$defs/Code"}, {"type": "null"}]}, "null", None),
    ({"oneOf": [{"type": "string"}, {"type": "null"}]}, "1e3", "1e3"),
    ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "12", 12),
    ({"anyOf": [{"anyOf": [{"type": "string"}]}, {"type": "null"}]}, "12", "12"),
    ({"enum": ["1", "2"]}, "1", "1"),
    ({"enum": ["true", "false"]}, "true", "true"),
    ({"enum": ["null", "3.10", "3.9"]}, "3.10", "3.10"),
    ({"enum": [1, 2]}, "1", 1),
    ({"enum": ["a", 1, None]}, "1", 1),
    ({"enum": ["a", 1, None]}, "null", None),
    ({"enum": ["on", "off"]}, "12", "12"),
    ({"const": "5"}, "5", "5"),
    ({"const": 5}, "5", 5),
    ({"anyOf": [{"enum": ["1"]}, {"const": "2"}]}, "2", "2"),
    ({"allOf": "string"}, "12", "12"),
    ({"enum": "12"}, "12", 12),
    ({"$ref": 5}, "12", 12),
    (True, "12", 12),
]
XML = [(name, form) for name, form in MARKED if name in ("Qwen3-Coder", "GLM", "invoke")]


@pytest.mark.parametrize(("name", "form"), XML, ids=[name for name, _ in XML])
@pytest.mark.parametrize(("schema", "text", "value"), SCHEMAS, ids=range(len(SCHEMAS)))
def test_bare_text_gets_the_type_of_a_schema_that_refers_to_others(
    name: str, form: str, schema: Any, text: str, value: Any
) -> None:
    tool = _tool("write", DEFINITIONS, path=TEXT, content=schema)
    calls, _, problem = _read(name, form % text, [tool])
    assert not problem
    [(_, arguments)] = calls
    assert arguments["content"] == value
    assert type(arguments["content"]) is type(value)


NUMBERS = [
    "NaN",
    "Infinity",
    "-Infinity",
    "1e400",
    "-1e400",
    "1E+999",
    "[1, NaN]",
    '{"c": {"d": -1e999}}',
    "1" * 400 + ".0",
    "1" * 400,
    "-" + "9" * 5000,
    "1e99999999999999999999",
]
FINITE: list[tuple[str, float]] = [
    ("1e308", 1e308),
    ("-1e-400", -0.0),
    ("5e-324", 5e-324),
    ("0.1", 0.1),
    ("1" * 300, int("1" * 300)),
    ("-0", 0),
    ("1e2", 100.0),
]


@pytest.mark.parametrize("form", _CALL)
def test_a_number_that_json_lacks_makes_no_call(form: str) -> None:
    for number in NUMBERS:
        name, text = _json_call(form, "add", f'{{"a": {number}}}')
        calls, content, problem = _read(name, text)
        assert not calls, text
        assert problem, text
        assert number in content
    for number, value in FINITE:
        name, text = _json_call(form, "add", f'{{"a": {number}}}')
        assert _read(name, text) == ([("add", {"a": value})], "", ""), text


@pytest.mark.parametrize(("name", "form"), MARKED, ids=[name for name, _ in MARKED])
def test_marked_values_are_never_numbers_that_json_lacks(name: str, form: str) -> None:
    tool = _tool("write", path=TEXT, content={"type": ["number", "array", "object"]})
    for quote in ("'%s'", '<|"|>%s<|"|>'):
        form = form.replace(quote, "%s")
    for number in ["nan", "inf", "float('inf')", "1e400j", *NUMBERS]:
        for called in _read(name, form % number, [tool])[0]:
            text = json.dumps(called, allow_nan=False)
            assert json.loads(text) == list(called)
            assert not isinstance(called[1]["content"], float) or math.isfinite(
                called[1]["content"]
            )


@pytest.mark.parametrize("form", _CALL)
def test_half_a_character_reaches_no_program(form: str) -> None:
    """A lone surrogate cannot be sent as UTF-8."""
    for content in ("\\ud83d", "a\\ude00b", "\\ud83d \\ude00"):
        name, text = _json_call(form, "write", f'{{"path": "a", "content": "{content}"}}')
        calls, _, _ = _read(name, text)
        for called in calls:
            json.dumps(called, ensure_ascii=False).encode()
    name, text = _json_call(form, "write", '{"path": "a.md", "content": "\\ud83d\\ude00"}')
    assert _read(name, text)[0] == [_write("😀")]


_WITH_THOUGHTS = [each for each in FORMATS if "(?P<end></think>)" in each.pieces.pattern]


@pytest.mark.parametrize("call_format", _WITH_THOUGHTS, ids=lambda each: str(each.name))
@pytest.mark.parametrize("with_tools", [False, True])
def test_of_many_marks_of_a_thought_the_first_ends_it(call_format: Any, with_tools: bool) -> None:
    """A thought may begin in the prompt. The marks after its end are text of the answer."""
    assert len(_WITH_THOUGHTS) > 9
    draw = random.Random(0)
    words = ["<think>", "</think>", "</think>", "one ", " two", "\n", "3 < 4, "]
    for _ in range(40):
        text = "".join(draw.choices(words, k=draw.randint(0, 7)))
        opened = text.lstrip().removeprefix("<think>")
        thought, end, rest = opened.partition("</think>")
        begins_here = opened != text.lstrip()
        if begins_here or end:
            # What began in the prompt has no mark here.
            thought = thought if begins_here else text.partition("</think>")[0]
            expected = {"reasoning_content": thought.strip(), "content": rest.lstrip()}
        else:
            expected = {"content": text}

        message, problem = parse_answer(text, TOOLS if with_tools else [], call_format)
        assert (message.fields, problem) == ({"role": "assistant", **expected}, ""), text
