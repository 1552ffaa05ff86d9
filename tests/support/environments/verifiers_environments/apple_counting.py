"""A verifiers environment in the layout of `vf-init`: a taskset, and a harness that asks several times."""

# mypy: ignore-errors

import sys
import zlib

import verifiers.v1 as vf

PROGRAM = """
import json, sys, time, urllib.request
url, key, prompt, times = sys.argv[1:]
messages = [{"role": "user", "content": prompt}]
for _ in range(int(times)):
    body = json.dumps({"model": "policy", "messages": messages}).encode()
    headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
    with urllib.request.urlopen(urllib.request.Request(url + "/chat/completions", body, headers)) as answer:
        message = json.load(answer)["choices"][0]["message"]
    if message["content"] == "Wait.":
        time.sleep(60)
    messages += [message, {"role": "user", "content": "Are you sure?"}]
"""


class AppleData(vf.TaskData):
    answer: str


class AppleTask(vf.Task[AppleData]):
    @vf.reward(weight=1.0)
    async def said(self, trace: vf.Trace) -> float:
        return zlib.crc32(trace.last_reply.encode()) % 8 / 8

    @vf.reward(weight=2.0)
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)


class AppleConfig(vf.TasksetConfig):
    fruit: str = "apples"


class AppleTaskset(vf.Taskset[AppleTask, AppleConfig]):
    def load(self) -> list[AppleTask]:
        return [
            AppleTask(
                AppleData(prompt=f"How many {self.config.fruit} are {i} and 1?", answer=str(i + 1)),
                self.config.task,
            )
            for i in range(8)
        ]


class AppleHarnessConfig(vf.HarnessConfig):
    times: int = 2


class AppleHarness(vf.Harness[AppleHarnessConfig]):
    NEEDS_CONTAINER = False

    async def launch(
        self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, tool_interception_url=None
    ):
        return await runtime.run_program(
            [
                sys.executable,
                "-c",
                PROGRAM,
                endpoint,
                secret,
                str(data.prompt),
                str(self.config.times),
            ],
            {},
        )


__all__ = ["AppleHarness", "AppleTaskset"]
