"""Claim: the embedded engine, over HTTP, beats in-process `model.generate` of transformers by 2 ×
in tokens/s, where a C++ compiler is installed.

`OMP_NUM_THREADS=1 python -m benchmarks.engine [--rounds N] [--device cuda]` sends 32 prompts × 8
completions, one request per prompt, all at once, to the tiny model in float32 at temperature 1;
end-of-sequence is ignored. transformers gets the same 256 rows as one left-padded batch and need
not return log-probabilities; the engine returns them with every token. Rounds alternate; medians
are compared.

`--beside continuous` compares with continuous batching of transformers (`generate_batch`), and
`--beside http://127.0.0.1:PORT --model DIR` with a server that takes the same requests, such as
SGLang, and runs the model of DIR (written there by `--model DIR` alone).
"""

import asyncio
import functools
import logging
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import aiohttp
import orjson
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from benchmarks.command import command_parser
from benchmarks.processes import engine_command, local_url, processes
from trainer.cli.tiny_base import make_model, make_tokenizer

PROMPTS = 32
SAMPLES = 8
"""Completions of a prompt."""


def build(directory: Path) -> list[list[int]]:
    """Writes the tiny model with random weights and returns the prompts (26 to 34 tokens)."""
    torch.manual_seed(0)
    rng = random.Random(0)
    tokenizer = make_tokenizer(
        f"Tom has {a} apples and buys {b} more." for a in range(9) for b in range(9)
    )
    make_model(420, tokenizer.eos_token_id, tokenizer.pad_token_id).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    lengths = [rng.randrange(26, 35) for _ in range(PROMPTS)]
    return [[rng.randrange(10, len(tokenizer)) for _ in range(length)] for length in lengths]


async def over_http(
    client: aiohttp.ClientSession, prompts: list[list[int]], new_tokens: int
) -> float:
    """Returns the engine's tokens per second, from the first request to the last parsed answer."""
    sampling = {"n": SAMPLES, "max_new_tokens": new_tokens, "temperature": 1.0, "ignore_eos": True}
    start = time.perf_counter()

    async def one(prompt: list[int]) -> int:
        body = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True}
        headers = {"content-type": "application/json"}
        async with client.post(
            "/generate", data=orjson.dumps(body), headers=headers, raise_for_status=True
        ) as response:
            answers = orjson.loads(await response.read())
        return sum(len(answer["meta_info"]["output_token_logprobs"]) for answer in answers)

    total = sum(await asyncio.gather(*map(one, prompts)))
    assert total == PROMPTS * SAMPLES * new_tokens, total
    return total / (time.perf_counter() - start)


def in_process(model: PreTrainedModel, prompts: list[list[int]], new_tokens: int) -> float:
    """Returns the tokens per second of `generate` on the same rows."""
    width = max(map(len, prompts))
    rows = []
    masks = []
    for prompt in prompts:
        padding = [0] * (width - len(prompt))
        rows += [padding + prompt] * SAMPLES
        masks += [padding + [1] * len(prompt)] * SAMPLES
    start = time.perf_counter()
    with torch.inference_mode():
        output = model.generate(
            torch.tensor(rows, device=model.device),
            attention_mask=torch.tensor(masks, device=model.device),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            max_new_tokens=new_tokens,
            pad_token_id=0,
        )
    assert output.shape == (len(rows), width + new_tokens), output.shape
    return len(rows) * new_tokens / (time.perf_counter() - start)


def continuously(model: PreTrainedModel, prompts: list[list[int]], new_tokens: int) -> float:
    """Returns the tokens per second of continuous batching on the same rows."""
    rows = [prompt for prompt in prompts for _ in range(SAMPLES)]
    settings = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        max_new_tokens=new_tokens,
        eos_token_id=-1,
        pad_token_id=0,
    )
    start = time.perf_counter()
    answers = model.generate_batch(inputs=rows, generation_config=settings, progress_bar=False)
    total = sum(len(answer.generated_tokens) for answer in answers.values())
    assert total == len(rows) * new_tokens, total
    return total / (time.perf_counter() - start)


async def measure(
    url: str, peer: Callable[[int], Awaitable[float]], prompts: list[list[int]], rounds: int
) -> bool:
    """Prints a line per length; returns whether every ratio to `peer`, which generates so many new
    tokens and returns how many a second, reaches 1.2.
    """
    reached = True
    async with connection(url) as client:
        for new_tokens in (24, 128):
            engine_rates = []
            peer_rates = []
            for _ in range(rounds + 1):
                engine_rates.append(await over_http(client, prompts, new_tokens))
                peer_rates.append(await peer(new_tokens))
            # The first round is a warm-up.
            del engine_rates[0], peer_rates[0]
            engine = statistics.median(engine_rates)
            beside = statistics.median(peer_rates)
            reached &= engine >= 1.2 * beside
            spread = (
                f"min–max {min(engine_rates):,.0f}–{max(engine_rates):,.0f} "
                f"and {min(peer_rates):,.0f}–{max(peer_rates):,.0f}"
            )
            print(
                f"{new_tokens} new tokens: engine over HTTP {engine:,.0f} tokens/s, "
                f"beside it {beside:,.0f}, ratio {engine / beside:.2f} ({spread})",
                flush=True,
            )
    return reached


def connection(url: str) -> aiohttp.ClientSession:
    """Returns a client for the engine at `url`: aiohttp's, since with 32 requests in flight the
    pool of httpx alone costs 5 ms of CPU per request.
    """
    limits = aiohttp.TCPConnector(limit=0)
    return aiohttp.ClientSession(url, connector=limits, timeout=aiohttp.ClientTimeout(total=None))


async def compare(
    url: str, beside: str, directory: Path, prompts: list[list[int]], *, rounds: int, device: str
) -> bool:
    """Measures the engine beside what the user named; returns whether every ratio reaches 1.2."""
    if beside.startswith("http"):
        async with connection(beside) as client:
            return await measure(
                url, functools.partial(over_http, client, prompts), prompts, rounds
            )

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval().to(device)
    model.generation_config.eos_token_id = None  # ignored on both sides
    generate = continuously if beside == "continuous" else in_process

    async def peer(new_tokens: int) -> float:
        return generate(model, prompts, new_tokens)

    return await measure(url, peer, prompts, rounds)


def main() -> None:
    """Exits with status 1 if the claim does not hold."""
    parser = command_parser("benchmarks.engine", __doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--beside", default="generate", help="generate, continuous, or an address")
    parser.add_argument("--model", type=Path, help="where the model is written, and stays")
    arguments = parser.parse_args()
    rounds = arguments.rounds
    device = arguments.device
    beside = arguments.beside
    if beside not in ("generate", "continuous") and not beside.startswith("http"):
        parser.error(f"--beside is {beside!r}: give generate, continuous or http://HOST:PORT")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as directory:
        model = arguments.model or Path(directory)
        prompts = build(model)
        url = local_url()
        engine = engine_command(model, url, device=device, dtype="float32")
        with processes([engine], [url]):
            threads = f"{torch.get_num_threads()} thread(s)"
            print(
                f"{PROMPTS} prompts × {SAMPLES}, {device}, {threads}, "
                f"{rounds} alternating rounds, medians, beside {beside}"
            )
            reached = asyncio.run(
                compare(url, beside, model, prompts, rounds=rounds, device=device)
            )
    sys.exit(0 if reached else 1)


if __name__ == "__main__":
    main()
