"""Predicts the bytes that the answers of a step take between the tasks, and the host memory of the
tasks that hold them.

    engines ─44─► router ─44─► rank 0 ─12─► replay-buffer
                               │ │ ▲
                               4 8 8
                               │ └─┴─► the ranks that compute the rows
                               ▼
                           reward-server

The numbers are bytes for a token of an answer. `python -m benchmarks.true_size` prints this
prediction beside what it measures.
"""

from dataclasses import dataclass

from common.settings.config import Config

ANSWER = 44.0
"""JSON of an engine: the id twice, its log-probability, four characters of text."""
ROUTED = 16 / 3
"""An expert of a token in that JSON, an int32 in base64."""
STORED = 12.0
"""Id, log-probability and text, as msgpack."""
TEXT = 4.0
SHARED = 8.0
"""Id and log-probability, to the rank that computes the row."""
RETURNED = 8.0
"""Advantage and log-probability, from the rank that computed the row."""

_HELD = 40.0
"""Bytes of host memory for a token on rank 0, which parses, holds and records all of them."""
_OWN = 27.0
"""The same for a token of another rank's rows."""
_RANK = 570e6
"""Host memory of a rank on a CPU that holds no tokens; CUDA takes gigabytes more."""
_READ = 2.5 * 2
"""The same for an expert of a token of one group: two bytes, as they come from the process that
reads answers and as arrays, and the one that is written."""
_READER = 490e6  # of a rehearsal, which loads torch there; 70e6 without
_PARSED = 2.9
"""Host memory of the process that reads answers, for a byte of the JSON of a group."""
_ROUTER = 113e6
_BUFFERED = 0.6
"""Host memory of the router for a byte of the bodies that arrive together."""
_GROWN = 1.6
"""The same where each body has hundreds of MB: its buffer grows by steps."""
_REPLAY = 142e6
_REWARD = 122e6


@dataclass(frozen=True)
class Traffic:
    """The network traffic and memory of a task for the answers of a step, in bytes."""

    received: float
    sent: float
    memory: float
    """Host memory at the peak, of one process."""


def answer_flow(
    config: Config, tokens: float, ranks: int, engines: float, experts_of_token: int = 0
) -> dict[str, Traffic]:
    """Returns the traffic of each task in a step with `tokens` tokens of single answers, shared by
    `ranks` ranks of the trainer; with routing replay, `experts_of_token` experts compute a token.
    """
    json = tokens * (ANSWER + ROUTED * experts_of_token)
    of_rank = tokens / ranks
    shared = SHARED * (tokens - of_rank)
    returned = RETURNED * (tokens - of_rank)
    stored = STORED * tokens
    reused = config.replay.reuse_ratio
    if reused:  # otherwise the experts stay on rank 0's disk
        stored += tokens * experts_of_token

    answers = config.trainer.batch_size * config.sampling.group_size
    of_group = 1 / config.trainer.batch_size
    # Answers of one length that run at once end together, and the router holds their JSON.
    running = min(1.0, engines * config.rollout.max_running_requests / answers)
    buffered = json * (_GROWN if experts_of_token else _BUFFERED)
    experts = tokens * experts_of_token * _READ
    return {
        "router": Traffic(json, json, _ROUTER + running * buffered),
        "readers of answers": Traffic(0.0, 0.0, _READER + of_group * json * _PARSED),
        "trainer rank 0": Traffic(
            received=json + returned + reused * stored,
            sent=stored + TEXT * tokens + shared,
            memory=_RANK + _HELD * tokens + of_group * experts,
        ),
        "trainer, other ranks": Traffic(shared, returned, _RANK + _OWN * of_rank),
        "replay-buffer": Traffic(stored, reused * stored, _REPLAY),
        "reward-server": Traffic(TEXT * tokens, 0.0, _REWARD),
    }
