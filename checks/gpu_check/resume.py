"""A checkpoint and its resume: every weight and optimiser value, bit by bit."""

import torch

from benchmarks.update import full_groups, learn
from checks.gpu_check.harness import Findings
from checks.gpu_check.setting import Setting, different
from learning.sharding import full, local, named_tensors
from trainer.policy.checkpoint import Checkpoints, RunState
from trainer.policy.identity import identity
from trainer.policy.policy import Policy
from trainer.policy.reference import Reference


def correctness(found: Findings, setting: Setting) -> None:
    """Makes two updates with a checkpoint between them, and repeats the second from the
    checkpoint.
    """
    run_dir = setting.scratch / "resume"
    tokens = "512" if setting.small else "4096"
    config = setting.config(
        setting.model("small"),
        "--trainer.micro_batch_tokens",
        tokens,
        "--trainer.run_dir",
        str(run_dir),
    )
    groups = full_groups(config)
    with setting.ranks(config) as ranks:
        policy = Policy(config, ranks)
        reference = Reference(policy)
        learn(policy, reference, groups, config)
        written = _state(policy)
        with Checkpoints(run_dir / "checkpoints", ranks, 1) as checkpoints:
            state = RunState(policy.step, 0, "check", policy.kl_coef, identity=identity(config))
            path = checkpoints.save(state, policy.snapshots(checkpoints.gathered))
            learn(policy, reference, groups, config)  # while the files are written
            checkpoints.wait()
        went_on = _state(policy)
        resumed, _, source = Policy.resume(config, ranks, run_dir)
        found.claim(
            "the run resumes from its checkpoint",
            path.name,
            source.name if source else "none",
            source == path,
        )
        read = _state(resumed)
        wrong = different(written, read)
        measured = f"{len(wrong)} differ" + (f": {wrong[0]}" if wrong else "")
        found.claim(
            f"{len(written)} tensors of weights and optimiser, bit by bit",
            "0 differ",
            measured,
            not wrong,
        )
        moved = len(different(written, went_on))
        found.claim("an update changes them", "> 0 differ", f"{moved} differ", moved > 0)
        learn(resumed, Reference(resumed), groups, config)
        again = _state(resumed)
        largest = max(
            float((again[name].double() - went_on[name].double()).abs().max()) for name in again
        )
        predicted = (
            "about 0: gradients of attention are summed in any order" if setting.on_gpu else "0"
        )
        found.claim(
            "the next update after the resume: largest difference",
            predicted,
            f"{largest:.3g}",
            None if setting.on_gpu else largest == 0,
        )


def _state(policy: Policy) -> dict[str, torch.Tensor]:
    tensors = {**named_tensors(policy.model), **policy.optimizer.state_dict()}
    return {
        name: local(full(tensor)).detach().to("cpu", copy=True) for name, tensor in tensors.items()
    }
