"""Random schedules of the embedded engine, step by step: requests, pauses, new weights, adapters and
aborts in any order. Every token is explained by a forward pass of transformers over the whole
sequence and by the rules of sampling, written anew."""

import copy
import json
import random
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry, Counter
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2ForCausalLM,
    Qwen3Config,
)

from common.clients.rollout import sample_seed
from services.engine import llama_on_cpu, sampling, scheduler
from services.engine.adapters import BadAdapter
from services.engine.jobs import GenerationJob, Sequence
from services.engine.kernels import compiled
from services.engine.model import Model
from services.engine.protocol import GenerateBody, answer
from services.engine.scheduler import RequestRefused, Scheduler
from tests.support.engines.engines import write_model

CONTEXT = 72
ROWS = 10
PREFILL = 60
FREQUENT = (2, 70, 90, 260, 262, 266, 268, 271, 272, 279)
"""The likely tokens: end of text, bytes and words, so that stop tokens and texts are met."""
VERSIONS = ("0", "1", "2")
ADAPTERS = ("one", "two")
LAYERS = ("model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj", "lm_head")
TOLERANCE = 2e-4
CLOSE = 2e-5
Floats = NDArray[np.float64]


BLOCKS = "in blocks, "
"""Begins the kinds that a deterministic engine computes."""
OWN_ATTENTION = "attention of its own"
"""A model whose attention transformers does not replace, so that it gets a mask."""
SIZES: dict[str, Any] = {
    "vocab_size": 282,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "initializer_range": 0.3,
    "eos_token_id": 2,
}
CONFIGS: dict[str, PretrainedConfig] = {
    "biases": LlamaConfig(attention_bias=True, mlp_bias=True, **SIZES),
    "norms of heads": Qwen3Config(tie_word_embeddings=True, **SIZES),
    "windows": MistralConfig(sliding_window=8, **SIZES),
}
"""Beside Qwen 2, which shares the weight of its head with the embeddings."""


def _write(directory: Path, seed: int, kind: str) -> Path:
    write_model(directory, seed)
    config = CONFIGS.get(kind.removeprefix(BLOCKS))
    if config is not None:
        torch.manual_seed(seed)
        AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    file = directory / "model.safetensors"
    tensors = load_file(file)
    head = tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"])
    rare = torch.ones(len(head), dtype=torch.bool)
    rare[list(FREQUENT)] = False
    head[rare] *= 0.1
    # Norms and biases of their own, which a new model has not.
    torch.manual_seed(seed)
    for tensor in tensors.values():
        if tensor.ndim == 1:
            tensor += 0.2 * torch.randn(len(tensor))
    save_file(tensors, file, metadata={"format": "pt"})
    return directory


def _write_adapter(directory: Path, module: Any, seed: int) -> Path:
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name in LAYERS:
        rows, columns = module.get_submodule(name).weight.shape
        prefix = f"base_model.model.{name}"
        tensors[f"{prefix}.lora_A.weight"] = torch.randn(3, columns, generator=generator) * 0.3
        tensors[f"{prefix}.lora_B.weight"] = torch.randn(rows, 3, generator=generator) * 0.3
    directory.mkdir()
    save_file(tensors, directory / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 3, "lora_alpha": 2 + seed}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory


class World:
    """The files of a model, and what transformers computes with them."""

    def __init__(self, base: Path, kind: str) -> None:
        self.paths = {
            version: _write(base / version, seed, kind) for seed, version in enumerate(VERSIONS)
        }
        self._modules: dict[tuple[str, str | None], Any] = {}
        for version, path in self.paths.items():
            module = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
            self._modules[version, None] = module.eval().requires_grad_(False)
        first = self._modules["0", None]
        self.adapters = {
            name: _write_adapter(base / name, first, seed) for seed, name in enumerate(ADAPTERS)
        }
        self.model = Model(self.paths["0"], CONTEXT, deterministic=kind.startswith(BLOCKS))
        has_form = "windows" not in kind and kind not in ("no compiler", OWN_ATTENTION)
        self.is_lean = has_form and compiled() is not None

    def logits(self, version: str, adapter: str | None, tokens: list[int]) -> Floats:
        """Returns the logits [T, V] of a whole sequence."""
        if (version, adapter) not in self._modules:
            assert adapter is not None
            self._modules[version, adapter] = self._adapted(version, self.adapters[adapter])
        module = self._modules[version, adapter]
        logits = module(torch.tensor([tokens]), use_cache=False).logits[0]
        found: Floats = logits.double().numpy()
        return found

    def _adapted(self, version: str, path: Path) -> Any:
        module = copy.deepcopy(self._modules[version, None])
        config = json.loads((path / "adapter_config.json").read_text())
        stored = load_file(path / "adapter_model.safetensors")
        for name in LAYERS:
            lora_a = stored[f"base_model.model.{name}.lora_A.weight"]
            lora_b = stored[f"base_model.model.{name}.lora_B.weight"]
            layer = module.get_submodule(name)
            change = config["lora_alpha"] / config["r"] * (lora_b @ lora_a)
            # A parameter of its own, also for a head that shares its weight with the embeddings.
            layer.weight = torch.nn.Parameter(layer.weight + change, requires_grad=False)
        return module


def number(seed: int, place: int) -> float:
    """Returns the random number of a token: splitmix64 of the seed, then of the place."""
    mask = (1 << 64) - 1

    def mixed(x: int) -> int:
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
        return x ^ (x >> 31)

    state = (mixed(seed & mask) + (place + 1) * 0x9E3779B97F4A7C15) & mask
    return (mixed(state) >> 11) / 2**53


def kept(probabilities: Floats, body: dict[str, Any], slack: int) -> Floats:
    """Returns which tokens truncation keeps: at least (slack -1) and at most (slack 1), since tokens
    may be so close to a bound that rounding decides."""
    order = np.argsort(-probabilities, kind="stable")
    ordered = probabilities[order]
    chosen = ordered >= body["min_p"] * ordered[0] * (1 - slack * CLOSE)
    if body["top_p"] < 1:
        chosen &= ordered.cumsum() - ordered <= body["top_p"] + slack * CLOSE
    if body["top_k"] > 0:
        last, next_one = ordered[body["top_k"] - 1 : body["top_k"] + 1]
        if next_one > last * (1 - 2 * CLOSE):
            chosen &= ordered >= last * (1 - slack * CLOSE)
        else:
            chosen[body["top_k"] :] = False
    found = np.zeros(len(order), bool)
    found[order] = chosen
    return found


def spans_of(versions: list[str]) -> list[dict[str, Any]]:
    found = []
    start = 0
    for version, run in groupby(versions):
        end = start + len(list(run))
        found.append({"version": version, "start": start, "end": end})
        start = end
    return found


@dataclass(eq=False)
class Asked:
    """A request as it was sent, and when the tokens of its completions were sampled."""

    prompt: list[int]
    body: dict[str, Any]
    """The sampling parameters, all of them."""
    seed: int
    adapter: str | None
    job: GenerationJob
    versions: list[list[str]] = field(default_factory=list)
    """The version under which each token of each completion was sampled."""
    pauses: list[int] = field(default_factory=list)
    aborted: dict[int, str] = field(default_factory=dict)


class Story:
    """A scheduler, and what must be true of it after every step."""

    def __init__(self, world: World, seed: int) -> None:
        self.world = world
        self.rng = random.Random(seed)
        registry = CollectorRegistry()
        self.generated = Counter("generated", "tokens", registry=registry)
        self.prefilled = Counter("prefilled", "tokens", registry=registry)
        model: Any = world.model
        # What a story before this one has left.
        self.scheduler = Scheduler(
            model, ROWS, "0", generated=self.generated, prefilled=self.prefilled
        )
        # Its check at the start would rather leave the decoder out than compute something else.
        assert (model._lean is not None) is world.is_lean
        self.scheduler.update_weights(world.paths["0"], "0")
        self.loaded: list[str] = []
        self.asked: list[Asked] = []
        self.queue: list[list[tuple[Asked, int]]] = []
        """What waits, in the order in which it is to be admitted, all of a list together."""
        self.prompt_tokens = 0
        self.calls: list[tuple[list[list[int]], list[int]]] = []
        self._prefill = model.prefill
        model.prefill = self._noted_prefill

    def close(self) -> None:
        self.scheduler.adapters.merge(None)
        del self.world.model.prefill

    def _noted_prefill(self, prompts: Any, owners: Any, first: int, **options: Any) -> Any:
        self.calls.append(([list(prompt) for prompt in prompts], list(owners)))
        return self._prefill(prompts, owners, first, **options)

    def act(self) -> None:
        weights = {
            self.step: 4,
            self.ask: 2,
            self.pause: 2,
            self.abort: 1,
            self.score: 1,
            self.change_adapters: 1,
        }
        (action,) = self.rng.choices(list(weights), list(weights.values()))
        action()

    def finish(self) -> None:
        steps = 0
        while self.scheduler.can_step:
            self.step()
            steps += 1
            assert steps < 2000, "some request is never answered"
        assert not self.queue
        for asked in self.asked:
            assert asked.job.done.done()

    def ask(self) -> None:
        rng = self.rng
        # Few enough that a pass has some of them several times, and not side by side.
        prompts = [
            [(17 * size + 5 * place) % 280 for place in range(size)]
            for size in rng.choice(([1], [4], [9], [20], [56], [4, 20], [9, 4]))
        ]
        most = rng.randrange(1, 16)
        words = ["es", "pp", "as", "has", "re", "ys", "Tom"]
        pairs = [one + other for one in words for other in words]
        body: dict[str, Any] = {
            "n": rng.choice((1, 1, 2, 3, 13)),
            "max_new_tokens": most,
            "min_new_tokens": rng.choice((0, 0, rng.randrange(most + 1))),
            "temperature": rng.choice((0.0, 0.6, 1.0, 1.7)),
            "top_p": rng.choice((1.0, 1.0, 0.8)),
            "top_k": rng.choice((-1, 0, 1, 4, 40)),
            "min_p": rng.choice((0.0, 0.0, 0.1)),
            "sampling_seed": rng.choice((None, 3, -1, rng.getrandbits(70))),
            "stop": rng.choice(([], [""], rng.sample(pairs, 20), rng.sample(words, 3), "p")),
            "stop_token_ids": rng.choice(([], [], [rng.choice(FREQUENT)], [90, 271, 5000])),
            "ignore_eos": rng.random() < 0.2,
        }
        adapter = rng.choice([None, None, *ADAPTERS])
        request = GenerateBody.model_validate(
            {
                "input_ids": prompts if len(prompts) > 1 else prompts[0],
                "sampling_params": body,
                "return_logprob": True,
                "rid": f"r{len(self.asked)}",
                "lora_path": adapter,
            }
        )
        jobs = request.jobs(request.prompts(self.world.model), self.world.model)
        assert [job.prompt for job in jobs] == prompts
        for job in jobs:
            default = rng.getrandbits(64)
            job.start(default)
            seed = default if body["sampling_seed"] is None else body["sampling_seed"]
            asked = Asked(job.prompt, body, seed, adapter, job)
            asked.versions = [[] for _ in range(body["n"])]
            asked.pauses = [0] * body["n"]
            self.scheduler.enqueue([job])
            if adapter is not None and adapter not in self.loaded:
                assert isinstance(job.done.exception(0), BadAdapter)
                continue
            self.asked.append(asked)
            whole = [(asked, index) for index in range(body["n"])]
            self.queue += [whole[start : start + ROWS] for start in range(0, len(whole), ROWS)]
        self._check_counts()

    def step(self) -> None:
        """One step, after which every row that ran has one more token."""
        if not self.scheduler.can_step:
            return
        before = self._running()
        grown = {each: self._size(each) for each in before}
        admits = self.rng.random() < 0.8 or not before
        version = self.scheduler.weight_version
        self.calls = []
        self.scheduler.step(admit=admits)

        started = self._started()
        if not admits:
            assert not started
        self._check_prefills(started)
        for asked, index in before | started:
            versions = asked.versions[index]
            new = self._size((asked, index)) - len(versions)
            versions += [version] * new
            is_first = (asked, index) in started
            ends = asked.job.sequences[index].finish is not None
            assert new in ((1, 2) if is_first and ends else (2,) if is_first else (1,))
        assert all(self._size(each) == size + 1 for each, size in grown.items())
        for each in before | started:
            self._check_end(*each)
        self._check_counts()

    def _started(self) -> dict[tuple[Asked, int], None]:
        """Takes what has begun from the queue. It is all that had room, in its order."""
        started: dict[tuple[Asked, int], None] = {}
        while self.queue and all(self._has_begun(*each) for each in self.queue[0]):
            started |= dict.fromkeys(self.queue.pop(0))
        for group in self.queue:
            assert not any(self._has_begun(*each) for each in group)
        return started

    def _has_begun(self, asked: Asked, index: int) -> bool:
        sequence = asked.job.sequences[index]
        return sequence in self.scheduler.rows.sequences or sequence.finish is not None

    def _check_prefills(self, started: dict[tuple[Asked, int], None]) -> None:
        """Equal prompts of a pass are computed once, and passes are not too large."""
        left = list(started)
        for prompts, owners in self.calls:
            of_pass = left[: len(owners)]
            del left[: len(owners)]
            computed = set()
            for (asked, index), owner in zip(of_pass, owners, strict=True):
                earlier = len(asked.versions[index])
                sequence = asked.job.sequences[index]
                tokens = sequence.tokens or self._tokens((asked, index))
                assert prompts[owner] == asked.prompt + tokens[:earlier]
                assert sequence.cached_tokens == (len(asked.prompt) if owner in computed else 0)
                computed.add(owner)
            assert len({tuple(prompt) for prompt in prompts}) == len(prompts) == len(computed)
            assert len({asked.adapter for asked, _ in of_pass}) == 1
            longest = max(map(len, prompts))
            assert len(prompts) == 1 or len(prompts) * longest <= PREFILL
            self.prompt_tokens += sum(map(len, prompts))
        assert not left
        assert _total(self.prefilled) == self.prompt_tokens

    def pause(self) -> None:
        running = [self._key(sequence) for sequence in self.scheduler.rows.sequences]
        self.scheduler.pause()
        self.queue = [[each] for each in running] + self.queue
        for asked, index in running:
            asked.pauses[index] += 1
        assert not self.scheduler.can_step
        assert len(self.scheduler.rows) == 0
        self._check_counts()
        if self.rng.random() < 0.3:
            self.scheduler.release_memory(["kv_cache"])
            with pytest.raises(RequestRefused):
                self.scheduler.resume()
            self.scheduler.resume_memory(["kv_cache"])
        if self.rng.random() < 0.6:
            version = self.rng.choice(VERSIONS)
            path = self.world.paths[version]
            source = path if self.rng.random() < 0.5 else load_file(path / "model.safetensors")
            self.scheduler.update_weights(source, version)
            assert self.scheduler.weight_version == version
        if self.rng.random() < 0.7:
            for action in (self.ask, self.abort, self.ask, self.abort):
                action()
        self.scheduler.resume()

    def abort(self) -> None:
        of_open = [each for asked in self.asked for each in self._open(asked)]
        if not of_open:
            return
        chosen = self.rng.sample(of_open, self.rng.randrange(1 + min(3, len(of_open))))
        running = self._running()
        sequences = [asked.job.sequences[index] for asked, index in chosen]
        self.scheduler.abort(lambda sequence: sequence in sequences)
        for each in chosen:
            asked, index = each
            began = each in running or bool(asked.versions[index])
            asked.aborted[index] = "Aborted" if began else "Abort in waiting queue"
            self._check_end(asked, index)
        left = [[each for each in group if each not in chosen] for group in self.queue]
        self.queue = [group for group in left if group]
        self._check_counts()

    def score(self) -> None:
        prompts = [[self.rng.randrange(280) for _ in range(size)] for size in (2, 7, 5)]
        adapter = self.rng.choice([None, *self.loaded])
        found, version = self.scheduler.score(prompts, adapter, top=3, chosen=[7, 90])
        assert version == self.scheduler.weight_version
        for prompt, scores in zip(prompts, found, strict=True):
            logits = torch.from_numpy(self.world.logits(version, adapter, prompt)[:-1])
            wanted = logits.log_softmax(-1)
            own = wanted[torch.arange(len(prompt) - 1), torch.tensor(prompt[1:])]
            best = wanted.topk(3)
            close: dict[str, Any] = {"atol": TOLERANCE, "rtol": TOLERANCE}
            np.testing.assert_allclose(scores.logprobs, own, **close)
            np.testing.assert_allclose(scores.top, best.values, **close)
            np.testing.assert_allclose(scores.chosen, wanted[:, [7, 90]], **close)
            of_top = wanted.gather(1, torch.tensor(scores.top_tokens))
            np.testing.assert_allclose(scores.top, of_top, **close)

    def change_adapters(self) -> None:
        adapters = self.scheduler.adapters
        name = self.rng.choice(ADAPTERS)
        if name not in self.loaded:
            adapters.load(name, self.world.adapters[name])
            self.loaded.append(name)
            with pytest.raises(BadAdapter):
                adapters.load(name, self.world.adapters[name])
        else:
            self.scheduler.retire_adapter(name)
            in_use = any(
                each for asked in self.asked for each in self._open(asked) if asked.adapter == name
            )
            assert self.scheduler.drop_adapter(name) is not in_use
            if in_use:
                # Its requests still run, but no new one may name it.
                adapters.retired.discard(name)
            else:
                self.loaded.remove(name)
        known = {each: str(self.world.adapters[each]) for each in self.loaded}
        assert adapters.paths() == known

    def _open(self, asked: Asked) -> list[tuple[Asked, int]]:
        return [
            (asked, index)
            for index, sequence in enumerate(asked.job.sequences)
            if sequence.finish is None
        ]

    def _key(self, sequence: Sequence) -> tuple[Asked, int]:
        asked = next(each for each in self.asked if each.job is sequence.job)
        return asked, asked.job.sequences.index(sequence)

    def _running(self) -> dict[tuple[Asked, int], None]:
        return dict.fromkeys(self._key(each) for each in self.scheduler.rows.sequences)

    def _tokens(self, each: tuple[Asked, int]) -> list[int]:
        """Returns the tokens so far, of a row or of what has left it."""
        sequence = each[0].job.sequences[each[1]]
        rows = self.scheduler.rows
        if sequence in rows.sequences:
            return rows.tail(rows.sequences.index(sequence), CONTEXT)
        return sequence.tokens

    def _size(self, each: tuple[Asked, int]) -> int:
        return len(self._tokens(each))

    def _check_counts(self) -> None:
        waiting = sum(map(len, self.queue))
        running = len(self._running())
        assert self.scheduler.waiting == waiting
        assert running <= ROWS
        still_open = [each for asked in self.asked for each in self._open(asked)]
        assert len(still_open) == waiting + running
        for asked in self.asked:
            assert asked.job.done.done() is not bool(self._open(asked))
        sampled = sum(len(versions) for asked in self.asked for versions in asked.versions)
        assert _total(self.generated) == sampled

    def _check_end(self, asked: Asked, index: int) -> None:
        """Explains a completion that has ended, token by token."""
        sequence = asked.job.sequences[index]
        if sequence.finish is None:
            return
        tokens = sequence.tokens
        versions = asked.versions[index]
        found = answer(sequence, self.world.model.tokenizer)
        meta = found["meta_info"]
        assert found["output_ids"] == tokens
        assert len(tokens) == len(versions) == meta["completion_tokens"]
        assert meta["weight_versions"] == spans_of(versions)
        assert meta["weight_version"] == self.scheduler.weight_version
        assert meta["num_retractions"] == asked.pauses[index]
        assert meta["prompt_tokens"] == len(asked.prompt)
        assert meta["e2e_latency"] >= 0
        name = asked.job.rid
        assert meta["id"] == (name if asked.body["n"] == 1 else f"{name}-{index}")
        assert meta["output_token_logprobs_length"] == len(tokens)
        assert meta["input_token_logprobs"] == []
        assert "routed_experts" not in meta
        logprobs = meta["output_token_logprobs"]
        assert [token for _, token, _ in logprobs] == tokens
        self._check_reason(asked, index, found["text"])
        if not tokens:
            return

        for version in dict.fromkeys(versions):
            whole = self.world.logits(version, asked.adapter, asked.prompt + tokens)
            for place in [at for at, each in enumerate(versions) if each == version]:
                logits = whole[len(asked.prompt) + place - 1].copy()
                self._check_token(asked, index, place, logits, logprobs[place][0])
        returns_kept = asked.body["top_k"] > 0
        assert ("output_token_sampling_mask" in meta) is returns_kept
        if returns_kept:
            assert meta["output_token_sampling_mask_length"] == len(tokens)
            assert len(meta["output_token_sampling_mask"]) == len(tokens)

    def _stops(self, asked: Asked) -> set[int]:
        if asked.body["ignore_eos"]:
            return set()
        return {2, *asked.body["stop_token_ids"]} - {5000}

    def _check_token(
        self, asked: Asked, index: int, place: int, logits: Floats, logprob: float
    ) -> None:
        body = asked.body
        sequence = asked.job.sequences[index]
        token = sequence.tokens[place]
        is_greedy = body["temperature"] == 0
        if place < body["min_new_tokens"]:
            logits[list(self._stops(asked))] = -np.inf
        scaled = torch.from_numpy(logits / (1.0 if is_greedy else body["temperature"]))
        wanted = scaled.log_softmax(-1).numpy()
        assert abs(logprob - wanted[token]) < TOLERANCE * (1 + abs(wanted[token]))
        probabilities = np.exp(wanted)
        if is_greedy:
            assert logits[token] > logits.max() - TOLERANCE
            least = most = np.arange(len(logits)) == token
        else:
            # Between these two: tokens may be almost as likely as one another.
            least = kept(probabilities, body, -1)
            most = kept(probabilities, body, 1)
            uniform = number(sample_seed(asked.seed, index), place)
            assert most[token]
            fewest = (probabilities * least).cumsum() / probabilities[most].sum()
            largest = (probabilities * most).cumsum() / max(probabilities[least].sum(), 1e-9)
            start = fewest[token - 1] if token else 0.0
            assert start - TOLERANCE < uniform < largest[token] + TOLERANCE
        if body["top_k"] <= 0:
            return
        among, given = sequence.kept[place]
        mask = np.zeros(len(logits), bool)
        mask[given] = True
        assert len(given) == mask.sum() <= body["top_k"]
        assert (mask >= least).all()
        assert (mask <= most).all()
        assert (np.diff(probabilities[given]) < TOLERANCE).all()
        share = probabilities[token] / probabilities[mask].sum()
        assert abs(among - np.log(share)) < TOLERANCE

    def _check_reason(self, asked: Asked, index: int, text: str) -> None:
        """Compares why a completion has ended, and its text, with the first reason that it met."""
        body = asked.body
        tokens = asked.job.sequences[index].tokens
        stops = [body["stop"]] if isinstance(body["stop"], str) else body["stop"]
        decode = self.world.model.tokenizer.decode
        wanted: dict[str, Any] | None = None
        shown = decode(tokens, skip_special_tokens=True)
        for place, token in enumerate(tokens, 1):
            so_far = decode(tokens[:place])
            met = [stop for stop in stops if stop and stop in so_far]
            if token in self._stops(asked):
                wanted = {"type": "stop", "matched": token}
                shown = decode(tokens[: place - 1], skip_special_tokens=True)
            elif met:
                wanted = {"type": "stop", "matched": met[0]}
                shown = shown[: shown.index(met[0])]
            elif place == body["max_new_tokens"]:
                wanted = {"type": "length", "length": place}
            if wanted is not None:
                assert place == len(tokens)
        if index in asked.aborted:
            assert wanted is None
            wanted = {"type": "abort", "message": asked.aborted[index]}
        assert asked.job.sequences[index].finish == wanted
        assert text == shown


def _total(counter: Counter) -> float:
    (metric,) = counter.collect()
    return metric.samples[0].value


@pytest.fixture(
    scope="module",
    params=["qwen 2", "no compiler", OWN_ATTENTION, BLOCKS, f"{BLOCKS}windows", *CONFIGS],
)
def world(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[World]:
    with pytest.MonkeyPatch.context() as patch:
        if request.param == OWN_ATTENTION:
            patch.setattr(Qwen2ForCausalLM, "_can_set_attn_implementation", lambda _: False)
            patch.setattr(llama_on_cpu, "compiled", lambda: None)
        if request.param == "no compiler":
            patch.setattr(llama_on_cpu, "compiled", lambda: None)
            patch.setattr(sampling, "compiled", lambda: None)
        yield World(tmp_path_factory.mktemp("world"), request.param)


@pytest.mark.parametrize("seed", range(2))
def test_random_schedules_are_explained_token_by_token(
    world: World, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "PREFILL_TOKENS", PREFILL)
    with torch.inference_mode(), closing(Story(world, seed)) as story:
        for _ in range(40):
            story.act()
        story.finish()
