"""Prompts as the model gets them: templates, chats, prefilled answers and special tokens."""

from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from common.errors import ConfigError
from common.prompts.prompter import Prompter, PromptStyle, prompt_text
from common.settings.config import from_mapping
from common.wire.schemas import Prompt
from tests.support.errors import raises

PROMPT = Prompt(id="p1", prompt="2 + 3?", ground_truth="5", columns={"level": 5})
CHAT = Prompt(
    id="p2",
    prompt="3 + 4?",
    ground_truth="7",
    chat=[{"role": "system", "content": "S"}, {"role": "user", "content": "3 + 4?"}],
)
THINKING = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</s>{% endfor %}{% if add_generation_prompt %}<assistant>"
    "{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}{% endif %}"
)
"""Like Qwen3's template: without thinking, the answer begins after an empty thought."""
SYSTEM, KWARGS = "sampling__system_prompt", "sampling__chat_template_kwargs"


def tokenizer(chat_template: str | None = None, end: bool = False) -> Any:
    """A byte tokenizer that puts <s> before a text, like Llama's, and with `end` also puts </s>
    after it."""
    made = Tokenizer(
        models.BPE(
            vocab={
                c: i
                for i, c in enumerate(["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())])
            },
            merges=[],
        )
    )
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<s>", "</s>"])
    pattern = "<s> $A </s>" if end else "<s> $A"
    made.post_processor = processors.TemplateProcessing(
        single=pattern, special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    return PreTrainedTokenizerFast(tokenizer_object=made, chat_template=chat_template, **special)


def style(**settings: Any) -> PromptStyle:
    return PromptStyle.of(
        from_mapping({name.replace("__", "."): value for name, value in settings.items()})
    )


@pytest.mark.parametrize(
    ("template", "settings", "text"),
    [
        (None, {}, "2 + 3?"),
        (None, {"data__prompt_template": "L{level} {question}\nA:"}, "L5 2 + 3?\nA:"),
        (
            None,
            {"data__prompt_template": "plain", "sampling__prefill": " <think>"},
            "Question: 2 + 3?\nAnswer: <think>",
        ),
        (THINKING, {}, "<user>2 + 3?</s><assistant>"),
        (THINKING, {"sampling__system_prompt": "S"}, "<system>S</s><user>2 + 3?</s><assistant>"),
        (
            THINKING,
            {"sampling__chat_template_kwargs": {"enable_thinking": "false"}},
            "<user>2 + 3?</s><assistant><think></think>",
        ),
        (
            THINKING,
            {"sampling__chat_template_kwargs": {"enable_thinking": True}},
            "<user>2 + 3?</s><assistant>",
        ),
        (THINKING, {"sampling__prefill": "<think>\n"}, "<user>2 + 3?</s><assistant><think>\n"),
        (
            THINKING,
            {"data__prompt_template": "{question}!"},
            "2 + 3?!",
        ),  # instead of the chat template
        (
            THINKING,
            {"data__prompt_template": "{question}!", "model__chat_template": "own"},
            "<user>2 + 3?!</s><assistant>",
        ),
    ],
)
def test_prompt_text(template: str | None, settings: dict[str, Any], text: str) -> None:
    assert prompt_text(PROMPT, style(**settings), tokenizer(template)) == text


_OPENS = THINKING.replace("<assistant>", "<assistant>MARK")


@pytest.mark.parametrize(
    ("template", "settings", "start"),
    [
        (None, {}, ""),
        (None, {"sampling__prefill": " So"}, " So"),
        (None, {"data__prompt_template": "{question}\nA: <think>"}, "<think>"),
        (THINKING, {}, ""),
        (THINKING, {"sampling__prefill": "<think>\n"}, "<think>\n"),
        (THINKING, {"sampling__chat_template_kwargs": {"enable_thinking": "false"}}, ""),
        (_OPENS.replace("MARK", "<think>"), {}, "<think>"),
        (_OPENS.replace("MARK", "<think>\n"), {}, "<think>\n"),
        (_OPENS.replace("MARK", "<think>\n"), {"sampling__prefill": "So"}, "<think>\nSo"),
        (_OPENS.replace("MARK", "[THINK]"), {}, "[THINK]"),
        (_OPENS.replace("MARK", "<thinking>"), {}, "<thinking>"),
        (_OPENS.replace("MARK", "<think></think>"), {}, ""),
        (_OPENS.replace("MARK", "Think: "), {}, ""),
    ],
)
def test_an_answer_begins_with_what_the_prompt_holds_of_it(
    template: str | None, settings: dict[str, Any], start: str
) -> None:
    (tokenised,) = Prompter(tokenizer(template), style(**settings), []).tokenised([PROMPT])
    assert tokenised.answer_start == start


def test_a_template_fills_the_last_message_of_a_chat() -> None:
    settings = {
        "data__prompt_template": "{question}!",
        "model__chat_template": "own",
        "sampling__system_prompt": "unread",
    }
    assert (
        prompt_text(CHAT, style(**settings), tokenizer(THINKING))
        == "<system>S</s><user>3 + 4?!</s><assistant>"
    )


@pytest.mark.parametrize("end", [False, True])
def test_a_plain_prompt_has_one_start_token_and_no_end_token(end: bool) -> None:
    """A tokenizer may append an end token to every text, and after it a model generates nothing
    useful."""
    made = tokenizer(end=end)
    plain, marked = (
        Prompter(made, style(**settings), []).token_ids(PROMPT)
        for settings in ({}, {"data__prompt_template": "<s>{question}"})
    )
    assert plain == marked == [0, *made("2 + 3?", add_special_tokens=False).input_ids]


def test_a_chat_has_only_the_special_tokens_of_its_template() -> None:
    made = tokenizer("<s>" + THINKING)
    assert Prompter(made, style(), []).token_ids(PROMPT).count(0) == 1


@pytest.mark.parametrize(
    ("template", "settings", "field", "words"),
    [
        (
            None,
            {"sampling__system_prompt": "S"},
            "sampling.system_prompt",
            ("needs a chat template", "data.prompt_template"),
        ),
        (
            THINKING,
            {"sampling__system_prompt": "S", "data__prompt_template": "plain"},
            "sampling.system_prompt",
            ("model.chat_template",),
        ),
        (
            None,
            {"sampling__chat_template_kwargs": {"a": 1}},
            "sampling.chat_template_kwargs",
            ("needs a chat template",),
        ),
        (
            THINKING,
            {"sampling__chat_template_kwargs": {"enable_thinkng": False}},
            "sampling.chat_template_kwargs",
            ("did you mean enable_thinking",),
        ),
        (
            None,
            {"model__chat_template": "own"},
            "model__chat_template",
            ("needs a chat template",),
        ),
    ],
)
def test_a_style_that_the_tokenizer_cannot_follow_is_refused(
    template: str | None, settings: dict[str, Any], field: str, words: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as caught:
        Prompter(tokenizer(template), style(**settings), [])
    assert caught.value.field == field.replace("__", ".")
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_a_template_that_refuses_a_role_is_named() -> None:
    refuses = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}{{ messages[0]['content'] }}"
    with raises(ConfigError, field="model.chat_template") as caught:
        prompt_text(PROMPT, style(sampling__system_prompt="S"), tokenizer(refuses))
    assert "no system role" in caught.value.message


@pytest.mark.parametrize("length", [1, 2])
def test_a_chat_needs_a_chat_template_whatever_its_length(length: int) -> None:
    chat = CHAT.model_copy(update={"chat": CHAT.chat[-length:]})
    with raises(ConfigError, field="model.chat_template"):
        prompt_text(chat, style(), tokenizer())

    with_text = style(data__prompt_template="{question}!")
    if length == 1:
        assert prompt_text(chat, with_text, tokenizer()) == "3 + 4?!"
    else:
        with raises(ConfigError, field="model.chat_template"):
            prompt_text(chat, with_text, tokenizer())


def test_a_token_that_the_model_does_not_have_is_refused() -> None:
    """As after `tokenizer.add_special_tokens` without `model.resize_token_embeddings`; the engine
    would refuse every such prompt, or fail."""
    own = tokenizer()
    vocabulary = len(own)
    own.add_special_tokens({"additional_special_tokens": ["<think>"]})
    prompter = Prompter(own, PromptStyle(), [], vocabulary=vocabulary)
    assert prompter.token_ids(PROMPT)
    thinking = Prompt(id="p3", prompt="<think>2 + 3?", ground_truth="5")
    with raises(ConfigError, field="model.name") as caught:
        prompter.token_ids(thinking)
    assert f"p3 has the token {vocabulary} ('<think>')" in caught.value.message
