"""`python -m sglang.launch_server …` without a model: answers in SGLang's format, with real sizes,
at the speed of a modelled GPU.

The rollout node's agent starts it in the place of SGLang. `TRUE_SIZE` in the environment holds the
model of the engine as JSON (`Speed`).

The model of speed: all running sequences advance together, one token in

    step_s = weights_s + kv_tokens · kv_s

which is the time to read the weights and the keys and values of every running sequence once. A
sequence runs when there is a slot and room for its prompt and its whole answer; until then it waits
in the queue, as in SGLang. `clock` seconds of the model pass in one real second.
"""

import argparse
import asyncio
import base64
import heapq
import itertools
import json
import os
import random
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from aiohttp import web

BLOCK = 256
"""Tokens of a rendered piece of an answer."""
PIECES = 64
TICK_S = 0.02
STOP = 2
"""The token that ends every answer."""


@dataclass(frozen=True)
class Speed:
    """What the modelled engine can do."""

    slots: int
    """Sequences that run at once."""
    kv_tokens: int
    """Tokens of keys and values that fit."""
    weights_s: float
    """Seconds to read the weights."""
    kv_s: float
    """Seconds to read the keys and values of a token."""
    load_s: float
    """Seconds to load a version of the weights."""
    clock: float
    """Seconds of the model in a real second."""
    vocabulary: int
    shortest: float
    """Lengths are uniform between this share of `max_new_tokens` and all of it."""
    layers: int
    top_k: int
    """Experts of a token in each of `layers`; 0 for a dense model."""


@dataclass(order=True)
class Sequence:
    """One answer that is being generated."""

    end: float
    """The engine's `progress` at which it is complete."""
    number: int
    prompt: int = field(compare=False)
    length: int = field(compare=False)
    started: float = field(compare=False, default=0.0)
    done: asyncio.Event = field(compare=False, default_factory=asyncio.Event)
    aborted: bool = field(compare=False, default=False)


class Pieces:
    """Rendered pieces of answers: JSON of 256 tokens, their log-probabilities and their text."""

    def __init__(self, speed: Speed) -> None:
        rng = np.random.default_rng(0)
        ids = rng.integers(3, speed.vocabulary, (PIECES, BLOCK))
        logprobs = -rng.exponential(0.5, (PIECES, BLOCK)).astype(np.float32).astype(float)
        self._ids = [[str(token) for token in row] for row in ids.tolist()]
        self._pairs: list[list[str]] = []
        for tokens, values in zip(self._ids, logprobs.tolist(), strict=True):
            pairs = zip(values, tokens, strict=True)
            self._pairs.append([f"[{value},{token},null]" for value, token in pairs])
        self._joined_ids = [",".join(row) for row in self._ids]
        self._joined_pairs = [",".join(row) for row in self._pairs]
        # About four characters a token, as in English text.
        self._text = "so we add " * (BLOCK * 4 // 10)
        self._experts = b""
        if speed.top_k:
            self._experts = self._routing(rng, speed)
        self._experts_of_token = speed.layers * speed.top_k * 4

    @staticmethod
    def _routing(rng: np.random.Generator, speed: Speed) -> bytes:
        """Returns the experts of 3 × 256 tokens, [tokens, layers, top_k].

        It is a multiple of three bytes, so that pieces of its base64 can be joined.
        """
        shape = (3 * BLOCK * speed.layers, 128)
        chosen = rng.random(shape).argpartition(speed.top_k, axis=1)[:, : speed.top_k]
        return chosen.astype("<i4").tobytes()

    def experts(self, tokens: int) -> str:
        """Returns the base64 of the experts of so many tokens."""
        whole, rest = divmod(tokens, 3 * BLOCK)
        first = base64.b64encode(self._experts).decode() * whole
        return first + base64.b64encode(self._experts[: rest * self._experts_of_token]).decode()

    def answer(self, length: int, meta: dict[str, Any], routed_tokens: int) -> str:
        """Returns the JSON of one answer of `length` tokens, of which the last one ends it."""
        first = random.randrange(PIECES)
        whole, rest = divmod(length - 1, BLOCK)
        numbers = [(first + i) % PIECES for i in range(whole + 1)]
        ids = [self._joined_ids[i] for i in numbers[:whole]]
        pairs = [self._joined_pairs[i] for i in numbers[:whole]]
        last = numbers[-1]
        ids += [*self._ids[last][:rest], str(STOP)]
        pairs += [*self._pairs[last][:rest], f"[-0.25,{STOP},null]"]
        result = random.choice(("12", "13"))
        text = self._text * whole + f"#### {result}"
        if self._experts and routed_tokens:
            meta["routed_experts"] = self.experts(routed_tokens)
        rendered = json.dumps(meta)[:-1]
        return (
            f'{{"text":"{text}","output_ids":[{",".join(ids)}],"meta_info":{rendered},'
            f'"output_token_logprobs":[{",".join(pairs)}]}}}}'
        )


class Engine:
    """The modelled engine."""

    def __init__(self, speed: Speed, version: str) -> None:
        self.speed = speed
        self.pieces = Pieces(speed)
        self._numbers = itertools.count()
        self._waiting: list[Sequence] = []
        self._running: list[Sequence] = []
        """A heap; the next one to complete comes first."""
        self._kv_base = 0.0
        """Tokens of keys and values of the running sequences, less `progress` each."""
        self._reserved = 0
        self._progress = 0.0
        """Tokens that a sequence would have which has run since the start."""
        self._versions: list[tuple[float, str]] = [(0.0, version)]
        self._runs = asyncio.Event()
        self._runs.set()
        self.bytes_out = 0
        self.generated = 0

    @property
    def version(self) -> str:
        return self._versions[-1][1]

    @property
    def steps(self) -> float:
        """Token steps since the start."""
        return self._progress

    @property
    def step_s(self) -> float:
        """Seconds in which every running sequence gets a token."""
        kv = self._kv_base + len(self._running) * self._progress
        return self.speed.weights_s + kv * self.speed.kv_s

    def load(self, version: str) -> None:
        """Samples with these weights from now on."""
        self._versions = [*self._versions[-8:], (self._progress, version)]

    async def decode(self) -> None:
        """Advances all sequences, for ever."""
        last = time.monotonic()
        while True:
            await asyncio.sleep(TICK_S)
            now = time.monotonic()
            if self._runs.is_set():
                self.advance((now - last) * self.speed.clock)
            last = now

    def advance(self, seconds: float) -> None:
        """Lets so many seconds of the model pass."""
        self._admit()
        while self._running and seconds > 0:
            count = len(self._running)
            step_s = self.step_s
            # To the next completion, or as far as the time reaches, at the present speed.
            tokens = min(seconds / step_s, max(0.0, self._running[0].end - self._progress), 64.0)
            self._progress += tokens
            self.generated += int(tokens * count)
            seconds -= tokens * step_s
            while self._running and self._running[0].end <= self._progress + 1e-6:
                self._finish(heapq.heappop(self._running))
                self._admit()

    def _finish(self, sequence: Sequence) -> None:
        self._kv_base -= sequence.prompt - sequence.started
        self._reserved -= sequence.prompt + sequence.length
        sequence.done.set()

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self.speed.slots:
            needs = self._waiting[0].prompt + self._waiting[0].length
            if self._reserved + needs > self.speed.kv_tokens and self._running:
                return
            sequence = self._waiting.pop(0)
            if sequence.aborted:
                continue
            self._reserved += needs
            sequence.started = self._progress
            sequence.end = self._progress + sequence.length
            self._kv_base += sequence.prompt - sequence.started
            heapq.heappush(self._running, sequence)

    def _spans(self, sequence: Sequence) -> list[dict[str, Any]]:
        """Returns which version sampled which tokens."""
        spans = []
        ends = [at for at, _ in self._versions[1:]] + [float("inf")]
        for (begin, version), end in zip(self._versions, ends, strict=True):
            start = max(0, round(begin - sequence.started))
            stop = min(sequence.length, round(end - sequence.started) if end < 1e18 else 1 << 60)
            if start < stop:
                spans.append({"version": version, "start": start, "end": stop})
        return spans

    async def complete(self, prompt: int, longest: int, routed: bool) -> str:
        """Returns the JSON of one answer, when the modelled engine has generated it."""
        shortest = max(1, int(longest * self.speed.shortest))
        length = random.randint(shortest, longest)
        sequence = Sequence(0.0, next(self._numbers), prompt, length)
        self._waiting.append(sequence)
        try:
            await sequence.done.wait()
        except asyncio.CancelledError:
            sequence.aborted = True
            raise
        meta = {
            "id": f"{sequence.number:032x}",
            "finish_reason": {"type": "stop", "matched": STOP},
            "prompt_tokens": prompt,
            "completion_tokens": length,
            "cached_tokens": 0,
            "weight_version": self.version,
            "weight_versions": self._spans(sequence),
            "input_token_logprobs": [],
            "output_token_logprobs_length": length,
            "e2e_latency": 1.0,
        }
        return self.pieces.answer(length, meta, prompt + length - 1 if routed else 0)

    async def generate(self, request: web.Request) -> web.Response:
        body = json.loads(await request.read())
        sampling = body["sampling_params"]
        ids = body["input_ids"]
        prompts = ids if ids and isinstance(ids[0], list) else [ids] * sampling.get("n", 1)
        routed = body.get("return_routed_experts", False)
        answers = await asyncio.gather(
            *(self.complete(len(each), sampling["max_new_tokens"], routed) for each in prompts)
        )
        text = f"[{','.join(answers)}]" if len(answers) > 1 else answers[0]
        content = text.encode()
        self.bytes_out += len(content)
        return web.Response(body=content, content_type="application/json")

    async def pause(self, _: web.Request) -> web.Response:
        self._runs.clear()
        return web.json_response({})

    async def go_on(self, _: web.Request) -> web.Response:
        self._runs.set()
        return web.json_response({})

    async def update(self, request: web.Request) -> web.Response:
        await asyncio.sleep(self.speed.load_s / self.speed.clock)
        version = (await request.json())["weight_version"]
        self.load(version)
        return web.json_response({"success": True})

    async def info(self, _: web.Request) -> web.Response:
        content = {"weight_version": self.version, "is_generation": True, "model_path": "modelled"}
        return web.json_response(content)

    async def loads(self, _: web.Request) -> web.Response:
        """Answers as SGLang's `/v1/loads`."""
        running = len(self._running)
        load = {
            "dp_rank": 0,
            "num_running_reqs": running,
            "num_waiting_reqs": len(self._waiting),
            "num_used_tokens": int(self._kv_base + running * self._progress),
            "max_total_num_tokens": self.speed.kv_tokens,
            "max_running_requests": self.speed.slots,
            "gen_throughput": running * self.speed.clock / self.step_s if running else 0.0,
        }
        return web.json_response({"loads": [load]})

    async def metrics(self, _: web.Request) -> web.Response:
        lines = f"sglang:generation_tokens_total {self.generated}\n"
        return web.Response(text=lines)

    async def fine(self, _: web.Request) -> web.Response:
        return web.json_response({"success": True})

    def app(self) -> web.Application:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_post("/generate", self.generate)
        app.router.add_post("/pause_generation", self.pause)
        app.router.add_post("/continue_generation", self.go_on)
        app.router.add_post("/update_weights_from_disk", self.update)
        app.router.add_get("/v1/loads", self.loads)
        app.router.add_get("/metrics", self.metrics)
        for path in ("/health", "/model_info", "/server_info", "/get_model_info"):
            app.router.add_get(path, self.info)
        app.router.add_post("/{path:.*}", self.fine)

        async def start(_: web.Application) -> None:
            app[_DECODING] = asyncio.create_task(self.decode())

        app.on_startup.append(start)
        return app


_DECODING = web.AppKey("decoding", asyncio.Task)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--weight-version", default="default")
    options, _ = parser.parse_known_args()
    speed = Speed(**json.loads(os.environ["TRUE_SIZE"]))
    engine = Engine(speed, options.weight_version)
    web.run_app(
        engine.app(),
        host=options.host,
        port=options.port,
        print=None,
        backlog=4096,
        access_log=None,
    )


if __name__ == "__main__":
    main()
