"""Random trees of turns: which turn a call continues, and what is trained, each by its definition."""

import random
from collections.abc import Iterator

import numpy as np

from common.wire.schemas import Completion
from services.environment.messages import Message
from services.environment.tree import SessionTree, TurnNode


def message(role: str, draw: random.Random) -> Message:
    fields = {"role": role, "content": draw.choice("ab")}
    if role == "assistant" and draw.random() < 0.7:
        fields["reasoning_content"] = draw.choice("xy")
    return Message(fields)


def sampled(draw: random.Random, version: int) -> Completion:
    count = draw.randint(1, 4)
    cut = draw.randint(1, count)
    spans = [(version, 0, cut)] + ([(version + 1, cut, count)] if cut < count else [])
    return Completion(
        token_ids=np.array([draw.randrange(100) for _ in range(count)], np.int32),
        logprobs=np.array([-draw.random() for _ in range(count)], np.float32),
        text="",
        finish_reason=draw.choice(["stop", "length"]),
        weight_versions=spans,
    )


def random_tree(draw: random.Random) -> tuple[SessionTree, list[Message]]:
    """Returns a tree, and the messages of its latest call."""
    tree = SessionTree()
    sent: list[Message] = []
    is_chain = draw.random() < 0.4
    for number in range(draw.randint(1, 9)):
        newest = tree.nodes[-1] if tree.nodes else None
        parent = newest if is_chain else draw.choice([None, *tree.nodes])
        asked = [message("user", draw) for _ in range(draw.randint(1, 2))]
        added = [draw.randrange(100) for _ in range(draw.randint(1, 3))]
        answer = message("assistant", draw)
        turn = [*asked, answer]
        before = [each for node in parent.path for each in node.messages] if parent else []
        sent = [*(Message(dict(each.fields)) for each in before), *asked]
        of_turn = sampled(draw, number // 3)
        tree.add(parent, turn, (), added=added, sampled=of_turn, sent=sent)
    return tree, sent


def depth_first(tree: SessionTree, parent: TurnNode | None = None) -> Iterator[TurnNode]:
    for node in tree.nodes:
        if node.parent is parent:
            yield node
            yield from depth_first(tree, node)


def test_a_call_continues_the_deepest_turn_that_it_repeats() -> None:
    continued = 0
    for seed in range(600):
        draw = random.Random(seed)
        tree, latest = random_tree(draw)
        node = draw.choice([*tree.nodes, tree.nodes[-1]])
        known = [each for part in node.path for each in part.messages]
        sent = []
        for each in known:
            fields = dict(each.fields)
            if draw.random() < 0.3:
                fields.pop("reasoning_content", None)
            sent.append(Message(fields))
        if node is tree.nodes[-1] and draw.random() < 0.8:
            sent[: len(latest)] = latest  # the same objects, as of a session's next call
        if draw.random() < 0.2:
            sent[draw.randrange(len(sent))] = message(draw.choice(["user", "assistant"]), draw)
        sent += [message("user", draw) for _ in range(draw.randint(0, 2))]

        best = (0, 0)
        expected: TurnNode | None = None
        for node in depth_first(tree):
            recorded = [each for part in node.path for each in part.messages]
            pairs = list(zip(recorded, sent, strict=False))
            if len(pairs) < len(recorded) or not all(was.is_sent(now) for was, now in pairs):
                continue
            marks = sum(was.role == "assistant" and was.has_thoughts_of(now) for was, now in pairs)
            if (len(recorded), marks) > best:
                best = (len(recorded), marks)
                expected = node
        rest = sent[best[0] :]
        if any(each.role == "assistant" for each in rest):
            expected = None
            rest = sent
        found, new = tree.find(sent, ())
        assert found is expected
        assert new == rest
        assert tree.find(sent, [{"type": "function"}]) == (None, sent)
        continued += found is not None
    assert continued > 100


def test_every_sampled_token_is_trained_once_and_after_what_was_before_it() -> None:
    for seed in range(200):
        draw = random.Random(seed)
        tree, _ = random_tree(draw)
        rewards = [float(number) for number in range(len(tree.nodes))]
        leaves = [
            node for node in tree.nodes if not any(each.parent is node for each in tree.nodes)
        ]
        trained: list[float] = []
        for leaf, sequence in zip(leaves, tree.sequences(rewards), strict=True):
            whole: list[int] = []
            of_token: list[tuple[int, float] | None] = []
            for node in leaf.path:
                whole += node.added.tolist()
                of_token += [None] * len(node.added)
                whole += node.sampled.token_ids.tolist()
                versions = [
                    version
                    for version, begin, end in node.sampled.weight_versions
                    for _ in range(begin, end)
                ]
                of_token += list(zip(versions, node.sampled.logprobs.tolist(), strict=True))
            assert [*sequence.prompt_ids.tolist(), *sequence.token_ids.tolist()] == whole
            own = of_token[len(sequence.prompt_ids) :]
            assert sequence.mask.tolist() == [int(each is not None) for each in own]
            assert sequence.logprobs.tolist() == [each[1] if each else 0.0 for each in own]
            assert sequence.finish_reason == leaf.sampled.finish_reason
            covered: list[int] = []
            for version, begin, end in sequence.weight_versions:
                covered += range(begin, end)
                for at in range(begin, end):
                    token = own[at]
                    assert token is None or token[0] == version
            assert covered == list(range(len(own)))
            for turn in sequence.turns:
                assert all(own[turn.start : turn.end])
                assert turn.reward is not None
                trained.append(turn.reward)
        assert sorted(trained) == rewards
