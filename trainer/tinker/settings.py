"""The settings that `rlhf tinker` reads, and its defaults."""

from common.settings.config import SettingsSubset, names

_SECTIONS = ("tinker", "model", "parallel", "rollout")
_READ = (
    "seed",
    "state_dir",
    "lora.alpha",
    "lora.rank",
    "lora.publish",
    "limits.service_timeout_s",
    "limits.stuck_after_s",
    "limits.lost_after_s",
    "trainer.device",
    "trainer.micro_batch_tokens",
    "trainer.micro_batch_size",
    "trainer.packing",
    "trainer.activation_checkpointing",
    "trainer.run_dir",
    "reproducible",
    "algorithm.rollout_correction",  # not used, but its value follows from the engine
)
RECORDED = "settings.json"
"""In the directory of a server: what the bits of its results depend on."""
WORDS = {
    "--model": "--model.name",
    "--dir": "--trainer.run_dir",
    "--name": "--tinker.name",
    "--port": "--tinker.port",
    "--host": "--tinker.host",
}
"""Short forms of the settings that everyone gives."""

TINKER_SETTINGS = SettingsSubset(
    about="A server of Tinker's API (docs/how-to/tinker.md), on this machine with the embedded "
    "engine:\n  rlhf tinker --model DIR --dir DIR [--name NAME] [--port N] [--host ADDRESS]\n"
    "These are short for model.name, trainer.run_dir, tinker.name, tinker.port and tinker.host.",
    does="rlhf tinker computes what its clients ask for",
    reads=[*_READ, *(name for name in names() if name.partition(".")[0] in _SECTIONS)],
    defaults={"trainer.run_dir": "runs/tinker", "reproducible": True, "rollout.engine": "embedded"},
    meanings={
        "trainer.run_dir": "Directory of all that the server keeps: operations, states of runs, "
        "saved weights, logs.",
        "lora.rank": "Highest rank of a run, with SGLang.",
    },
)
