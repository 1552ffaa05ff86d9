"""A loop as tinker-cookbook's `rl_loop`, for a Python that has the SDK `tinker`: it samples groups,
rewards high tokens and learns. It logs as `rl_loop` does, and goes on from its last checkpoint.

    TINKER_BASE_URL=… TINKER_API_KEY=tml-… python tinker_loop.py MODEL LOG_DIR STEPS RATE
"""

import json
import sys
from pathlib import Path
from typing import Any

import tinker  # type: ignore[import-not-found, unused-ignore]
from tinker import types  # type: ignore[import-not-found, unused-ignore]

_PROMPTS = 4
_SAVE_EVERY = 5


def main(model: str, log: Path, steps: int, rate: float) -> None:
    log.mkdir(parents=True, exist_ok=True)
    service = tinker.ServiceClient()
    checkpoints = log / "checkpoints.jsonl"
    if checkpoints.exists():
        last = json.loads(checkpoints.read_text().splitlines()[-1])
        path = last["state_path"]
        training = service.create_training_client_from_state_with_optimizer(path).result()
        first = last["batch"]
    else:
        training = service.create_lora_training_client(base_model=model, rank=4).result()
        first = 0

    for step in range(first, steps):
        if step and step % _SAVE_EVERY == 0:
            _save(training, checkpoints, name=f"{step:06d}", batch=step)
        _append(log / "metrics.jsonl", {"step": step, **_learn(training, step, rate)})
    _save(training, checkpoints, name="final", batch=steps)


def _learn(training: Any, step: int, rate: float) -> dict[str, Any]:
    """Makes a step; returns its metrics."""
    sampler = training.save_weights_and_get_sampling_client().result()
    params = types.SamplingParams(max_tokens=8, stop=[])
    prompts = [[1, 5 + step, 9 + number] for number in range(_PROMPTS)]
    futures = [
        sampler.sample(types.ModelInput.from_ints(prompt), num_samples=4, sampling_params=params)
        for prompt in prompts
    ]
    data = []
    for prompt, future in zip(prompts, futures, strict=True):
        data += _group(prompt, future.result().sequences)
    passed = training.forward_backward(data, "importance_sampling")
    adam = types.AdamParams(learning_rate=rate, beta1=0.9, beta2=0.95, eps=1e-8)
    stepped = training.optim_step(adam)
    return {**passed.result().metrics, **stepped.result().metrics}


def _group(prompt: list[int], sequences: Any) -> list[Any]:
    """Returns the data of a group: what is better than its mean is to become more probable."""
    rewards = [sum(each.tokens) / 1000 for each in sequences]
    mean = sum(rewards) / len(rewards)
    skipped = len(prompt) - 1
    data = []
    for sequence, reward in zip(sequences, rewards, strict=True):
        inputs = {
            "target_tokens": [0] * skipped + list(sequence.tokens),
            "logprobs": [0.0] * skipped + list(sequence.logprobs),
            "advantages": [0.0] * skipped + [reward - mean] * len(sequence.tokens),
        }
        tokens = types.ModelInput.from_ints([*prompt, *sequence.tokens[:-1]])
        data.append(types.Datum(model_input=tokens, loss_fn_inputs=inputs))
    return data


def _save(training: Any, checkpoints: Path, *, name: str, batch: int) -> None:
    path = training.save_state(name).result().path
    _append(checkpoints, {"name": name, "batch": batch, "state_path": path})


def _append(file: Path, row: dict[str, Any]) -> None:
    with file.open("a") as stream:
        stream.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
