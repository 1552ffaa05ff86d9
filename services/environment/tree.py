"""The recorded calls of a session, as a tree of exact tokens.

A node is one call: its new messages, the tokens that the chat template added to the parent's, and
the tokens that the model sampled. A path from a root to a leaf is one sequence to train on. Nothing
is ever rendered or tokenised again, so every trained token is exactly the sampled one.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from common.wire.schemas import Completion, EpisodeSequence, Turn
from services.environment.messages import Message, tools_key


@dataclass(eq=False)
class CallNode:
    """One call and its answer."""

    parent: "CallNode | None"
    messages: list[Message]
    """The request's messages that the parent does not have, then the answer."""
    added: list[int]
    """Tokens of those messages, up to the answer."""
    sampled: Completion
    children: "list[CallNode]" = field(default_factory=list)

    @property
    def answer(self) -> Message:
        return self.messages[-1]

    @property
    def path(self) -> "list[CallNode]":
        """The nodes from the root to this one."""
        return [*(self.parent.path if self.parent else ()), self]

    @property
    def tokens(self) -> list[int]:
        """All tokens up to the end of the answer."""
        found: list[int] = []
        for node in self.path:
            found += node.added
            found += node.sampled.token_ids.tolist()
        return found


class SessionTree:
    """The calls of one session, in the order of their answers."""

    def __init__(self) -> None:
        self.nodes: list[CallNode] = []
        self._roots: dict[bytes, list[CallNode]] = {}

    def find(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]
    ) -> tuple[CallNode | None, list[Message]]:
        """Returns the deepest node whose messages begin `messages`, and the messages after it.

        If an answer in the history was not recorded there, the history was rewritten and continues
        no node.
        """
        best: tuple[int, int, CallNode | None] = (0, 0, None)
        open_nodes = [(0, 0, node) for node in reversed(self._roots.get(tools_key(tools), []))]
        while open_nodes:
            start, ids, node = open_nodes.pop()
            end = start + len(node.messages)
            part = messages[start:end]
            if end > len(messages) or not all(
                a.is_sent(b) for a, b in zip(node.messages, part, strict=True)
            ):
                continue
            ids += _same_ids(node.answer, part[-1])
            if (end, ids) > best[:2]:
                best = (end, ids, node)
            open_nodes += [(end, ids, child) for child in reversed(node.children)]
        new = list(messages[best[0] :])
        if any(message.role == "assistant" for message in new):
            return None, list(messages)
        return best[2], new

    def add(
        self,
        parent: CallNode | None,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]],
        added: list[int],
        sampled: Completion,
    ) -> CallNode:
        """Records a call; `messages` are the new messages and the answer."""
        node = CallNode(parent, list(messages), added, sampled)
        (parent.children if parent else self._roots.setdefault(tools_key(tools), [])).append(node)
        self.nodes.append(node)
        return node

    def sequences(self, rewards: Sequence[float] = ()) -> list[EpisodeSequence]:
        """Returns a sequence for every leaf. A sampled token shared by several sequences is trained
        only in the first.

        `rewards` are the rewards of the calls, in the order of their answers; empty when they have
        none.
        """
        owned: set[int] = set()
        of_nodes = {id(node): reward for node, reward in zip(self.nodes, rewards, strict=False)}
        return [_sequence(leaf.path, owned, of_nodes) for leaf in self._leaves()]

    def _leaves(self) -> Iterator[CallNode]:
        return (node for node in self.nodes if not node.children)


def _same_ids(recorded: Message, sent: Message) -> int:
    """Returns how many tool-call ids agree; this tells two equal answers to one prompt apart."""
    return sum(a["id"] == b["id"] for a, b in zip(recorded.calls, sent.calls, strict=True))


def _sequence(
    path: list[CallNode], owned: set[int], rewards: Mapping[int, float]
) -> EpisodeSequence:
    """Returns the sequence of a path. Everything before its first own token is its prompt."""
    first = next(i for i, node in enumerate(path) if id(node) not in owned)
    owned.update(id(node) for node in path)
    before = path[first].parent
    prompt = [*(before.tokens if before else ()), *path[first].added]
    tokens: list[int] = []
    logprobs: list[float] = []
    mask: list[int] = []
    spans: list[tuple[int, int, int]] = []
    turns: list[Turn] = []
    for node in path[first:]:
        added = node.added if turns else []
        tokens += added
        logprobs += [0.0] * len(added)
        mask += [0] * len(added)
        if added:  # added tokens count to the version before them
            spans[-1] = (spans[-1][0], spans[-1][1], len(tokens))
        start = len(tokens)
        tokens += node.sampled.token_ids.tolist()
        logprobs += node.sampled.logprobs.tolist()
        mask += [1] * len(node.sampled.token_ids)
        for version, begin, end in node.sampled.weight_versions:
            if spans and spans[-1][0] == version:
                spans[-1] = (version, spans[-1][1], start + end)
            else:
                spans.append((version, start + begin, start + end))
        turns.append(Turn(start, len(tokens), rewards.get(id(node))))
    return EpisodeSequence(
        prompt_ids=np.array(prompt, np.int32),
        token_ids=np.array(tokens, np.int32),
        mask=np.array(mask, np.int32),
        logprobs=np.array(logprobs, np.float32),
        weight_versions=spans,
        turns=turns,
        finish_reason=path[-1].sampled.finish_reason,
    )
