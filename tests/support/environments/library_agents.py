"""Agents written as in the documentation of their libraries: `python library_agents.py KIND`."""

# mypy: ignore-errors

import asyncio
import json
import os
import sys
import zlib
from pathlib import Path
from typing import Any

TASK = json.load(sys.stdin)
TEXT: str = TASK["messages"][-1]["content"]


def chat() -> str:
    import openai

    client = openai.OpenAI()
    messages: list[Any] = [{"role": "user", "content": TEXT}]
    first = client.chat.completions.create(model="gpt-5", messages=messages, temperature=0.2)
    messages += [first.choices[0].message, {"role": "user", "content": "Are you sure?"}]
    with client.chat.completions.stream(model="gpt-5", messages=messages) as stream:
        stream.until_done()
        return stream.get_final_completion().choices[0].message.content or ""


def responses() -> str:
    import openai

    client = openai.OpenAI()
    conversation: list[Any] = [{"role": "user", "content": TEXT}]
    first = client.responses.create(model="gpt-5", input=conversation, max_output_tokens=50)
    conversation += [*first.output, {"role": "user", "content": "Are you sure?"}]
    with client.responses.stream(model="gpt-5", input=conversation) as stream:
        stream.until_done()
        return stream.get_final_response().output_text


def messages() -> str:
    import anthropic

    client = anthropic.Anthropic()
    conversation: list[Any] = [{"role": "user", "content": TEXT}]
    first = client.messages.create(model="claude", max_tokens=50, messages=conversation)
    conversation += [
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": "Are you sure?"},
    ]
    with client.messages.stream(model="claude", max_tokens=50, messages=conversation) as stream:
        return stream.get_final_text()


def agents() -> str:
    """Runs the framework `openai-agents` with its own loop and its default API."""
    from agents import Agent, ModelBehaviorError, Runner, function_tool

    @function_tool
    def add(a: int, b: int) -> int:
        """Adds two numbers."""
        return a + b

    agent = Agent(
        name="Counter",
        instructions="Answer with a number.",
        tools=[add] if TASK["columns"].get("tools") else [],
    )

    async def run() -> str:
        first = await Runner.run(agent, TEXT)
        conversation = [*first.to_input_list(), {"role": "user", "content": "Are you sure?"}]
        return str((await Runner.run(agent, conversation)).final_output)

    try:
        return asyncio.run(run())
    except ModelBehaviorError:  # an answer was truncated
        return ""


def smol() -> str:
    """Runs the tool-calling agent of the framework `smolagents`."""
    from smolagents import OpenAIServerModel, ToolCallingAgent, tool

    @tool
    def add(a: int, b: int) -> int:
        """Adds two numbers.

        Args:
            a: The first number.
            b: The second number.
        """
        return a + b

    model = OpenAIServerModel(
        "policy",
        os.environ["OPENAI_BASE_URL"],
        api_key=os.environ["OPENAI_API_KEY"],
        tool_choice="auto",
    )
    return str(ToolCallingAgent([add], model, max_steps=4, verbosity_level=0).run(TEXT))


def refusal(call: Any) -> str:
    """Returns the message with which a call fails."""
    import openai

    try:
        call()
    except (openai.UnprocessableEntityError, openai.NotFoundError) as error:
        return str(error)
    raise AssertionError("the call was answered")


def fields() -> str:
    """Asks for what the gateway honours, and for what it refuses."""
    import anthropic
    import openai

    client = openai.OpenAI()
    assert client.models.retrieve("gpt-5").id == "gpt-5"
    conversation: list[Any] = [{"role": "user", "content": TEXT}]
    stopped = client.chat.completions.create(
        model="gpt-5", messages=conversation, stop="Observation:", max_completion_tokens=40
    )
    (choice,) = stopped.choices
    assert (choice.message.content, choice.finish_reason) == ("look ", "stop")
    said = refusal(
        lambda: client.chat.completions.create(model="gpt-5", messages=conversation, seed=1)
    )
    assert "leave it out: the run seeds every episode" in said
    said = refusal(lambda: client.completions.create(model="gpt-5", prompt=TEXT))
    assert "call v1/chat/completions" in said

    conversation += [
        {"role": "assistant", "content": "look "},
        {"role": "user", "content": "Found: 3"},
    ]
    claude = anthropic.Anthropic()
    asked = {"model": "claude", "messages": conversation}
    counted = claude.messages.count_tokens(**asked)
    message = claude.messages.create(max_tokens=50, stop_sequences=["!"], **asked)
    assert counted.input_tokens == message.usage.input_tokens
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "!")
    return message.content[0].text


if __name__ == "__main__":
    kinds = {
        "fields": fields,
        "chat": chat,
        "responses": responses,
        "messages": messages,
        "agents": agents,
        "smol": smol,
    }
    said = kinds[sys.argv[1]]()
    reward = {
        "said": zlib.crc32(said.encode()) % 8 / 8,
        "right": float(said == TASK["ground_truth"]),
    }
    Path(os.environ["EPISODE_REWARD_FILE"]).write_text(json.dumps(reward))
