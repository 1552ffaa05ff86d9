"""What the doctor says of a model's memory, against its rules written anew, over random models,
settings and GPUs."""

import itertools
import json
import random
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from common.errors import ConfigError
from common.models import hub
from common.models.cache import CacheShape, engine_memory
from common.models.flow import answer_flow
from common.models.memory import (
    ModelShape,
    fastest_fit,
    full_pass,
    trainer_host_bytes,
    trainer_memory,
)
from common.settings.config import Config, load
from jobgroup.doctor import memory, sizes
from jobgroup.doctor.plan import Gpu, Plan
from jobgroup.doctor.report import Result, gb
from tests.support.package.doctor_groups import LARGE, QWEN_05B, QWEN_7B, plan_of

MIXTURE = {
    **QWEN_05B,
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 256,
    "num_experts": 12,
    "num_experts_per_tok": 2,
}
LINEAR = {
    **QWEN_05B,
    "model_type": "qwen3_next",
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 64,
    "linear_conv_kernel_dim": 4,
}
MODELS = (QWEN_05B, QWEN_7B, MIXTURE, LARGE)


def drawn_env(draws: random.Random) -> dict[str, str]:
    env = {
        "RLHF_SAMPLING__MAX_NEW_TOKENS": draws.choice(["512", "4096"]),
        "RLHF_SAMPLING__GROUP_SIZE": draws.choice(["2", "8"]),
    }
    if draws.random() < 0.4:
        env["RLHF_TRAINER__ACTIVATION_CHECKPOINTING"] = draws.choice(["true", "false"])
    if draws.random() < 0.4:
        env["RLHF_PARALLEL__RESHARD_AFTER_FORWARD"] = draws.choice(["true", "false"])
    if draws.random() < 0.4:
        env["RLHF_TRAINER__MICRO_BATCH_TOKENS"] = draws.choice(["2048", "16384"])
    return env


def total(shape: ModelShape, config: Config, gpus: int, room: int) -> int:
    return trainer_memory(shape, fastest_fit(shape, config, gpus, 0.9 * room), gpus).total


def savings(shape: ModelShape, env: dict[str, str], gpus: int) -> list[dict[str, str]]:
    """What to change, from the cheapest: leave the choice to the run, shorten the passes, share
    rows, then experts, round the moments, offload them; last an adapter."""
    chosen = {}
    for name in ("TRAINER__ACTIVATION_CHECKPOINTING", "PARALLEL__RESHARD_AFTER_FORWARD"):
        if f"RLHF_{name}" in env:
            chosen[f"RLHF_{name}"] = "auto"
    found = [dict(chosen)] if chosen else []

    def groups(count: int, setting: str) -> list[dict[str, str]]:
        return [
            {setting: str(n)} for n in range(2, 99) if count and gpus % n == 0 and count % n == 0
        ]

    rows = [{}, *groups(shape.heads, "RLHF_PARALLEL__CONTEXT_SIZE")]
    costly: list[dict[str, str]] = [{}, *groups(shape.experts, "RLHF_PARALLEL__EXPERT_SIZE")]
    costly.append({"RLHF_OPTIMIZER__MOMENTS": "bfloat16"})
    if gpus > 1:
        costly.append({"RLHF_PARALLEL__OFFLOAD_OPTIMIZER": "true"})
    for cost, row in itertools.product(costly, rows):
        found.append(chosen | {"RLHF_TRAINER__MICRO_BATCH_TOKENS": "4096"} | cost | row)
    found.append(chosen | {"RLHF_LORA__RANK": "16"})
    return found


def drawn_plan(seed: int) -> tuple[Any, int, dict[str, str], int]:
    draws = random.Random(seed)
    gpus = draws.choice([1, 2, 4, 8, 12])
    room = draws.choice([8, 24, 40, 80]) * 10**9
    return draws.choice(MODELS), gpus, drawn_env(draws), room


@pytest.mark.parametrize(
    ("content", "gpus", "env", "room"),
    [
        *map(drawn_plan, range(20)),
        # Several changes fit tightly.
        (QWEN_05B, 8, {}, 10 * 10**9),
        (MIXTURE, 2, {}, 12 * 10**9),
    ],
)
def test_the_cheapest_change_with_which_the_trainer_fits_is_named(
    content: Any, gpus: int, env: dict[str, str], room: int
) -> None:
    shape = ModelShape.of(content)

    tight = ""
    fitting = ""
    smallest = float("inf")
    for changes in savings(shape, env, gpus):
        try:
            config = load([], env | changes)
            size = total(shape, config, gpus, room)
        except ConfigError:
            continue
        smallest = min(smallest, size)
        words = " ".join(f"--env {name}={value}" for name, value in changes.items())
        said = f"{words} ({gb(size)})"
        if size <= 0.9 * room:
            fitting = said
            break
        if size <= room:
            tight = tight or said
    assert list(sizes._savings(shape, env, gpus)) == savings(shape, env, gpus)
    found = sizes._changes(shape, env, gpus, room=room)
    if tight:
        before, found = found.split("; or ", 1)
        assert before == f"tight: {tight}"
    if fitting:
        assert found == fitting
    else:
        assert "nothing fits" in found
        assert f"the smallest takes {gb(smallest)}:" in found


@pytest.mark.parametrize("seed", range(16))
def test_a_plan_has_a_line_for_every_size(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draws = random.Random(seed)
    content = draws.choice([*MODELS, LINEAR])
    (tmp_path / "config.json").write_text(json.dumps(content))
    (tmp_path / "a.safetensors").write_bytes(bytes(3000))
    gpus = draws.choice([1, 4, 16])
    env = drawn_env(draws)
    own = draws.choice([None, 33.0])
    monkeypatch.setattr(sizes, "_changes", lambda *words, room: f"{room} {words[1:]}")
    lines = {each.name: each for each in sizes.predict(str(tmp_path), gpus, env, only_gb=own)}
    config = load([], env)
    each_size = [own] if own else [24, 40, 48, 80, 141, 180]

    names = [name for name in lines if name.startswith("engine on ")]
    assert names == [f"engine on {size:g} GB" for size in each_size]
    for name, size in zip(names, each_size, strict=True):
        bytes_of_gpu = int(size * 10**9)
        judged = memory.judge_engine(name, str(tmp_path), content, config, size=bytes_of_gpu)
        assert lines[name] == judged
    if content is LINEAR:
        assert {name: line.state for name, line in lines.items() if name not in names} == {
            "model": "ok",
            "trainer": "warn",
        }
        assert "0.0 MB" in lines["model"].found
        return

    shape = ModelShape.of(content)
    assert lines["model"].found.startswith(f"{shape.parameters:,} parameters")
    held = trainer_memory(shape, config, gpus).held
    assert lines["trainer"].found.startswith(f"{gb(held)} on each of {gpus} GPUs")
    assert f"{config.sampling.max_new_tokens:,} tokens" in lines["trainer"].found
    node = min(8, gpus)
    host = trainer_host_bytes(shape, config, gpus, node)
    assert lines["CPU memory"].found.startswith(f"{gb(host)} on a trainer node of {node} GPUs")
    has_line = "passes of the longest answers" in lines
    assert has_line == ("RLHF_TRAINER__MICRO_BATCH_TOKENS" in env)
    for size in each_size:
        room = int(size * 10**9)
        line = lines[f"trainer on {size:g} GB"]
        needed = total(shape, config, gpus, room)
        state = "fail" if needed > room else "warn" if needed > 0.9 * room else "ok"
        assert line.state == state
        assert f"{gb(needed)} of {gb(room)} on each of {gpus} GPUs" in line.found
        assert line.fix == ("" if state == "ok" else f"{room} {(env, gpus)}")


@pytest.mark.parametrize("replays", [True, False])
@pytest.mark.parametrize("engine_gpus", [1, 2, 7])
def test_the_traffic_of_a_step_is_that_of_its_engines(replays: bool, engine_gpus: int) -> None:
    shape = ModelShape.of(MIXTURE)
    env = {
        "RLHF_ROLLOUT__TENSOR_PARALLEL_SIZE": str(engine_gpus),
        "RLHF_TRAINER__ROUTING_REPLAY": str(replays).lower(),
        "RLHF_ROLLOUT__MAX_RUNNING_REQUESTS": "3",
    }
    config = load([], env)
    line = sizes._flow(shape, config, 14)
    tokens = config.step_tokens
    experts = 24 * 2 if replays else 0
    flow = answer_flow(config, tokens, 14, 14 // engine_gpus, experts_of_token=experts)
    assert line.name == f"a step of {tokens:,} tokens"
    *tasks, weights = line.found.split("; ")
    expected = []
    for task, each in flow.items():
        parts = (f"{gb(each.received)} in", f"{gb(each.sent)} out", f"{gb(each.memory)} of")
        expected.append((task, parts))
    for text, (task, parts) in zip(tasks, expected, strict=True):
        assert text.startswith(f"{task} {', '.join(parts)}")
    assert gb(2 * shape.parameters) in weights


@pytest.mark.parametrize("seed", range(24))
def test_an_engine_must_hold_a_completion_and_should_hold_a_group(seed: int) -> None:
    draws = random.Random(seed)
    content = draws.choice([QWEN_7B, LINEAR])
    env = drawn_env(draws)
    share = draws.choice([None, 0.5])
    if share:
        env["RLHF_ROLLOUT__ENGINE_ARGS"] = json.dumps(["--mem-fraction-static", str(share)])
    config = load([], env)
    weights = draws.choice([10**9, 15 * 10**9])
    size = draws.choice([1, 2, 4, 16, 18, 20, 24]) * 10**9
    of_model: Any = lambda *_: weights  # noqa: E731
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(memory, "weight_bytes", of_model)
        found = memory.judge_engine("engine", "org/a", content, config, size=size)
    cache = CacheShape.of(content)
    engine = engine_memory(cache, weights, config, size, static_share=share or 0.85)
    completion = 512 + config.sampling.max_new_tokens
    fitting = engine.completions(completion)
    state = "fail" if fitting == 0 else "warn"
    if fitting >= config.sampling.group_size:
        state = "ok"
    assert (found.name, found.state) == ("engine", state)
    assert f"{fitting:,} completions of {completion:,}" in found.found
    left = engine.kv_tokens * engine.kv_bytes_per_token
    assert f"{gb(left)} left for the KV cache: {engine.kv_tokens:,} tokens" in found.found
    states = f"states of {gb(engine.state_bytes)} for each of {engine.sequences} at once"
    assert (states in found.found.replace(",", "")) == (content is LINEAR)


@pytest.mark.parametrize("room", ["auto", "600", "1024", "4096", "20000"])
@pytest.mark.parametrize("tokens", [256, 512, 3000])
def test_passes_should_be_full(room: str, tokens: int) -> None:
    env = {
        "RLHF_SAMPLING__MAX_NEW_TOKENS": str(tokens),
        "RLHF_TRAINER__MICRO_BATCH_TOKENS": room,
    }
    config = load([], env)
    lines = list(memory.judge_passes(config))
    if room == "auto":
        assert lines == []
        return
    [line] = lines
    answers = 1
    while full_pass(config, answers + 1) <= int(room):
        answers += 1
    fill = min(1.0, full_pass(config, answers) / int(room))
    assert line.state == ("ok" if fill >= 0.7 else "warn")
    assert f"{int(room):,} tokens, {fill:.0%} of which {answers} answers" in line.found
    if line.fix:
        numbers = {int(number) for number in re.findall(r"\d+", line.fix)}
        assert numbers == {full_pass(config, answers), full_pass(config, answers + 1)}
        better = load([], env | {"RLHF_TRAINER__MICRO_BATCH_TOKENS": str(min(numbers))})
        assert next(memory.judge_passes(better)).state == "ok"


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    "stored", [{}, {"dtype": "float32"}, {"torch_dtype": "float32"}, {"dtype": "bfloat16"}]
)
def test_weights_are_counted_or_those_of_the_files(
    dtype: str, stored: dict[str, str], tmp_path: Path
) -> None:
    config = load([], {"RLHF_MODEL__DTYPE": dtype})
    width = 2 if dtype == "bfloat16" else 4
    counted = memory.weight_bytes(str(tmp_path), {**QWEN_7B, **stored}, config)
    assert counted == width * ModelShape.of(QWEN_7B).parameters
    unknown = {**LINEAR, **stored}
    with pytest.raises(ConfigError) as refused:
        memory.weight_bytes(str(tmp_path), unknown, config)
    assert (refused.value.field, refused.value.value) == ("model.name", str(tmp_path))
    for name in ("a.safetensors", "b.safetensors", "c.bin"):
        (tmp_path / name).write_bytes(bytes(4000))
    width_of_file = 4 if "float32" in stored.values() else 2
    expected = 8000 // width_of_file * width
    assert memory.weight_bytes(str(tmp_path), unknown, config) == expected


def gpus_of(*totals: int) -> list[Gpu]:
    return [Gpu(str(n), "H100", f"GPU-{n}", size, 0, "580.1") for n, size in enumerate(totals)]


def judged(plan: Plan) -> dict[str, Result]:
    return {line.name: line for line in memory.check_fit(plan)}


@pytest.mark.parametrize("seed", range(12))
def test_a_group_is_judged_for_the_smallest_of_its_gpus(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draws = random.Random(seed)
    nodes = draws.choice([1, 2])
    wanted = draws.choice([0, 1, 2, 4])
    totals = [draws.choice([24, 40, 80]) * 10**9 for _ in range(draws.choice([1, 2, 4]))]
    left = draws.choice([10**9, 10**11, 10**12])
    bound = "left of a group"
    monkeypatch.setattr(memory, "available_memory", lambda: (left, bound))
    resources = f"resources: {{accelerators: 'H100:{wanted}'}}\n" if wanted else ""
    tasks = {
        "ppo-trainer": f"num_nodes: {nodes}\n{resources}",
        "rollout-server": "",
        "data-server": "",
    }
    plan = plan_of(tmp_path, tasks, env={"MODEL_NAME": "org/a", **drawn_env(draws)})
    plan.gpus = gpus_of(*totals)
    plan.shapes["org/a"] = QWEN_05B
    plan.inside = draws.random() < 0.3
    lines = judged(plan)

    job = plan.job("ppo-trainer")
    assert job is not None
    room = min(totals)
    ranks = nodes * max(1, min(wanted, len(totals)))
    shape = ModelShape.of(QWEN_05B)
    needed = total(shape, job.config, ranks, room)
    line = lines["memory of ppo-trainer"]
    assert f"{gb(needed)} of {gb(room)} on each of {ranks} GPUs" in line.found
    assert line.state == ("fail" if needed > room else "warn" if needed > 0.9 * room else "ok")
    engine = memory.judge_engine("memory of an engine", "org/a", QWEN_05B, job.config, size=room)
    assert lines["memory of an engine"] == engine

    title = "CPU memory of ppo-trainer"
    assert (title in lines) == (not plan.inside)
    if not plan.inside:
        host = trainer_host_bytes(shape, job.config, ranks, min(ranks, len(totals)))
        state = "fail" if host > left else "warn" if host > 0.9 * left else "ok"
        assert lines[title].state == state
        assert f"{gb(host)} of {gb(left)} {bound}" in lines[title].found


def test_what_is_judged_without_gpus_or_without_a_shape(tmp_path: Path) -> None:
    tasks = {"ppo-trainer": "", "rollout-server": ""}
    env = {"MODEL_NAME": "org/a"}
    plan = plan_of(tmp_path, tasks, env=env)
    assert judged(plan) == {}  # the line of the model says why
    plan.demo = True
    assert [line.state for line in judged(plan).values()] == ["ok"]
    plan.demo = False
    plan.shapes["org/a"] = QWEN_05B
    without = judged(plan)
    assert {name: line.state for name, line in without.items()} == {
        "model": "ok",
        "memory for the model": "ok",
    }
    assert "not judged" in without["memory for the model"].found

    plan.shapes["org/a"] = {"model_type": "mamba"}
    unknown = judged(plan)
    assert {name: line.state for name, line in unknown.items()} == {"memory for the model": "warn"}
    plan.gpus = gpus_of(80 * 10**9)
    engine = judged(plan)["memory of rollout-server"]
    assert (engine.state, "mamba" in engine.found) == ("fail", True)
    assert "memory of ppo-trainer" not in judged(plan)
    plan.here = [job for job in plan.here if job.name != "rollout-server"]
    assert list(judged(plan)) == ["memory for the model"]
    assert judged(plan_of(tmp_path, {"data-server": ""}, env=env)) == {}

    on_cpu = plan_of(tmp_path, tasks, env={**env, "RLHF_ROLLOUT__DEVICE": "cpu"})
    on_cpu.shapes["org/a"] = QWEN_05B
    on_cpu.gpus = gpus_of(80 * 10**9)
    assert "memory of an engine" not in judged(on_cpu)
    assert "memory of ppo-trainer" in judged(on_cpu)


def test_the_weights_of_an_engine_are_those_of_the_tasks_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def stored(place: str) -> int:
        asked.append(place)
        return 10**6

    monkeypatch.setattr(hub, "stored_bytes", stored)
    for name in ("org/there", "here"):
        folder = tmp_path / "here"
        folder.mkdir(exist_ok=True)
        model = str(folder) if name == "here" else name
        plan = plan_of(tmp_path, {"rollout-server": ""}, env={"MODEL_NAME": model})
        plan.shapes[model] = LINEAR
        plan.gpus = gpus_of(24 * 10**9)
        assert judged(plan)["memory of an engine"].state == "ok"
        assert asked.pop() == model


def test_the_parts_of_an_estimate_that_are_empty_are_left_out() -> None:
    config = load([], {})
    estimate = trainer_memory(ModelShape.of(QWEN_7B), config, 2)
    shown = dict(part.split(" ", 1) for part in memory.parts(estimate).split(", "))
    assert shown == {name: gb(size) for name, size in vars(estimate).items() if size}
    assert 0 in vars(estimate).values()
    assert shlex.split(memory.parts(estimate))[0] == "weights"
