"""The formats in which the families of models write thoughts and tool calls.

`services.environment.template` chooses the format: the first that reads back what the model's own
chat template writes. Arguments that a format writes as bare text get the types of the tool's
schema.
"""

import ast
import json
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple
from urllib.parse import unquote

from common import Json
from services.environment.messages import Message, Tools, encodable, made_tool_call
from services.sandbox.python_source import parse_python


class ToolCall(NamedTuple):
    """A tool call."""

    name: str
    arguments: Any
    id: str = ""
    """The id that the model wrote; empty if its format has none, or the model wrote no usable
    one."""


Schemas = Mapping[str, Any]
"""The schema of every offered tool's arguments, by the tool's name."""
Read = Callable[[str, Schemas], list[ToolCall]]
"""Returns the calls in the text of one block; none, if it is no call after all. Raises ValueError
for a call that cannot be read."""

# Answers are untrusted: no two neighbouring parts of a pattern match the same characters, since
# such a pattern may take exponential time.
_THINK = r"\A\s*+<think>(?P<thought>.*?)(?:</think>|\Z)"

# Texts that may contain any mark of a format, and that end only at their own closing mark.
_JSON_TEXT = r'"(?:[^"\\]|\\.)*+(?:"|\Z)'
_PYTHON_TEXT = rf"{_JSON_TEXT}|'(?:[^'\\]|\\.)*+(?:'|\Z)"
_GEMMA_TEXT = r'<\|"\|>.*?(?:<\|"\|>|\Z)'


class CallFormat(NamedTuple):
    """How a family writes its answers."""

    name: str
    pieces: re.Pattern[str]
    """Matches the pieces of an answer one after another: a `call` (a block with one call or more),
    a `thought`, the `end` of a thought that began in the prompt, and markup, which nobody should
    see."""
    read: Read


def _pieces(
    start: str,
    end: str,
    *,
    holds: str = _JSON_TEXT,
    thought: str = _THINK,
    markup: str = "",
    reads_end: bool = False,
) -> re.Pattern[str]:
    """Returns the regular expression that finds thoughts, blocks of calls and markup in an answer.

    Args:
        start: begins a block of calls.
        end: ends it, as does the end of the answer.
        holds: what may hold these marks as text.
        thought: a whole thought.
        markup: what neither a program nor a user should see.
        reads_end: whether the reader needs `end`, to tell a call that was cut.
    """
    body = rf"(?:(?>{holds})|[^\"'<\[;]++|(?!</think>).)*?"
    # A block that is only mentioned in a thought leaves the thought's end alone.
    end = rf"(?:{end}|(?=</think>)|\Z)"
    block = rf"(?P<call>{body}{end})" if reads_end else rf"(?P<call>{body}){end}"
    pieces = [thought, f"{start}{block}"]
    if "</think>" in thought:
        pieces.append("(?P<end></think>)")
    if markup:
        pieces.append(markup)
    return re.compile("|".join(pieces), re.DOTALL)


def _value(argument: tuple[str, str]) -> str:
    """Returns a regular expression for an argument between tags, of which the closing one may be
    missing.
    """
    opens, closes = argument
    return rf"{opens}.*?(?:{closes}|\Z)"


def _json(text: str) -> Any:
    """Reads JSON, with `?` for lone surrogates. Raises ValueError also for what only Python takes
    for JSON or a number: NaN, 1e400 (infinity), and integers beyond all floats.
    """
    try:
        value = json.loads(text, parse_int=_integer)
        written = json.dumps(value, ensure_ascii=False, allow_nan=False)
        return json.loads(encodable(written))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the tool call is not JSON: {error}") from None


def _integer(digits: str) -> int:
    if len(digits) > _MAX_DIGITS:
        raise ValueError(f"{digits[:20]}… is too large for a number")
    return int(digits)


_MAX_DIGITS = 308
"""Every integer with this many digits fits into a float, which is all that other languages have."""


def _read_json(text: str, schemas: Schemas) -> list[ToolCall]:
    """Reads `{"name": NAME, "arguments": {…}}`, or a list of such objects."""
    content = _json(text)
    return [_call(each) for each in (content if isinstance(content, list) else [content])]


def _call(content: Any) -> ToolCall:
    """Returns the call in an object, whose keys differ between the families."""
    content = content if isinstance(content, dict) else {}
    name = content.get("name", content.get("tool_name"))
    if not isinstance(name, str):
        raise ValueError("the tool call has no name")
    arguments = content.get("arguments", content.get("parameters")) or {}
    if isinstance(arguments, str):
        arguments = _json(arguments) if arguments.strip() else {}
    identifier = content.get("id")
    is_usable = isinstance(identifier, str) and _MISTRAL_ID.fullmatch(identifier)
    return ToolCall(name, _mapping(arguments), identifier if is_usable else "")


_MISTRAL_ID = re.compile("[A-Za-z0-9]{9}")


def _mapping(arguments: Any) -> Json:
    if not isinstance(arguments, dict):
        raise ValueError("the arguments of the tool call are not a mapping")
    return arguments


def _read_bare(text: str, schemas: Schemas) -> list[ToolCall]:
    """Reads an object as `_read_json` does, if it begins with the mark of a call or names an
    offered tool: other JSON is the answer itself.
    """
    content = text.strip()
    is_marked = content.startswith(_PYTHON_TAG)
    content = content.removeprefix(_PYTHON_TAG)
    try:
        call = _call(_json(content))
    except ValueError:
        named = _NAMED.match(content)
        if is_marked or (named is not None and named[1] in schemas):
            raise
        return []
    return [call] if is_marked or call.name in schemas else []


_PYTHON_TAG = "<|python_tag|>"
_NAMED = re.compile(r'\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"([^"\\]*)"')


def _named_json(head: str) -> Read:
    """Returns a reader of calls that are a `name` and perhaps an `id`, groups of `head`, and a JSON
    object.
    """
    pattern = re.compile(rf"\s*{head}\s*(?P<arguments>\{{.*\}})(?:\s*```)?\s*\Z", re.DOTALL)

    def read(text: str, schemas: Schemas) -> list[ToolCall]:
        match = pattern.match(text)
        if match is None:
            raise ValueError("the tool call is not a name and JSON")
        arguments = _mapping(_json(match["arguments"]))
        return [ToolCall(match["name"], arguments, match.groupdict().get("id") or "")]

    return read


def _tagged(start: str, end: str, argument: tuple[str, str]) -> Read:
    """Returns a reader of calls whose arguments are text between tags.

    Args:
        start: begins a call; its group is the tool's name.
        end: ends it.
        argument: begins an argument, with its name as the group, and ends it.
    """
    opens, closes = argument
    # Between arguments neither an argument nor a call begins, so that one which is not closed makes
    # the match fail instead of being skipped.
    body = rf"(?:(?>{opens}.*?{closes})|(?!{opens}|{start}).)*?"
    calls = re.compile(rf"{start}({body}){end}", re.DOTALL)
    arguments = re.compile(rf"{opens}(.*?){closes}", re.DOTALL)

    def read(text: str, schemas: Schemas) -> list[ToolCall]:
        # Anything left over belongs to a broken call: the rest is not what the model asked for.
        if calls.sub("", text).strip():
            raise ValueError("the tool call is not closed, or something is beside it")
        found = []
        for match in calls.finditer(text):
            name, body = match.group(1, 2)
            if arguments.sub("", body).strip():
                raise ValueError(f"the arguments of {name} are not all closed")
            schema = schemas.get(name)
            values = {key: _typed(value, schema, key) for key, value in arguments.findall(body)}
            found.append(ToolCall(name, values))
        if not found:
            raise ValueError("the tool call has no name")
        return found

    return read


def _typed(text: str, parameters: Any, name: str) -> Any:
    """Returns an argument that was written as bare text, as a value that the schema of the tool's
    parameters allows.

    Other text stays text, which the tool may refuse.
    """
    try:
        value = _json(text)
    except ValueError:
        # Templates that print Python's values write True, False, None, and lists with such quotes.
        value = _PYTHON_WORDS.get(text.strip(), text)
        if text.lstrip()[:1] in ("[", "{"):
            with suppress(SyntaxError, ValueError):
                value = _literal(_parsed(text.strip()))
    if isinstance(value, str):  # text is never read as JSON text
        return text
    properties = parameters.get("properties") if isinstance(parameters, dict) else None
    schema = properties.get(name) if isinstance(properties, dict) else None
    return value if _allows(schema, value, parameters) else text


_PYTHON_WORDS = {"True": True, "False": False, "None": None}
_KINDS = {
    bool: {"boolean"},
    int: {"integer", "number"},
    float: {"number"},
    dict: {"object"},
    list: {"array"},
    type(None): {"null"},
}
"""The types of a schema that allow a value, by its class."""


def _allows(schema: Any, value: Any, root: Any, within: frozenset[str] = frozenset()) -> bool:
    """Returns whether a schema allows a value by its type, enumeration and parts.

    Args:
        schema: what cannot be understood in it allows everything.
        value: anything of JSON but text.
        root: the schema in which references are looked up.
        within: the references that led here; one that leads to itself allows everything.
    """
    if isinstance(schema, str):  # some write only the type
        schema = {"type": schema}
    if not isinstance(schema, dict) or (value is None and schema.get("nullable")):
        return True

    types = {name for name in _listed(schema.get("type")) if isinstance(name, str)}
    if types and not types & _KINDS[type(value)]:
        return False

    choices = schema.get("enum", [schema["const"]] if "const" in schema else None)
    # Python has True equal 1, which JSON does not.
    same = [
        choice
        for choice in _listed(choices)
        if choice == value and isinstance(choice, bool) == isinstance(value, bool)
    ]
    if isinstance(choices, list | tuple) and not same:
        return False

    parts = _listed(schema.get("allOf"))
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference not in within:
        within |= {reference}
        parts.append(_referred(reference, root))
    if not all(_allows(part, value, root, within) for part in parts):
        return False
    for name in ("anyOf", "oneOf"):
        parts = _listed(schema.get(name))
        if parts and not any(_allows(part, value, root, within) for part in parts):
            return False
    return True


def _listed(part: Any) -> list[Any]:
    if part is None:
        return []
    return list(part) if isinstance(part, list | tuple) else [part]


def _referred(reference: str, root: Any) -> Any:
    """Returns what a reference such as `#/$defs/Code` refers to; None if it is not in `root`."""
    target = root if reference.startswith("#") else None
    for part in unquote(reference).split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        target = target.get(name) if isinstance(target, dict) else None
    return target


def _read_python(text: str, schemas: Schemas) -> list[ToolCall]:
    """Reads `[name(key=value, …), …]`, with literals of Python or JSON."""
    source = text.strip()
    if not source.startswith("["):
        # One call on every line.
        source = "[" + ",".join(source.splitlines()) + "]"
    for attempt in (source, source.replace("\n", "\\n")):  # templates leave line ends in strings
        with suppress(SyntaxError):
            listed = _parsed(attempt)
            if isinstance(listed, ast.List):
                return [_python_call(each) for each in listed.elts]
    raise ValueError("the tool call is not a list of Python calls")


def _parsed(source: str) -> ast.expr:
    statements = parse_python(source).body
    if len(statements) != 1 or not isinstance(statements[0], ast.Expr):
        raise SyntaxError("the text is no expression of Python")
    return statements[0].value


def _python_call(node: ast.expr) -> ToolCall:
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("the tool call is not a Python call with named arguments")
    arguments = {str(each.arg): _literal(each.value) for each in node.keywords}
    return ToolCall(ast.unparse(node.func), arguments)


def _literal(node: ast.expr) -> Any:
    for inner in ast.walk(node):
        if isinstance(inner, ast.Name) and inner.id in _JSON_WORDS:
            inner.id = _JSON_WORDS[inner.id]
    try:
        # By way of its text, so that the renamed words are read as Python's.
        value = ast.literal_eval(_parsed(ast.unparse(node)))
        return _json(json.dumps(value, allow_nan=False))
    except (ValueError, TypeError, SyntaxError, RecursionError):
        raise ValueError("an argument of the tool call is not a literal") from None


_JSON_WORDS = {"true": "True", "false": "False", "null": "None"}


def _read_gemma(text: str, schemas: Schemas) -> list[ToolCall]:
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
    return [ToolCall(match[1], _mapping(_json("".join(parts))))]


_CHANNEL = r"(?:<\|start\|>assistant)?"
_PARAMETER = (r"<parameter=([^\s>]+)>\n?", r"\n?</parameter>")
_KEY_AND_VALUE = (r"<arg_key>([^<]*)</arg_key>\s*<arg_value>", "</arg_value>")
_NAMED_PARAMETER = (
    r"<(?:[^\s<>/]*?)parameter name=\"([^\"]+)\"[^>]*>",
    r"</(?:[^\s<>/]*?)parameter>",
)
_INVOKE = r"<(?:[^\s<>/]*?)invoke name=\"([^\"]+)\">"
_INVOKED = r"</(?:[^\s<>/]*?)invoke>"

HERMES = CallFormat("Hermes", _pieces("<tool_call>", "</tool_call>"), _read_json)

FORMATS = (
    HERMES,
    CallFormat(
        "Qwen3-Coder",
        _pieces("<(?:seed:)?tool_call>", "</(?:seed:)?tool_call>", holds=_value(_PARAMETER)),
        _tagged(r"<function=([^\s>]+)>", "</function>", _PARAMETER),
    ),
    CallFormat(
        "GLM",
        # Without its end, a call that was cut looks like one with fewer arguments.
        _pieces("<tool_call>", "</tool_call>", holds=_value(_KEY_AND_VALUE), reads_end=True),
        _tagged(r"\A\s*+([^\s<]++)", r"</tool_call>\Z", _KEY_AND_VALUE),
    ),
    CallFormat(
        "Python calls",
        _pieces(r"<\|tool_call_start\|>", r"<\|tool_call_end\|>", holds=_PYTHON_TEXT),
        _read_python,
    ),
    CallFormat(
        "Python calls in tags",
        _pieces("<function_calls>", "</function_calls>", holds=_PYTHON_TEXT),
        _read_python,
    ),
    CallFormat(
        "Gemma 4",
        _pieces(
            r"<\|tool_call>",
            r"<tool_call\|>",
            holds=_GEMMA_TEXT,
            thought=r"<\|channel>thought\n?(?P<thought>.*?)(?:<channel\|>|\Z)",
        ),
        _read_gemma,
    ),
    CallFormat(
        "Harmony",
        _pieces(
            rf"(?:{_CHANNEL}<\|channel\|>(?:analysis|commentary)|\A|<\|start\|>assistant)"
            r" ?to=functions\.",
            r"<\|(?:call|end|return)\|>",
            thought=rf"{_CHANNEL}<\|channel\|>analysis<\|message\|>"
            r"(?P<thought>.*?)(?:<\|end\|>|(?=<\|start\|>|<\|channel\|>)|\Z)",
            markup=rf"{_CHANNEL}<\|channel\|>(?:final|commentary)(?:\s*<\|constrain\|>)?"
            r"\s*[a-z]*<\|message\|>|<\|end\|>",
        ),
        # The models write `json` or `code`, with its mark or without, and often in `analysis`.
        _named_json(
            r"(?P<name>[^\s<]+)"
            r"(?:<\|channel\|>(?:analysis|commentary))?"
            r"(?:\s*<\|constrain\|>)?"
            r"\s*[a-z]*<\|message\|>"
        ),
    ),
    CallFormat(
        "DeepSeek",
        _pieces(
            "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", markup="<｜tool▁calls▁(?:begin|end)｜>"
        ),
        _named_json(
            r"(?:function<｜tool▁sep｜>)?"
            r"(?P<name>[^\s<{]+)"
            r"(?:<｜tool▁sep｜>)?"
            r"(?:\s*```json)?"
        ),
    ),
    CallFormat(
        "Kimi",
        _pieces(
            r"<\|tool_call_begin\|>",
            r"<\|tool_call_end\|>",
            markup=r"<\|tool_calls?_section_(?:begin|end)\|>",
        ),
        # The template repeats the id before the result of its call.
        _named_json(
            r"(?P<id>(?:functions\.)?(?P<name>[^\s<:]+)(?::\d+)?)"
            r"\s*<\|tool_call_argument_begin\|>"
        ),
    ),
    CallFormat(
        "invoke",
        _pieces(
            r"(?=<[^\s<>/]*invoke name=)",
            _INVOKED,
            holds=_value(_NAMED_PARAMETER),
            thought=rf"{_THINK}|\A\s*+to=self<\|message\|>(?P<to_self>.*?)(?:<\|eom\|>|\Z)",
            markup=r"</?[^\s<>/]*(?:function_calls|tool_calls?)>"
            rf"|{_CHANNEL} ?to=[^\s<]+<\|message\|>|<\|eom\|>",
            reads_end=True,
        ),
        _tagged(_INVOKE, _INVOKED, _NAMED_PARAMETER),
    ),
    CallFormat(
        "Mistral",
        _pieces(
            r"\[TOOL_CALLS\](?=[^\[{])",
            r"(?=\[TOOL_CALLS\])",
            thought=r"\A\s*+\[THINK\](?P<thought>.*?)(?:\[/THINK\]|\Z)",
        ),
        _named_json(
            r"(?P<name>[^\s\[{]+)"
            # An id is nine letters and digits before the next mark; what is not one is skipped.
            r"(?:\[CALL_ID\](?:(?P<id>[A-Za-z0-9]{9})(?=\[)|[^\[]*))?"
            r"(?:\[ARGS\])?"
        ),
    ),
    CallFormat("Mistral lists", _pieces(r"\[TOOL_CALLS\]", r"\Z"), _read_json),
    CallFormat(
        "lists after a mark",
        _pieces(
            r"(?:<\|tool_call\|>|<tool_calls>|<TOOLCALL>)",
            r"(?:<\|/tool_call\|>|</tool_calls>|</TOOLCALL>)",
        ),
        _read_json,
    ),
    CallFormat(
        "Command",
        _pieces(
            r"<\|START_ACTION\|>",
            r"<\|END_ACTION\|>",
            thought=r"<\|START_THINKING\|>(?P<thought>.*?)(?:<\|END_THINKING\|>|\Z)",
            markup=r"<\|(?:START|END)_(?:RESPONSE|TEXT)\|>",
        ),
        _read_json,
    ),
    CallFormat(
        "Llama 3",
        _pieces(
            r"(?:\A|(?<=</think>)|(?<=<\|python_start\|>)|(?<=<\|python_end\|>)|(?<=\});)"
            r"\s*+(?=<\|python_tag\|>|\{)",
            r"(?=;|<\|python_end\|>)|\Z",
            markup=r"<\|python_(?:start|end)\|>",  # of Llama 4
        ),
        _read_bare,
    ),
)


class Parsed(NamedTuple):
    """An answer as a message, and why a tool call in it cannot be read; empty when all can."""

    message: Message
    problem: str


def parse_answer(
    text: str,
    tools: Tools,
    call_format: CallFormat = HERMES,
    answer: int = 0,
) -> Parsed:
    """Returns an answer as a message; looks for tool calls only with `tools`. The ids of its calls
    begin with its number, `answer`.

    If one tool call cannot be read, all of them stay in the content, so that nothing that was
    sampled is lost.
    """
    schemas = {tool["function"]["name"]: tool["function"].get("parameters") for tool in tools}
    thoughts, parts = _split(text, call_format)
    calls: list[ToolCall] = []
    spoken: list[str] = []
    problem = ""
    try:
        for part, block in parts:
            found = call_format.read(block, schemas) if tools and block is not None else []
            calls += found
            if not found:
                spoken.append(part)
    except ValueError as error:
        problem = str(error)
    except RecursionError:
        problem = "the tool call is nested too deeply"

    if problem and not thoughts and "</think>" in text:
        # The thought may mention only the beginning of a call, whose open string then hides the
        # thought's end.
        after_thought = parse_answer(f"<think>{text}", tools, call_format, answer)
        if after_thought.message.tool_calls:
            return after_thought

    fields: Json = {"role": "assistant"}
    content = "".join(part for part, _ in parts)
    if thoughts:
        fields["reasoning_content"] = "\n".join(thoughts).strip()
        content = content.lstrip()
    if calls and not problem:
        fields["tool_calls"] = []
        for number, call in enumerate(calls):
            # Nine letters and digits, as Mistral's templates want it.
            made = f"call{answer:03}{number:02}"
            fields["tool_calls"].append(made_tool_call(call.id or made, call.name, call.arguments))
        content = "".join(spoken).strip()
    return Parsed(Message(fields | {"content": content}), problem)


def _split(text: str, call_format: CallFormat) -> tuple[list[str], list[tuple[str, str | None]]]:
    """Returns the thoughts of an answer, and its other parts in order: each as it was written, and
    for a block of calls what its reader needs.
    """
    thoughts: list[str] = []
    parts: list[tuple[str, str | None]] = []
    position = 0
    for piece in call_format.pieces.finditer(text):
        parts.append((text[position : piece.start()], None))
        position = piece.end()
        kind = piece.lastgroup
        if kind == "call":
            parts.append((piece[0], piece["call"]))
        elif kind == "end" and thoughts:
            parts.append((piece[0], None))
        elif kind == "end":
            # Everything before was thought, also what looked like calls.
            thoughts.append(text[: piece.start()])
            parts.clear()
        elif kind is not None:
            thoughts.append(piece[kind])
    parts.append((text[position:], None))
    return thoughts, parts
