"""Runs a server with `--api-key`, without the key on its command line, which all users can read
(`ps`).

`python api_key_launcher.py MODULE ARGUMENT…` runs the module like `python -m` and appends
`--api-key` with the value of API_TOKEN to its arguments, because neither SGLang nor its router
reads the environment. Uses only the standard library, because SGLang's Python runs it too.
"""

import os
import runpy
import sys


def run_module(python: str, module: str) -> list[str]:
    """Returns the first words of the command that runs `module`, with API_TOKEN as its key if it is
    set.
    """
    return [python, __file__, module] if os.environ.get("API_TOKEN") else [python, "-m", module]


def main() -> None:
    """Runs the module named on the command line."""
    if not sys.flags.safe_path:
        sys.path[0] = os.getcwd()  # noqa: PTH109
    module = sys.argv.pop(1)
    sys.argv += ["--api-key", os.environ["API_TOKEN"]]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
