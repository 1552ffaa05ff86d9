"""A verifiers environment whose harness catches everything.

Its client waits longer than an episode may take: where it gives up before verifiers' own server between
harness and session, the session has given its answer.
"""

# mypy: ignore-errors

import os
import sys

import verifiers.v1 as vf

from tests.chaos.episodes.swallows import NUMBERS, UNIT

PROGRAM = """
import sys
from pathlib import Path
from tests.chaos.episodes.swallows import converse, note
url, key, prompt, log, number = sys.argv[1:]
calls = []
try:
    session = {"openai_base_url": url, "api_key": key}
    task = {"session": session, "messages": [{"role": "user", "content": prompt}]}
    calls = converse(task, int(number), patience_s=60)
finally:
    note(Path(log), {"number": int(number), "calls": calls})
"""


def number_of(trace: vf.Trace) -> int:
    return int(trace.id[:12], 16) % NUMBERS


class TalkTask(vf.Task[vf.TaskData]):
    @vf.reward(weight=1.0)
    async def number(self, trace: vf.Trace) -> float:
        return number_of(trace) * UNIT


class TalkTaskset(vf.Taskset[TalkTask, vf.TasksetConfig]):
    INFINITE = True

    def load(self):
        number = 0
        while True:
            yield TalkTask(vf.TaskData(prompt=f"Talk about {number}."), self.config.task)
            number += 1


class TalkHarnessConfig(vf.HarnessConfig):
    """No settings."""


class TalkHarness(vf.Harness[TalkHarnessConfig]):
    NEEDS_CONTAINER = False

    async def launch(
        self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, tool_interception_url=None
    ):
        words = [endpoint, secret, str(data.prompt), os.environ["CHAOS_LOG"], str(number_of(trace))]
        return await runtime.run_program([sys.executable, "-c", PROGRAM, *words], {})


__all__ = ["TalkHarness", "TalkTaskset"]
