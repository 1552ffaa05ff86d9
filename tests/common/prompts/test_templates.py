"""Prompt and chat templates as settings: what they accept, how they fill a row, and what they
refuse."""

import random
import string
from pathlib import Path

import pytest

from common.errors import ConfigError
from common.prompts.templates import filled
from common.settings.config import Config, from_mapping, load
from common.settings.prompt_templates import NAMED, placeholders
from common.wire.schemas import Prompt

PROMPT = Prompt(
    id="p1",
    prompt="What is {x} in \\frac{1}{2}?",
    ground_truth="1",
    columns={"level": 5, "hint": "a", "tags": ["b"]},
)


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{question}", PROMPT.prompt),  # braces in the problem itself are kept as they are
        ("Level {level}: {question}\n{hint}", f"Level 5: {PROMPT.prompt}\na"),
        (
            '{question} in \\boxed{}, as \\frac{1}{2} or {"a": 1}',
            f'{PROMPT.prompt} in \\boxed{{}}, as \\frac{{1}}{{2}} or {{"a": 1}}',
        ),
        ("{{answer}} {question} {{question}}", f"{{answer}} {PROMPT.prompt} {{question}}"),
        ("{question}{question}", PROMPT.prompt * 2),
    ],
)
def test_prompt_template_fills(template: str, text: str) -> None:
    assert filled(template, PROMPT) == text


def test_prompt_template_equals_plain_replacement_on_random_texts() -> None:
    """The reference replaces the placeholders one by one from the left, in a text without
    escapes."""
    rng = random.Random(3)
    for _ in range(300):
        parts = [
            rng.choice(
                [
                    "{question}",
                    "{level}",
                    "".join(rng.choices(string.ascii_letters + " \n\\$}", k=5)),
                ]
            )
            for _ in range(8)
        ]
        expected = "".join(
            {"{question}": "Q{level}", "{level}": "5"}.get(part, part) for part in parts
        )
        prompt = PROMPT.model_copy(update={"prompt": "Q{level}"})
        assert filled("".join(parts), prompt) == expected


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (
            "{question} {levle}",
            ("{levle}", "p1", "did you mean level", "question, level, hint, tags"),
        ),
        ("{question} {answer}", ("{answer}", "its answer is not available in a prompt")),
        ("{question} {tags}", ("{tags}", "neither text nor a number", "data.map")),
    ],
)
def test_prompt_template_names_the_column(template: str, words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        filled(template, PROMPT)
    assert caught.value.field == "data.prompt_template"
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize("name", sorted(NAMED))
def test_named_templates_contain_only_the_question(name: str) -> None:
    assert set(placeholders(NAMED[name])) == {"question"}
    assert "17 eggs" in filled(
        from_mapping({"data.prompt_template": name}).data.prompt_template,
        PROMPT.model_copy(update={"prompt": "17 eggs"}),
    )


def test_prompt_template_from_a_file_without_its_last_line_break(tmp_path: Path) -> None:
    (tmp_path / "few.txt").write_text("Q: 1+1\nA: 2\n\nQ: {question}\nA:\n")
    config = load(["--data.prompt_template", str(tmp_path / "few.txt")], {})
    assert config.data.prompt_template == "Q: 1+1\nA: 2\n\nQ: {question}\nA:"
    again = Config.model_validate(config.model_dump())  # as the run saves it, without the file
    assert again.data.prompt_template == config.data.prompt_template


def test_templates_that_look_like_yaml_are_texts() -> None:
    env = {
        "RLHF_DATA__PROMPT_TEMPLATE": "{question}",
        "RLHF_MODEL__CHAT_TEMPLATE": "{{ messages[0]['content'] }}",
    }
    config = load([], env | {"RLHF_SAMPLING__CHAT_TEMPLATE_KWARGS": "{enable_thinking: false}"})
    assert (config.data.prompt_template, config.model.chat_template) == (
        "{question}",
        "{{ messages[0]['content'] }}",
    )
    assert config.sampling.chat_template_kwargs == {"enable_thinking": False}
    words = load(
        [
            "--sampling.chat_template_kwargs",
            "enable_thinking=False",
            "--sampling.chat_template_kwargs",
            "budget=3",
        ],
        {},
    )
    assert words.sampling.chat_template_kwargs == {"enable_thinking": False, "budget": 3}


@pytest.mark.parametrize(
    ("setting", "value", "words"),
    [
        ("data.prompt_template", "Solve it step by step.", ("no {question}", "not a file")),
        ("data.prompt_template", "r1-zero", ("did you mean r1_zero",)),
        ("data.prompt_template", "Answer {text}.", ("has no {question}",)),
        ("data.prompt_template", "/", ("not a file", "Is a directory")),
        ("model.chat_template", "{% for m in messages %}", ("not valid Jinja, line 1",)),
        ("model.chat_template", "{{ bos_token }} hello", ("never uses the variable `messages`",)),
        ("model.chat_template", "template.jinja", ("nor a file", "or own")),
        (
            "sampling.chat_template_kwargs",
            {"messages": "x"},
            ("cannot be a variable of a template",),
        ),
        (
            "sampling.chat_template_kwargs",
            {"enable-thinking": "x"},
            ("cannot be a variable of a template",),
        ),
        (
            "sampling.chat_template_kwargs",
            {"documents": [1]},
            ("documents is [1]", "give true, false, a number or text"),
        ),
    ],
)
def test_wrong_templates_are_refused_with_field_and_remedy(
    setting: str, value: object, words: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as caught:
        from_mapping({setting: value})
    assert caught.value.field == setting
    assert caught.value.remedy
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_a_chat_template_with_the_generation_tag_of_transformers_is_jinja() -> None:
    text = (
        "{% for m in messages %}{% generation %}{{ m['content'] }}{% endgeneration %}{% endfor %}"
    )
    assert from_mapping({"model.chat_template": text}).model.chat_template == text
