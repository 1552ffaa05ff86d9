"""Runs in the environment of the SDK `tinker` 0.38: makes its calls and checks their answers.

python sdk_script.py URL MODEL
"""

import os
import sys
import urllib.request
from typing import Any

import tinker  # type: ignore[import-not-found, unused-ignore]
import torch
from tinker import types  # type: ignore[import-not-found, unused-ignore]

url, model = sys.argv[1:]
key = os.environ.get("TINKER_API_KEY", "tml-contract")


def datum(tokens: list[int]) -> Any:
    inputs = {"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


service = tinker.ServiceClient(base_url=url, api_key=key)
rest = tinker.RestClient(base_url=url, api_key=key)
capabilities = rest.get_server_capabilities().result()
assert [each.model_name for each in capabilities.supported_models] == [model]

training = service.create_lora_training_client(base_model=model, rank=4, seed=5).result()
info = training.get_info()
assert (info.model_name, info.lora_rank, info.is_lora) == (model, 4, True)
data = [datum([1, 5, 6, 7, 8]), datum([1, 9, 8])]
losses = []
for _ in range(4):
    gradients = training.forward_backward(data, "cross_entropy")
    step = training.optim_step(types.AdamParams(learning_rate=1e-2))
    losses.append(gradients.result().metrics["loss:sum"])
    assert step.result().metrics["grad_norm:mean"] > 0
assert losses == sorted(losses, reverse=True), losses
assert [len(each["logprobs"].data) for each in gradients.result().loss_fn_outputs] == [4, 2]


def negative(data: Any, logprobs: Any) -> Any:
    return -sum(each.sum() for each in logprobs), {"mine": 1.0}


custom = training.forward_backward_custom(data, negative).result()
plain = training.forward(data, "cross_entropy").result()
assert abs(custom.metrics["loss:sum"] - plain.metrics["loss:sum"]) < 1e-3
assert custom.metrics["mine"] == 1.0

saved = training.save_state("one").result().path
other = service.create_training_client_from_state_with_optimizer(saved).result()
again = other.forward(data, "cross_entropy").result()
assert again.metrics == plain.metrics

sampler = training.save_weights_and_get_sampling_client().result()
prompt = types.ModelInput.from_ints([1, 5, 6])
params = types.SamplingParams(max_tokens=6, temperature=0.7, top_p=0.9)
futures = [sampler.sample(prompt, 3, params, include_prompt_logprobs=True) for _ in range(20)]
answers = [future.result() for future in futures]
assert len({answer.sequences[0].sequence_id for answer in answers}) == 20
assert len({tuple(answer.sequences[0].tokens) for answer in answers}) > 1
assert all(len(each.tokens) == len(each.logprobs) for each in answers[0].sequences)
scores = sampler.compute_logprobs(types.ModelInput.from_ints([1, 5, 6, 7, 8])).result()
trained = training.forward([data[0]], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data
assert scores[0] is None
assert all(abs(a - b) < 1e-4 for a, b in zip(scores[1:], trained, strict=True)), (scores, trained)
chosen = torch.tensor([[7, -1], [5, 6], [8, -1], [8, 9]])
target = types.TensorData.from_torch(chosen)
alone = types.SamplingParams(max_tokens=2, stop=[])
whole = types.ModelInput.from_ints([1, 5, 6, 7, 8])
others = sampler.sample(
    whole,
    1,
    alone,
    include_prompt_logprobs=True,
    topk_prompt_logprobs=3,
    topk_sample_logprobs=2,
    target_prompt_logprobs=target,
).result()
top = others.topk_prompt_logprobs
assert top[0] is None
assert all(a >= b >= c for (_, a), (_, b), (_, c) in top[1:]), top
assert all(best[0][1] >= own for best, own in zip(top[1:], others.prompt_logprobs[1:], strict=True))
found = others.target_prompt_logprobs.to_torch()
assert abs(found[1, 1] - scores[2]) < 1e-4, (found, scores)
assert abs(found[3, 0] - scores[4]) < 1e-4, (found, scores)
assert found[0, 1] == 0
(sequence,) = others.sequences
for token, logprob, likeliest in zip(
    sequence.tokens, sequence.logprobs, sequence.topk_logprobs, strict=True
):
    known = dict(likeliest)
    assert abs(known.get(token, logprob) - logprob) < 1e-4, (token, logprob, likeliest)
named = training.save_weights_for_sampler("kept").result().path
kept = service.create_sampling_client(model_path=named).result()
seeded = types.SamplingParams(max_tokens=4, seed=7, stop=[])
assert kept.sample(prompt, 1, seeded).result().sequences[0].tokens == (
    sampler.sample(prompt, 1, seeded).result().sequences[0].tokens
)
base = service.create_sampling_client(base_model=model).result()
assert base.sample(prompt, 1, seeded).result().sequences[0].stop_reason == "length"

for refused in ("stable_reinforce", "dro2"):
    error = training.forward(data, refused).future().exception()
    assert isinstance(error, tinker.RequestFailedError), error
    assert refused in str(error)

exported = training.save_weights_external("out").result().path
urls = rest.get_external_weights_urls(exported).result().urls
assert set(urls) >= {"adapter_config.json", "adapter_model.safetensors"}
with urllib.request.urlopen(urls["adapter_config.json"]) as file:  # noqa: S310
    assert b'"r": 4' in file.read()
listed = rest.list_checkpoints(training.model_id).result().checkpoints
assert {each.checkpoint_type for each in listed} == {"training", "sampler", "external"}
rest.delete_checkpoint_from_tinker_path(saved).result()
runs = rest.list_training_runs().result().training_runs
assert {run.training_run_id for run in runs} >= {training.model_id, other.model_id}
service.close("success").result()
print("the SDK is content")
