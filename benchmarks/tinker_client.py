"""The loop of `benchmarks.tinker_api` with Tinker's SDK, in an environment that has it; prints the
seconds of each round, of the processor and of the clock, and the losses, as JSON.
"""

import json
import sys
import time
from typing import Any

import numpy as np
import tinker  # type: ignore[import-not-found, unused-ignore]
from tinker import types  # type: ignore[import-not-found, unused-ignore]


def main(url: str, model: str, work: dict[str, int]) -> None:
    service = tinker.ServiceClient(base_url=url, api_key="tml-benchmark")
    random = np.random.default_rng(0)
    data: list[Any] = []
    for _ in range(work["rows"]):
        tokens = random.integers(3, 250, work["tokens"] + 1).tolist()
        inputs = {"target_tokens": tokens[1:], "weights": [1.0] * work["tokens"]}
        sequence = types.ModelInput.from_ints(tokens[:-1])
        data.append(types.Datum(model_input=sequence, loss_fn_inputs=inputs))
    adam = types.AdamParams(learning_rate=1e-3)

    seconds: list[float] = []
    losses: list[float] = []
    for _ in range(work["rounds"]):
        run = service.create_lora_training_client(base_model=model, rank=32, seed=1).result()
        # The first step allocates.
        run.forward_backward(data, "cross_entropy").result()
        run.optim_step(adam).result()
        input()  # the other side's turn is over
        began = time.perf_counter()
        began_cpu = time.process_time()
        for _ in range(work["steps"]):
            passed = run.forward_backward(data, "cross_entropy")
            stepped = run.optim_step(adam)
            losses.append(passed.result().metrics["loss:sum"])
            stepped.result()
        seconds.append(time.perf_counter() - began)
        cpu_s = time.process_time() - began_cpu
        print(json.dumps([cpu_s, seconds[-1], losses[-1]]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]))
