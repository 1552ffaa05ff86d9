"""The search agent of the examples: its documents, its tool, its questions, its reward, and that it
learns to search."""

import asyncio
import json
import random
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from transformers import AutoTokenizer
from transformers.utils import get_json_schema

from common.wire.schemas import Episode
from examples.search_agent import base, train
from examples.search_agent.corpus import FOUNDED, Fact, corpus_facts, other_facts
from examples.search_agent.search import CORPUS, Library, SearchAgent, library, right
from services.environment.messages import parse_messages
from services.environment.template import Template
from services.reward.functions.plain import PlainFunction
from tests.support.environments.agent_environments import python_of
from tests.support.environments.environments import request_for, served
from tests.support.paths import ROOT
from trainer.observe.run_dir import read_lines

pytestmark = pytest.mark.integration
QUIET = Console(quiet=True)
KINDS = {
    r"(\w+) lies on the river (\w+)\.": ("On which river does {} lie?", "river {}"),
    r"(\w+) was founded in (\d{4})\.": ("When was {} founded?", "founded {}"),
    r"(\w+) was born in (\w+)\.": ("Where was {} born?", "born {}"),
    r"(\w+) died in (\d{4})\.": ("When did {} die?", "died {}"),
}
"""What the documents say, the question and the query that follow from it."""
DOCUMENTS = CORPUS.read_text(encoding="utf-8").splitlines()


def told(document: str) -> tuple[str, str, str, str]:
    """Returns the subject of a document, the question that it answers, its query, the answer."""
    for pattern, (question, query) in KINDS.items():
        match = re.fullmatch(pattern, document)
        if match:
            subject, answer = match.groups()
            return subject, question.format(subject), query.format(subject), answer
    raise AssertionError(f"no kind of document: {document}")


def words(text: str) -> set[str]:
    return set(re.findall(r"[a-z0-9]+", text.lower()))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The questions, and a model that knows nothing."""
    directory = tmp_path_factory.mktemp("search")
    base.build(directory, console=QUIET, steps=1, libraries=1)
    return directory


def questions(directory: Path, part: str) -> dict[str, str]:
    lines = (directory / "problems" / f"{part}.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    return {row["question"]: row["answer"] for row in rows}


def test_every_document_answers_one_question_and_the_file_is_what_the_generator_makes() -> None:
    assert len(set(DOCUMENTS)) == 512
    assert len({told(document)[1] for document in DOCUMENTS}) == 512, "no question has two answers"
    assert sorted(DOCUMENTS) == sorted(fact.document for fact in corpus_facts())


def test_the_questions_are_held_out_with_their_subjects(made: Path) -> None:
    truth = {question: answer for _, question, _, answer in map(told, DOCUMENTS)}
    subject_of = {question: subject for subject, question, _, _ in map(told, DOCUMENTS)}
    trained = questions(made, "train")
    tested = questions(made, "test")
    assert trained | tested == truth
    assert (len(trained), len(tested)) == (256, 256)
    assert not {subject_of[each] for each in trained} & {subject_of[each] for each in tested}

    _, others = base.problems(seed=1)
    assert {fact.question for fact in others} != set(tested), "another seed holds out others"


def test_the_warm_start_is_about_nothing_in_the_documents(made: Path) -> None:
    names = {word for document in DOCUMENTS for word in re.findall(r"[A-Z]\w+", document)}
    others = other_facts(random.Random(0))
    assert len(names) == 384
    assert not names & {fact.subject for fact in others}
    assert not names & {fact.answer for fact in others}

    # Copying needs tokens that the model has seen.
    tokenizer = AutoTokenizer.from_pretrained(made / "base")
    seen = {token for fact in others for token in tokenizer(f" {fact.subject}").input_ids}
    assert {token for name in names for token in tokenizer(f" {name}").input_ids} <= seen


def test_a_search_finds_what_has_the_words() -> None:
    for document in DOCUMENTS:
        _, _, query, _ = told(document)
        found = library().search(query).splitlines()
        assert found[0] == document
        assert len(found) == 2
        assert all(words(query) & words(each) for each in found)
    assert library().search("RIVER, castle?").count("river") == 2
    assert library().search("castle") == "nothing found"


def test_rare_words_count_more() -> None:
    one = Library(["a b", "a c", "a d"])
    assert one.search("c a").splitlines()[0] == "a c"
    assert len(one.search("a").splitlines()) == 2


@pytest.mark.parametrize(
    "query",
    ['"', "NEAR(", "river AND", "NOT", "*", "", " ", "\x00", "\ud800", "text:x", "_", "-", "'; --"],
)
def test_no_query_is_an_operator(query: str) -> None:
    wanted = words(query)
    found = library().search(query)
    assert found == "nothing found" or all(words(line) & wanted for line in found.splitlines())
    assert library().search(f"{query} castle " * 500).count("\n") <= 1


def test_episodes_search_at_the_same_time() -> None:
    queries = [told(document)[2] for document in DOCUMENTS]
    with ThreadPoolExecutor(16) as threads:
        found = list(threads.map(SearchAgent().search, queries))
    assert [each.splitlines()[0] for each in found] == DOCUMENTS


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        ("#### Torvik", 1),
        ("#### Torvi", 0),
        ("#### Torvik.", 0),
        ("#### Torvik lies", 0),
        ("Torvik", 0),
        ("#### torvik", 0),
        ("", 0),
    ],
)
def test_only_the_word_itself_is_rewarded(answer: str, reward: float) -> None:
    function = PlainFunction(right)
    assert function.gives_verdicts
    chats = [[{"role": "assistant", "content": text}] for text in (answer, "#### Lantin")]
    assert function(chats, ground_truth=["Torvik", "Lantin"]) == [reward, 1]


async def test_an_episode_is_a_search_and_an_answer() -> None:
    document = DOCUMENTS[0]
    _, question, query, answer = told(document)
    call = json.dumps({"name": "search", "arguments": {"query": query}})
    replies = iter([f"<tool_call>\n{call}\n</tool_call>", f"#### {answer}"])
    async with served(SearchAgent, lambda _: next(replies)) as server:
        request = request_for(server.service.runner.name, question)
        (episode,) = await server.client.episodes(request)
    assert (episode.status, episode.metrics["tool_errors"]) == ("ok", 0)
    assert episode.answer == f"#### {answer}"
    assert document in episode.sequences[0].text


def test_the_conversations_of_the_warm_start_have_the_tokens_of_the_gateway(made: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(made / "base")
    template = Template(tokenizer, [tokenizer.eos_token_id])
    tools = [get_json_schema(SearchAgent().search)]
    fact = Fact("Torvik", FOUNDED, "1423")
    rows = base.conversations(fact, Library([fact.document]), tokenizer)
    tokens, labels = rows.searched

    question: dict[str, Any] = {"role": "user", "content": "When was Torvik founded?"}
    prompt = template.prompt(parse_messages([question]), tools)
    end = tokens.index(tokenizer.eos_token_id, len(prompt)) + 1
    sampled = np.array(tokens[len(prompt) : end], np.int32)
    message, problem = template.parse(template.decode(sampled.tolist()), tools)
    assert not problem
    (call,) = message.tool_calls
    assert call["function"] == {"name": "search", "arguments": {"query": "founded Torvik"}}

    result = {"role": "tool", "content": fact.document, "tool_call_id": call["id"]}
    between = template.continuation(message, parse_messages([result]), tools, sampled=sampled)
    assert between is not None
    answer = tokenizer(f"#### 1423{tokenizer.eos_token}").input_ids
    assert tokens == [*prompt, *sampled, *between, *answer]
    context = [-100] * len(prompt)
    assert labels == [*context, *sampled, *[-100] * len(between), *answer]
    assert rows.guessed == (prompt + answer, context + answer)
    alone = template.prompt(parse_messages([question]), [])
    assert rows.alone == (alone + answer, [-100] * len(alone) + answer)


def served_by(kind: str) -> str:
    """Returns the environment: the class, or the MCP server, whose packages may be missing."""
    if kind == "class":
        return "python:examples.search_agent.search:SearchAgent"
    server = "-m uvicorn examples.search_agent.mcp_server:app --port PORT --log-level error"
    played = f"{ROOT}/examples/openenv/server.py '{python_of('openenv')} {server}'"
    return f"agent:{sys.executable} {played} {{port}}"


@pytest.mark.slow
async def test_the_mcp_server_offers_the_same_tool() -> None:
    queries = [told(document)[2] for document in DOCUMENTS[:32]]
    calls = [json.dumps({"name": "search", "arguments": {"query": query}}) for query in queries]

    def reply(text: str) -> str:
        number = int(text.split("number ")[-1].split(".")[0])
        has_searched = "<tool_response>" in text
        return "done" if has_searched else f"<tool_call>\n{calls[number]}\n</tool_call>"

    async with served(served_by("MCP"), reply) as server:

        async def play(number: int) -> Episode:
            request = request_for(server.service.runner.name, f"number {number}.")
            request.request_id = str(number)
            (episode,) = await server.client.episodes(request)
            return episode

        episodes = await asyncio.gather(*map(play, range(len(queries))))
    for query, episode in zip(queries, episodes, strict=True):
        assert (episode.status, episode.reward) == ("ok", None), "the run's functions grade it"
        assert episode.metrics["tool_errors"] == 0
        assert library().search(query) in episode.sequences[0].text


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["class", "MCP"])
def test_the_model_learns_to_search(kind: str, tmp_path: Path) -> None:
    train.main(tmp_path, settings=[f"--environment.name={served_by(kind)}"], console=QUIET)
    before, *_, after = read_lines(tmp_path / "run" / "evaluations.jsonl")
    error = (before["standard_error"] ** 2 + after["standard_error"] ** 2) ** 0.5
    assert before["accuracy"] > 0
    assert after["accuracy"] - before["accuracy"] > 4 * error
    steps = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert [step["dropped"] for step in steps] == [{}] * len(steps)
    assert max(step["update"]["delta_logprob_current"] for step in steps) < 1e-6
