"""The recorded turns of a session, as a tree of exact tokens.

A node is one turn: its new messages, the tokens that the chat template added to the parent's, and
the tokens that the model sampled. A path from a root to a leaf is one sequence to train on. Nothing
is ever rendered or tokenised again, so every trained token is exactly the sampled one.

    messages  user 1 │ answer 1 │ tool 1 │ answer 2
    tokens     added │ sampled  │  added │ sampled       added: mask 0, sampled: mask 1
              └────── root ────┘└────── child ────┘
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import is_

import numpy as np

from common.wire.schemas import Completion, EpisodeSequence, Int32, Turn
from services.environment.messages import Message, Tools, tools_key


@dataclass(eq=False)
class TurnNode:
    """One turn: a call and its answer."""

    parent: "TurnNode | None"
    messages: list[Message]
    """The call's messages that the parent does not have, then the answer."""
    added: Int32
    """Tokens of those messages, up to the answer."""
    sampled: Completion
    children: "list[TurnNode]" = field(default_factory=list)
    reward: float | None = None
    """The reward of this turn alone; None when the environment gives none."""

    @property
    def answer(self) -> Message:
        return self.messages[-1]

    @property
    def path(self) -> "list[TurnNode]":
        """The nodes from the root to this one."""
        path = [self]
        while (parent := path[-1].parent) is not None:
            path.append(parent)
        path.reverse()
        return path

    @property
    def tokens(self) -> Int32:
        """All tokens up to the end of the answer."""
        parts: list[Int32] = []
        for node in self.path:
            parts += [node.added, node.sampled.token_ids]
        return np.concatenate(parts)


class SessionTree:
    """The turns of one session, in the order of their answers."""

    def __init__(self) -> None:
        self.nodes: list[TurnNode] = []
        self._roots: dict[str, list[TurnNode]] = {}
        self._is_chain = True
        """Whether every turn continues the one before."""
        self._sent: Sequence[Message] = ()
        """All messages of the latest call, as its program sent them."""

    def find(
        self, messages: Sequence[Message], tools: Tools
    ) -> tuple[TurnNode | None, list[Message]]:
        """Returns the deepest node whose messages begin `messages`, and the messages after it.

        If an answer in the history was not recorded there, the history was rewritten and continues
        no node.
        """
        roots = self._roots.get(tools_key(tools), [])
        if roots and self._continues_chain(messages):
            return self._new(self.nodes[-1], messages, len(self._sent) + 1)

        best = 0
        best_marks = 0
        best_node: TurnNode | None = None
        # Depth first, earlier nodes first: the stack is filled in reverse. Beside each node, how
        # many messages and marks its parents match.
        stack = [(node, 0, 0) for node in reversed(roots)]
        while stack:
            node, start, marks = stack.pop()
            end = start + len(node.messages)
            own_marks = _same_marks(node, messages[start:end])
            if own_marks is None:  # nothing below it can match either
                continue
            marks += own_marks
            if (end, marks) > (best, best_marks):
                best = end
                best_marks = marks
                best_node = node
            stack += [(child, end, marks) for child in reversed(node.children)]

        return self._new(best_node, messages, best)

    def _continues_chain(self, messages: Sequence[Message]) -> bool:
        """Whether `messages` are those of the latest call, its answer and others. A program mostly
        goes on like that; only the answer has to be compared then.
        """
        answered = len(self._sent)
        return (
            self._is_chain
            and 0 < answered < len(messages)
            and all(map(is_, self._sent, messages))
            and self.nodes[-1].answer.is_sent(messages[answered])
        )

    @staticmethod
    def _new(
        node: TurnNode | None, messages: Sequence[Message], begin: int
    ) -> tuple[TurnNode | None, list[Message]]:
        new_messages = list(messages[begin:])
        # An answer among the new messages is one that no node has: the program rewrote it.
        if any(message.role == "assistant" for message in new_messages):
            return None, list(messages)
        return node, new_messages

    def add(
        self,
        parent: TurnNode | None,
        messages: Sequence[Message],
        tools: Tools,
        *,
        added: Sequence[int],
        sampled: Completion,
        sent: Sequence[Message] = (),
    ) -> TurnNode:
        """Records a turn; `messages` are the new messages and the answer, `sent` all messages of
        the call.
        """
        self._is_chain = self._is_chain and parent is (self.nodes[-1] if self.nodes else None)
        self._sent = sent
        node = TurnNode(parent, list(messages), np.array(added, np.int32), sampled=sampled)
        siblings = parent.children if parent else self._roots.setdefault(tools_key(tools), [])
        siblings.append(node)
        self.nodes.append(node)
        return node

    def sequences(self, turn_rewards: Sequence[float] = ()) -> list[EpisodeSequence]:
        """Returns a sequence for every leaf. A sampled token shared by several sequences is trained
        only in the first.

        `turn_rewards` has one reward for each node, in the order of the answers; empty when they
        have none.
        """
        for node, reward in zip(self.nodes, turn_rewards, strict=False):
            node.reward = reward
        owned: set[TurnNode] = set()
        return [_sequence(node.path, owned) for node in self.nodes if not node.children]


def _same_marks(node: TurnNode, sent: Sequence[Message]) -> int | None:
    """Returns how many thoughts and tool-call ids of a node's answer agree with what was sent; None
    if the messages differ. The number tells two equal answers to one prompt apart.
    """
    if len(sent) < len(node.messages):
        return None
    if not all(map(Message.is_sent, node.messages, sent)):
        return None
    answer = sent[-1]
    marks = int(node.answer.has_thoughts_of(answer))
    for call, sent_call in zip(node.answer.tool_calls, answer.tool_calls, strict=True):
        marks += call["id"] == sent_call["id"]
    return marks


def _sequence(path: list[TurnNode], owned: set[TurnNode]) -> EpisodeSequence:
    """Returns the sequence of a path. Everything before its first own token is its prompt.

    Two calls that continue the same answer, for instance, share the root. The first sequence trains
    it, the second has it in its prompt:

        path              owned before   prompt                         tokens
        root, child 1     –              root.added                     root.sampled, child 1
        root, child 2     root, child 1  root's tokens, child 2.added   child 2.sampled

    Args:
        path: nodes from a root to a leaf.
        owned: the nodes that earlier sequences train; this path's are added.
    """
    first = next(i for i, node in enumerate(path) if node not in owned)
    owned.update(path)
    prompt = path[first].added
    if first > 0:
        prompt = np.concatenate([path[first - 1].tokens, prompt])

    tokens: list[int] = []
    logprobs: list[float] = []
    mask: list[int] = []
    begins: list[tuple[int, int]] = []
    """Weight versions, each with its first token."""
    turns: list[Turn] = []
    for node in path[first:]:
        if turns:  # the first node's added tokens are the prompt's
            tokens += node.added.tolist()
            logprobs += [0.0] * len(node.added)
            mask += [0] * len(node.added)

        start = len(tokens)
        tokens += node.sampled.token_ids.tolist()
        logprobs += node.sampled.logprobs.tolist()
        mask += [1] * len(node.sampled.token_ids)
        for version, begin, _ in node.sampled.weight_versions:
            if not begins or begins[-1][0] != version:
                begins.append((version, start + begin))
        turns.append(Turn(start, len(tokens), node.reward))

    # A version lasts until the next begins: added tokens count to the version before them.
    ends = [begin for _, begin in begins[1:]] + [len(tokens)]
    spans = [(version, begin, ends[i]) for i, (version, begin) in enumerate(begins)]
    return EpisodeSequence(
        prompt_ids=prompt,
        token_ids=np.array(tokens, np.int32),
        mask=np.array(mask, np.int32),
        logprobs=np.array(logprobs, np.float32),
        weight_versions=spans,
        turns=turns,
        finish_reason=path[-1].sampled.finish_reason,
    )
