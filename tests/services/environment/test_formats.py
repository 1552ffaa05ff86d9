"""Tool calls of every format: what a model's template writes is read back, or refused with the
reason.

docs/reference/models.md has one line for each template of the package TRL; a test fails when its
line is not what happens.
"""

import importlib.util
import os
import string
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from common.clients.rollout import RolloutClient
from common.errors import ConfigError, InvalidInput
from common.process.metrics import Metrics
from common.settings.sections import EnvironmentSection
from services.environment.call_formats import FORMATS, parse_answer
from services.environment.environments import Environment
from services.environment.messages import parse_messages
from services.environment.service import EpisodeService
from services.environment.template import Template
from tests.support.errors import raises
from tests.support.models.families import FAMILIES
from tests.support.models.trap_models import CHATML, trap_session
from tests.support.paths import ROOT

PAGE = ROOT / "docs/reference/models.md"
STOPS = (
    "<|im_end|>",
    "<|return|>",
    "<|call|>",
    "<turn|>",
    "<|tool_response>",
    "<|user|>",
    "<|observation|>",
    "<|eot_id|>",
    "<|eot|>",
    "<end_of_turn>",
    "<|END_OF_TURN_TOKEN|>",
    "<｜end▁of▁sentence｜>",
    "<end_of_utterance>",
    "<|end|>",
    "[e~[",
    "<|end_of_text|>",
    "<|role_end|>",
    "<SPECIAL_12>",
    "<seed:eos>",
    "<|assistant_end|>",
    "<|message_sep|>",
    "<end_of_sentence>",
    "</assistant>",
    "<sep>",
)
"""The tokens with which the families' models end an answer."""

_JSON_CALL = '{"name": "\' + f.name + \'", "arguments": \' + f.arguments | tojson + \'}'
_XML = (
    "{% for k, v in f.arguments.items() %}{{ 'OPEN' + k + 'MID' }}"
    "{{ v if v is string else v | tojson }}{{ 'CLOSE' }}{% endfor %}"
)


def _xml(start: str, middle: str, end: str) -> str:
    return _XML.replace("OPEN", start).replace("MID", middle).replace("CLOSE", end)


_PYTHON = (
    "{{ f.name + '(' }}{% for k, v in f.arguments.items() %}"
    "{{ k + '=' }}{{ v | tojson }}{{ '' if loop.last else ', ' }}{% endfor %}{{ ')' }}"
)
CALLS = {
    "Hermes": "{{ '<tool_call>\n" + _JSON_CALL + "\n</tool_call>' }}",
    "Qwen3-Coder": "{{ '<tool_call>\n<function=' + f.name + '>\n' }}"
    + _xml("<parameter=", ">\n", "\n</parameter>\n")
    + "{{ '</function>\n</tool_call>' }}",
    "GLM": "{{ '<tool_call>' + f.name + '\n' }}"
    + _xml("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n")
    + "{{ '</tool_call>' }}",
    "Python calls": "{{ '<|tool_call_start|>[' }}" + _PYTHON + "{{ ']<|tool_call_end|>' }}",
    "Python calls in tags": "{{ '<function_calls>' }}" + _PYTHON + "{{ '</function_calls>' }}",
    "Gemma 4": "{{ '<|tool_call>call:' + f.name + '{' }}{% for k, v in f.arguments.items() %}"
    "{{ k + ':' }}{% if v is string %}{{ '<|\"|>' + v + '<|\"|>' }}{% else %}{{ v | tojson }}"
    "{% endif %}{{ '' if loop.last else ',' }}{% endfor %}{{ '}<tool_call|>' }}",
    "Harmony": "{{ '<|channel|>commentary to=functions.' + f.name + ' <|constrain|>json<|message|>'"
    " + f.arguments | tojson + '<|call|>' }}",
    "DeepSeek": "{{ '<｜tool▁call▁begin｜>' + f.name + '<｜tool▁sep｜>' + f.arguments | tojson"
    " + '<｜tool▁call▁end｜>' }}",
    "Kimi": "{{ '<|tool_call_begin|>' + call.id + '<|tool_call_argument_begin|>'"
    " + f.arguments | tojson + '<|tool_call_end|>' }}",
    "invoke": "{{ '<m:tool_call>\n<invoke name=\"' + f.name + '\">\n' }}"
    + _xml('<parameter name="', '">', "</parameter>\n")
    + "{{ '</invoke>\n</m:tool_call>' }}",
    "Mistral": "{{ '[TOOL_CALLS]' + f.name + '[ARGS]' + f.arguments | tojson }}",
    "Mistral lists": "{{ '[TOOL_CALLS][" + _JSON_CALL + "]' }}",
    "lists after a mark": "{{ '<|tool_call|>[" + _JSON_CALL + "]<|/tool_call|>' }}",
    "Command": '{{ \'<|START_ACTION|>[{"tool_name": "\' + f.name + \'", "parameters": \''
    " + f.arguments | tojson + '}]<|END_ACTION|>' }}",
    "Llama 3": '{{ \'{"name": "\' + f.name + \'", "parameters": \''
    " + f.arguments | tojson + '}' }}",
}
"""How a template writes the function `f` of a call, by format."""
ONE_CALL = ("Mistral lists", "Llama 3")
ADD: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {
            "type": "object",
            "properties": {
                "a": {"type": "integer"},
                "b": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            },
        },
    },
}


def _template(calls: str, name: str = "") -> str:
    start = CHATML.index("{% for call in message.tool_calls")
    end = CHATML.index("{% endfor %}", start) + len("{% endfor %}")
    some = "[:1]" if name in ONE_CALL else ""
    loop = f"{{% for call in (message.tool_calls or []){some} %}}{{% set f = call.function %}}"
    calls = calls.replace("\n", "\\n")
    return f"{CHATML[:start]}{loop}{calls}{{% endfor %}}{CHATML[end:]}"


def _tokenizer(template: str) -> tuple[PreTrainedTokenizerFast, list[int]]:
    """Returns a tokenizer of single characters, and the tokens that end an answer."""
    letters = sorted({*string.printable, "é", *template})
    vocabulary = {letter: number for number, letter in enumerate(letters)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("\x00", "isolated")
    tokenizer.decoder = decoders.Fuse()
    ends = {"bos_token": "<bos>", "eos_token": "<eos>"}
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=template, **ends)
    used = [stop for stop in STOPS if stop in template]
    if "<|return|>" in used and "<|end|>" in used:
        used.remove("<|end|>")  # gpt-oss ends its thoughts with it
    made.add_tokens([AddedToken(stop, special=True, normalized=False) for stop in used])
    return made, [made.eos_token_id, *made.convert_tokens_to_ids(used)]


@pytest.mark.parametrize("name", CALLS)
def test_calls_are_read_as_the_template_writes_them(name: str) -> None:
    template = Template(*_tokenizer(_template(CALLS[name], name)))
    assert not template.no_tools
    assert template.call_format.name == name


_ASKS = "{% if add_generation_prompt %}"
_ROLES = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ '[INST]' + m.content + '[/INST]' }}"
    "{% elif m.role == 'tool' %}{{ check(m.tool_call_id) }}"
    "{{ '[TOOL_RESULTS]' + m.tool_call_id + m.content + '[/TOOL_RESULTS]' }}"
    "{% else %}{{ m.content }}{% for c in m.tool_calls or [] %}{{ check(c.id) }}{{ CALL }}"
    "{% endfor %}{{ eos_token }}{% endif %}{% endfor %}"
)
MISTRAL = (
    "{% macro check(id) %}{% if id | length != 9 or not id.isalnum() %}"
    "{{ raise_exception('ids have nine letters and digits') }}{% endif %}{% endmacro %}"
    "{% if tools %}{{ '[AVAILABLE_TOOLS]' + tools | tojson }}{% endif %}"
) + _ROLES
"""Writes nothing that starts an answer: it begins right after the question."""
QUIRKS = {
    "nothing that starts an answer": (
        "Mistral",
        MISTRAL.replace(
            "CALL", "'[TOOL_CALLS]' + c.function.name + '[ARGS]' + c.function.arguments | tojson"
        ),
    ),
    "a list, and nothing that starts an answer": (
        "Mistral lists",
        MISTRAL.replace(
            "{{ CALL }}",
            "{{ '[TOOL_CALLS][' + (c.function | tojson)[:-1] + ', \"id\": \"' + c.id + '\"}]' }}",
        ),
    ),
    "arguments as text": (
        "DeepSeek",
        _template(CALLS["DeepSeek"].replace("f.arguments | tojson", "f.arguments")),
    ),
    "an answer that is asked for with a thought": (
        "Hermes",
        _template(CALLS["Hermes"]).replace(
            "assistant\\n' }}{% endif %}", "assistant\\n<think>\\n' }}{% endif %}"
        ),
    ),
    "a mark in capitals": (
        "lists after a mark",
        _template("{{ '<TOOLCALL>[" + _JSON_CALL + "]</TOOLCALL>' }}", "Llama 3"),
    ),
    "an empty program before a call": (
        "Llama 3",
        _template("{{ '<|python_start|><|python_end|>' }}" + CALLS["Llama 3"], "Llama 3"),
    ),
    "lists as Python prints them": (
        "Qwen3-Coder",
        _template(
            CALLS["Qwen3-Coder"].replace("tool_call>", "seed:tool_call>").replace("v | tojson", "v")
        ),
    ),
    "another end when nothing is asked": (
        "Hermes",
        _template(CALLS["Hermes"]).replace(
            _ASKS, "{% if not add_generation_prompt %}<eos>{% endif %}" + _ASKS
        ),
    ),
}
"""What templates of real models do besides, by the format in which they are read."""


@pytest.mark.parametrize("quirk", QUIRKS)
def test_what_real_templates_do_is_understood(quirk: str) -> None:
    name, text = QUIRKS[quirk]
    template = Template(*_tokenizer(text))
    assert not template.no_tools
    assert template.call_format.name == name


KIMI = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}{{ '<|im_' + m.role + '|>' }}"
    "{% if m.role == 'tool' %}{{ '## Return of ' + m.tool_call_id + '\n' }}{% endif %}"
    "{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ '<|tool_call_begin|>' + c.id + '<|tool_call_argument_begin|>'"
    " + c.function.arguments | tojson + '<|tool_call_end|>' }}{% endfor %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_assistant|>{% endif %}"
)


async def test_ids_that_carry_the_name_are_those_that_the_model_wrote() -> None:
    """Kimi K2's template repeats the id before the result."""
    written = (
        '<|tool_call_begin|>functions.add:3<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|>'
    )
    session, engine, _ = trap_session([written, "2"], KIMI)
    chat: list[dict[str, Any]] = [{"role": "user", "content": "x"}]
    first = await session.call(parse_messages(chat), [ADD], "first")
    (call,) = first.message.tool_calls
    assert call["id"] == "functions.add:3"
    assert call["function"] == {"name": "add", "arguments": {"a": 1}}

    result = {"role": "tool", "tool_call_id": call["id"], "content": "2"}
    chat += [dict(first.message.fields), result]
    await session.call(parse_messages(chat), [ADD], "second")
    (sequence,) = session.sequences()
    added = "<|im_tool|>## Return of functions.add:3\n2<|im_end|>"
    assert added in sequence.text
    sampled = [len(written) + 1, len("2") + 1]
    assert int(sequence.mask.sum()) == sum(sampled)
    assert engine.asked[1][: len(engine.asked[0])] == engine.asked[0]


@pytest.mark.parametrize(
    ("name", "text", "identifier"),
    [
        ("Mistral", '[TOOL_CALLS]add[CALL_ID]aB3dE6gH9[ARGS]{"a": 1}', "aB3dE6gH9"),
        ("Mistral", '[TOOL_CALLS]add[CALL_ID]short[ARGS]{"a": 1}', "call00700"),
        ("Mistral", '[TOOL_CALLS]add[ARGS]{"a": 1}', "call00700"),
        (
            "Mistral lists",
            '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}, "id": "aB3dE6gH9"}]',
            "aB3dE6gH9",
        ),
        ("Hermes", '<tool_call>{"name": "add", "arguments": {}, "id": 5}</tool_call>', "call00700"),
    ],
)
def test_ids_are_the_models_where_it_writes_usable_ones(
    name: str, text: str, identifier: str
) -> None:
    call_format = next(each for each in FORMATS if each.name == name)
    message, problem = parse_answer(text, [ADD], call_format, answer=7)
    assert not problem
    assert [call["id"] for call in message.tool_calls] == [identifier]


def test_every_format_has_a_template_here() -> None:
    assert [each.name for each in FORMATS] == list(CALLS)


ANSWERS = {
    "Hermes": 'Yes.\n<tool_call>{"name": "add", "arguments": {"a": 1, "b": "2"}}</tool_call>',
    "Qwen3-Coder": "Yes.<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n"
    "<parameter=b>\n2\n</parameter>\n</function>\n</tool_call>",
    "GLM": "Yes.<tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value>"
    "<arg_key>b</arg_key><arg_value>2</arg_value></tool_call>",
    "Python calls": "Yes.<|tool_call_start|>[add(a=1, b='2')]<|tool_call_end|>",
    "Python calls in tags": "Yes.<function_calls>\nadd(a=1, b='2')\n</function_calls>",
    "Gemma 4": 'Yes.<|tool_call>call:add{a:1,b:<|"|>2<|"|>}<tool_call|>',
    "Harmony": "<|channel|>commentary<|message|>Yes.<|end|><|start|>assistant"
    '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1, "b": "2"}',
    "DeepSeek": "Yes.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n"
    '```json\n{"a": 1, "b": "2"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "Kimi": "Yes.<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0"
    '<|tool_call_argument_begin|>{"a": 1, "b": "2"}<|tool_call_end|><|tool_calls_section_end|>',
    "invoke": 'Yes.\n<minimax:tool_call>\n<invoke name="add">\n<parameter name="a">1</parameter>\n'
    '<parameter name="b">2</parameter>\n</invoke>\n</minimax:tool_call>',
    "Mistral": 'Yes.[TOOL_CALLS]add{"a": 1, "b": "2"}',
    "Mistral lists": 'Yes.[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1, "b": "2"}}]',
    "lists after a mark": 'Yes.<tool_calls>[{"name": "add", "arguments": {"a": 1, "b": "2"}}]'
    "</tool_calls>",
    "Command": 'Yes.<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "add", "parameters": '
    '{"a": 1, "b": "2"}}]<|END_ACTION|>',
    "Llama 3": '<|python_tag|>{"name": "add", "parameters": {"a": 1, "b": "2"}}',
}
"""What models of each format write besides what their templates write."""


@pytest.mark.parametrize("call_format", FORMATS, ids=lambda each: each.name)
def test_a_call_becomes_a_message_and_a_broken_one_stays_in_the_content(call_format: Any) -> None:
    text = ANSWERS[call_format.name]
    message, problem = parse_answer(text, [ADD], call_format)
    assert not problem
    call = {"name": "add", "arguments": {"a": 1, "b": "2"}}
    assert [each["function"] for each in message.tool_calls] == [call]
    assert message.content == ("" if call_format.name == "Llama 3" else "Yes.")

    message, problem = parse_answer(text.replace("1", "1{"), [ADD], call_format)
    typed_by_schema = call_format.name in ("Qwen3-Coder", "GLM", "invoke")
    assert bool(problem) is not typed_by_schema
    assert bool(message.tool_calls) is typed_by_schema

    cut = text[: text.index("1") + 1]
    message, problem = parse_answer(cut, [ADD], call_format)
    assert problem
    assert not message.tool_calls
    assert message.content.endswith("1")


@pytest.mark.parametrize(
    ("name", "text", "rest"),
    [
        ("Hermes", "<think>why</think>\n\nYes.", "Yes."),
        ("Hermes", "why</think>Yes.", "Yes."),
        ("Qwen3-Coder", "<think>why", ""),
        ("Gemma 4", "<|channel>thought\nwhy<channel|>Yes.", "Yes."),
        (
            "Harmony",
            "<|channel|>analysis<|message|>why<|end|><|start|>assistant<|channel|>final<|message|>"
            "Yes.",
            "Yes.",
        ),
        (
            "invoke",
            " to=self<|message|>why<|eom|><|start|>assistant to=user<|message|>Yes.",
            "Yes.",
        ),
        ("Mistral", "[THINK]why[/THINK]Yes.", "Yes."),
        ("Command", "<|START_THINKING|>why<|END_THINKING|><|START_TEXT|>Yes.<|END_TEXT|>", "Yes."),
    ],
)
def test_thoughts_are_set_apart(name: str, text: str, rest: str) -> None:
    call_format = next(each for each in FORMATS if each.name == name)
    message, _ = parse_answer(text, [], call_format)
    assert (message.reasoning, message.content) == ("why", rest)


@pytest.mark.parametrize(
    ("text", "types", "value"),
    [
        ("12", {"type": "string"}, "12"),
        ("12", {"type": "integer"}, 12),
        ("12", {"type": ["integer", "string"]}, 12),
        ("1.5", {"type": "number"}, 1.5),
        ("True", {"type": "boolean"}, True),
        ("true", {"type": "integer"}, "true"),
        ("null", {"anyOf": [{"type": "string"}, {"type": "null"}]}, None),
        ('{"k": [1]}', {"type": "object"}, {"k": [1]}),
        ("1, 2", {"type": "array"}, "1, 2"),
        ("12", {}, 12),
        ('"a"', {"type": "string"}, '"a"'),
        ('"a"', {}, '"a"'),
        ("a\n b", None, "a\n b"),
        ("12", {"type": 5, "anyOf": "string"}, "12"),
    ],
)
def test_bare_arguments_get_a_type_that_the_schema_allows(
    text: str, types: Any, value: Any
) -> None:
    properties = {} if types is None else {"x": types}
    tool = {"function": {"name": "f", "parameters": {"properties": properties}}}
    answer = f"<tool_call>\n<function=f>\n<parameter=x>\n{text}\n</parameter>\n</function>"
    message, problem = parse_answer(answer, [tool], FORMATS[1])
    assert not problem
    assert message.tool_calls[0]["function"]["arguments"] == {"x": value}


HOSTILE = (
    "<tool_call><function=a>",
    "<parameter=a>",
    "<tool_call>a",
    "<arg_key>a</arg_key><arg_value>",
    "<|tool_call_start|>[",
    "<function_calls>" + "a.",
    "<|tool_call>call:a{",
    "<|channel|>commentary to=functions.a ",
    "<｜tool▁call▁begin｜>a ",
    "<|tool_call_begin|>a:1 ",
    '<m:invoke name="a"><m:parameter name="b">',
    "[TOOL_CALLS]a ",
    "<|START_ACTION|>[",
    '{"name": ',
    " ",
    "(",
    "{",
    "}",
)


@pytest.mark.parametrize("call_format", FORMATS, ids=lambda each: each.name)
def test_an_answer_that_repeats_parts_of_a_call_is_read_in_little_time(call_format: Any) -> None:
    for start in HOSTILE:
        for part in HOSTILE:
            text = start + part * (8000 // len(part))
            message, _ = parse_answer(text, [ADD], call_format)
            assert not message.tool_calls


class _Adder:
    """An environment with a tool."""

    def reset(self) -> None:
        """Begins."""

    def add(self, a: int) -> str:
        """Adds one.

        Args:
            a: a number.
        """
        return str(a + 1)


UNKNOWN = _template("{{ '@' + f.name + '!' }}")


def test_calls_that_nothing_reads_are_refused_at_the_start_with_what_is_written() -> None:
    template = Template(*_tokenizer(UNKNOWN))
    with pytest.raises(ConfigError, match="cannot be read back: '@probe_tool!") as caught:
        EpisodeService(
            EnvironmentSection(name="python:tests.environments.Adder"),
            template,
            router=RolloutClient("rollout-server", "http://127.0.0.1:1"),
            stop_token_ids=[],
            metrics=Metrics("environment-server"),
            environment=Environment.of(_Adder, "python:adder"),
        )
    assert caught.value.field == "model.name"
    assert "docs/reference/models.md" in str(caught.value.remedy)


async def test_a_program_that_offers_tools_gets_the_reason() -> None:
    session, engine, _ = trap_session([], UNKNOWN)
    with raises(InvalidInput, field="tools"):
        await session.call(parse_messages([{"role": "user", "content": "x"}]), [ADD], "key")
    assert engine.asked == []


async def test_calls_in_another_format_continue_the_recorded_tokens() -> None:
    name = "Qwen3-Coder"
    call = ANSWERS[name]
    session, engine, _ = trap_session([call, "3"], _template(CALLS[name], name))
    chat: list[dict[str, Any]] = [{"role": "user", "content": "x"}]
    first = await session.call(parse_messages(chat), [ADD], "first")
    (tool_call,) = first.message.tool_calls
    result = {"role": "tool", "tool_call_id": tool_call["id"], "content": "3"}
    chat += [dict(first.message.fields), result]
    await session.call(parse_messages(chat), [ADD], "second")

    (sequence,) = session.sequences()
    sampled = [len(call) + 1, len("3") + 1]
    assert int(sequence.mask.sum()) == sum(sampled)
    assert engine.asked[1][: len(engine.asked[0])] == engine.asked[0]
    assert call in sequence.text


def _trl_templates() -> list[Path]:
    spec = importlib.util.find_spec("trl")
    if spec is None or spec.origin is None:
        return []
    return sorted(Path(spec.origin).with_name("chat_templates").glob("*.jinja"))


def _line(path: Path) -> str:
    """Returns the line of the page for a template."""
    try:
        template = Template(*_tokenizer(path.read_text()))
    except ConfigError as error:
        reason = str(error).partition("for episodes: ")[2].partition(" · ")[0]
        return f"| `{path.stem}` | refused: {reason} |"
    if not template.no_tools:
        return f"| `{path.stem}` | {template.call_format.name} |"
    return f"| `{path.stem}` | no tools: {template.no_tools} |"


def test_the_page_says_which_templates_work_with_tools() -> None:
    """The templates that TRL changes for its own training (`*_training`) are left out; of those in
    the directory `CHAT_TEMPLATES`, the ones that the page does not list."""
    page = PAGE.read_text()
    more = sorted(Path(os.environ.get("CHAT_TEMPLATES", "/nowhere")).glob("*.jinja"))
    listed = [path for path in more if f"| `{path.stem}` |" in page]
    templates = [path for path in _trl_templates() if not path.stem.endswith("_training")] + listed
    if not templates:
        pytest.skip("TRL is not installed, and CHAT_TEMPLATES names no directory of templates")
    lines = [_line(path) for path in templates]
    missing = [line for line in lines if line not in page]
    assert not missing, "\n".join(lines)


def test_variables_of_the_settings_reach_the_template() -> None:
    """As `sampling.chat_template_kwargs`, in the first prompt and in what follows an answer."""
    own = "{{ mode | default('think') }}"
    text = own + _template(CALLS["Hermes"], "Hermes")
    tokenizer, stops = _tokenizer(text)
    messages = parse_messages([{"role": "user", "content": "hi"}], "messages")
    plain = Template(tokenizer, stops)
    quick = Template(tokenizer, stops, {"mode": "quick"})
    assert plain.text(plain.prompt(messages, [])).startswith("think")
    assert quick.text(quick.prompt(messages, [])).startswith("quick")


def test_tokens_are_those_of_transformers_whatever_others_set() -> None:
    """The template uses its own copy of the tokenizer inside transformers'."""
    texts = ["<s> don't\n\n  é ▁ 好 😀 1 , 2 .", "<|im_start|>user\nx<|im_end|>\n", " ", ""]
    for name, family in FAMILIES.items():
        tokenizer = family.tokenizer()
        expected = [tokenizer(text, add_special_tokens=False).input_ids for text in texts]
        written = [tokenizer.decode(ids, skip_special_tokens=False) for ids in expected]
        template = Template(tokenizer, [tokenizer.eos_token_id])
        assert template._backend is not None, name
        tokenizer("a longer text", truncation=True, max_length=2)
        assert [template._encode(text) for text in texts] == expected, name
        assert [template.text(ids) for ids in expected] == written, name


def test_the_tokens_of_a_prompt_are_kept_and_not_shared() -> None:
    template = Template(*_tokenizer(_template(CALLS["Hermes"], "Hermes")))
    messages = parse_messages([{"role": "user", "content": "hi"}], "messages")
    first = template.prompt(messages, [])
    kept = list(first)
    first.clear()
    assert template.prompt(messages, []) == kept
    assert template.prompt(messages, [ADD]) != kept
