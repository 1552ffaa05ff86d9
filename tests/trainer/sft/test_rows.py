"""Examples are tokenised as in generation, and only the answers are learned."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from common.errors import ConfigError
from common.prompts.prompter import Prompter, PromptStyle
from common.wire.codec import decode, encode
from common.wire.schemas import Prompt
from services.data.sft_examples import answered, example
from tests.support.errors import raises
from tests.support.models.families import FAMILIES
from trainer.sft.rows import Batches, Encoder, TrainingSequence

END = "<|im_end|>"
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if not loop.last and '</think>' in m['content'] %}"
    "{{ m['content'].split('</think>')[1] }}{% else %}{{ m['content'] }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Like Qwen3's template, which removes the thoughts of earlier answers."""


@pytest.fixture
def tokenizer(policy_dir: Path) -> Any:
    return AutoTokenizer.from_pretrained(policy_dir)


def encoder(
    tokenizer: Any, context: int | None = None, vocabulary: int = 1000, **style: Any
) -> Encoder:
    return Encoder(
        Prompter(tokenizer, PromptStyle(**style), [tokenizer.eos_token_id]), vocabulary, context
    )


def chat(*contents: str, system: str = "") -> Prompt:
    """Returns a chat of user and assistant in turn."""
    roles = [
        {"role": ("user", "assistant")[i % 2], "content": content}
        for i, content in enumerate(contents)
    ]
    return example("row", [{"role": "system", "content": system}, *roles] if system else roles)


def texts(tokenizer: Any, row: TrainingSequence) -> tuple[str, list[str]]:
    """Returns the text of the whole row and of each learned passage."""
    passages: list[list[int]] = [[]]
    for token, learned in zip(row.completion_ids.tolist(), row.learned.tolist(), strict=True):
        if learned:
            passages[-1].append(token)
        elif passages[-1]:
            passages.append([])
    whole = tokenizer.decode([*row.prompt_ids.tolist(), *row.completion_ids.tolist()])
    return whole, [tokenizer.decode(passage) for passage in passages if passage]


def test_an_answer_is_learned_with_the_token_that_ends_it(tokenizer: Any) -> None:
    (row,) = encoder(tokenizer, system_prompt="Be brief.").rows(
        answered("row", "How many?", "1+2=3")
    )
    prompter = encoder(tokenizer, system_prompt="Be brief.").prompter
    assert row.prompt_ids.tolist() == prompter.token_ids(
        Prompt(id="", prompt="How many?", ground_truth="")
    )
    assert texts(tokenizer, row)[1] == [f"1+2=3{END}"]
    assert row.completion_ids[-1] == tokenizer.eos_token_id


def test_every_answer_of_a_chat_is_learned_in_one_row(tokenizer: Any) -> None:
    (row,) = encoder(tokenizer).rows(
        chat("How many?", "#### 1", "And now?", "#### 2", "now", "#### 3", system="Count.")
    )
    whole, learned = texts(tokenizer, row)
    assert learned == [f"#### 1{END}", f"#### 2{END}", f"#### 3{END}"]
    assert whole == tokenizer.apply_chat_template(
        chat("How many?", "#### 1", "And now?", "#### 2", "now", "#### 3", system="Count.").chat,
        tokenize=False,
    ).removesuffix("\n")


def test_a_template_that_rewrites_earlier_answers_gives_each_a_row_of_its_own(
    tokenizer: Any,
) -> None:
    tokenizer.chat_template = THINKING
    rows = encoder(tokenizer).rows(chat("a", "<think>x</think>1", "b", "<think>y</think>2"))
    assert [texts(tokenizer, row)[1] for row in rows] == [
        [f"<think>x</think>1{END}"],
        [f"<think>y</think>2{END}"],
    ]
    assert "x" not in tokenizer.decode(rows[1].prompt_ids)


def test_a_base_model_gets_the_text_as_it_is(tokenizer: Any) -> None:
    tokenizer.chat_template = None
    (row,) = encoder(tokenizer).rows(answered("row", "Question: 1\nAnswer:", " #### 1"))
    assert texts(tokenizer, row) == (f"Question: 1\nAnswer: #### 1{END}", [f" #### 1{END}"])
    messages = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]
    for refused in (chat("a", "b", "c", "d"), example("row", messages, is_chat=True)):
        with raises(ConfigError, field="model.chat_template"):
            encoder(tokenizer).rows(refused)


def test_a_template_and_a_prefilled_start_are_those_of_generation(tokenizer: Any) -> None:
    own = encoder(tokenizer, template="Q: {question}\nA:", chat=False, prefill=" Let")
    (row,) = own.rows(answered("row", "1?", " Let me see. #### 1"))
    assert row.prompt_ids.tolist() == own.prompter.token_ids(
        Prompt(id="", prompt="1?", ground_truth="")
    )
    assert texts(tokenizer, row) == (
        f"Q: 1?\nA: Let me see. #### 1{END}",
        [f" me see. #### 1{END}"],
    )


PHI_3 = (
    "{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}"
)
"""Like Phi-3's template, which ends a chat with one more token that ends generation."""


@pytest.mark.parametrize("content", ["#### 1", "#### 1<|end|>", "1<|end|> 2"])
def test_nothing_after_the_end_of_an_answer_is_learned(tmp_path: Path, content: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(FAMILIES["Phi-3"].write(tmp_path))
    tokenizer.chat_template = PHI_3
    tokenizer.eos_token = "<|endoftext|>"  # noqa: S105
    stops = tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|end|>"])
    own = Encoder(Prompter(tokenizer, PromptStyle(), stops), 1000, None)
    (row,) = own.rows(chat("1?", content))
    (learned,) = texts(tokenizer, row)[1]  # with a space after every special token
    assert learned.replace(" ", "") == content.removesuffix("<|end|>").replace(" ", "") + "<|end|>"
    (row,) = own.rows(chat("1?", content, "2?", "#### 2"))
    assert texts(tokenizer, row)[1][-1] == "#### 2<|end|>"


def test_a_chat_that_the_template_refuses_is_named(tokenizer: Any) -> None:
    tokenizer.chat_template = "{{ raise_exception('no system, please') }}"
    with raises(ConfigError, field="model.chat_template") as caught:
        encoder(tokenizer).rows(chat("a", "1", system="S"))
    assert "no system, please" in caught.value.message


def test_a_token_never_joins_prompt_and_answer(tokenizer: Any) -> None:
    """Generation starts after the prompt's tokens, so the answer's tokens must not depend on the
    prompt's text."""
    tokenizer.chat_template = None
    joined = tokenizer("How many").input_ids
    split = next(
        (tokenizer.decode(joined[:i]), tokenizer.decode(joined[i:]), token)
        for i, token in enumerate(joined)
        if len(tokenizer.decode([token])) > 1
    )
    before, after, token = split
    text = tokenizer.decode([token])
    (row,) = encoder(tokenizer).rows(answered("row", before + text[0], after[1:]))
    assert row.prompt_ids.tolist() == tokenizer(before + text[0]).input_ids
    assert texts(tokenizer, row)[1] == [f"{after[1:]}{END}"]


@pytest.mark.parametrize(
    ("settings", "field"),
    [({"context": 8}, "data.source"), ({"vocabulary": 9}, "model.name")],
)
def test_rows_that_the_model_cannot_read_are_refused(
    tokenizer: Any, settings: dict[str, Any], field: str
) -> None:
    with raises(ConfigError, field=field):
        encoder(tokenizer, **settings).rows(answered("row", "How many apples?", "#### 12"))


def test_rows_reach_other_ranks(tokenizer: Any) -> None:
    rows = encoder(tokenizer).rows(chat("a", "1", "b", "2")) + encoder(tokenizer).rows(
        answered("row", "c", "3")
    )
    for row, sent in zip(rows, decode(encode(rows), list[TrainingSequence]), strict=True):
        for name in ("prompt_ids", "completion_ids", "learned"):
            assert np.array_equal(getattr(row, name), getattr(sent, name))


def test_every_example_comes_once_an_epoch_in_another_order(tokenizer: Any) -> None:
    examples = [encoder(tokenizer).rows(answered(str(n), str(n), "#")) for n in range(7)]

    def order(seed: int) -> list[int]:
        batches = Batches(examples, 3, seed)
        return [
            int(row.prompt_ids.sum())
            for step in range(5)
            for row in batches.rows(batches.indices(step, 14))
        ]

    found = order(1)
    assert len(found) == 14  # the last batch has the two that remain
    assert (
        sorted(found[:7])
        == sorted(found[7:])
        == sorted(int(rows[0].prompt_ids.sum()) for rows in examples)
    )
    assert found[:7] != found[7:]
    assert found == order(1) != order(2)


TOOLS = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
    "{% for c in m.get('tool_calls', []) %}<tool_call>{{ c['function'] | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Like Qwen2.5's template."""
SCHEMA = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALLING: list[dict[str, Any]] = [
    {"role": "user", "content": "1+2?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}],
    },
    {"role": "tool", "content": "3"},
    {"role": "assistant", "content": "#### 3"},
]


def test_calls_of_tools_are_learned_and_their_results_are_not(tokenizer: Any) -> None:
    tokenizer.chat_template = TOOLS
    (row,) = encoder(tokenizer).rows(example("row", CALLING, tools=[SCHEMA]))
    whole, learned = texts(tokenizer, row)
    call = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    assert learned == [f"{call}{END}", f"#### 3{END}"]
    assert whole == tokenizer.apply_chat_template(
        CALLING, tools=[SCHEMA], tokenize=False
    ).removesuffix("\n")
    assert "<|im_start|>tool\n3" in whole


def test_a_template_that_drops_calls_or_tools_is_refused(tokenizer: Any) -> None:
    tokenizer.chat_template = TOOLS.replace("m.get('tool_calls', [])", "[]")
    with raises(ConfigError, field="model.chat_template"):
        encoder(tokenizer).rows(example("row", CALLING, tools=[SCHEMA]))
    tokenizer.chat_template = TOOLS.replace("tools | tojson", "1").replace("if tools", "if false")
    with pytest.raises(ConfigError) as caught:
        encoder(tokenizer).rows(example("row", CALLING, tools=[SCHEMA]))
    assert caught.value.field == "sampling.chat_template_kwargs"
    tokenizer.chat_template = None
    with raises(ConfigError, field="model.chat_template"):
        encoder(tokenizer).rows(example("row", CALLING[:2]))
