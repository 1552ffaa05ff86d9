"""The sections for what a person gives the check: a Python with SGLang, a real model and problems.

What they need besides torch and transformers is imported only then.
"""

from checks.gpu_check.harness import Findings
from checks.gpu_check.setting import Setting


def sglang(found: Findings, setting: Setting) -> None:
    """Starts SGLang with the agent's command line and calls it as the agent does."""
    python = setting.sglang_python()
    if python is None:
        found.not_reached("SGLang", "no Python with SGLang: name one with --sglang")
        return
    from checks.gpu_check.sglang_calls import measure

    measure(found, setting, python)


def grpo(found: Findings, setting: Setting) -> None:
    """Trains the given model on the given problems; the small form makes both itself."""
    paths = {"--model": setting.model_path, "--data": setting.data}
    missing = [name for name, path in paths.items() if path is None]
    if missing and not setting.small:
        found.not_reached("a GRPO run of a real model", f"{' and '.join(missing)} not given")
        return
    from checks.gpu_check.grpo_run import trains

    trains(found, setting)
