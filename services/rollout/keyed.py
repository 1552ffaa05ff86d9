"""Runs a server whose key is an option of its command line, without the key being on it: everybody may read that (`ps`).

`python keyed.py MODULE ARGUMENT…` runs the module as `python -m` does, with `--api-key` and the value of API_TOKEN behind the
arguments that it sees. Neither SGLang nor its router reads the key from the environment. Standard library only: it is also run
by the Python of SGLang, which has nothing of this package.
"""

import os
import runpy
import sys


def run_module(python: str, module: str) -> list[str]:
    """The beginning of the command that runs `module`, with the token of this environment as its key if there is one."""
    return [python, __file__, module] if os.environ.get("API_TOKEN") else [python, "-m", module]


def main() -> None:
    """The command line."""
    if not sys.flags.safe_path:
        sys.path[0] = os.getcwd()  # noqa: PTH109 - as with -m, instead of the folder of this file
    module = sys.argv.pop(1)
    sys.argv += ["--api-key", os.environ["API_TOKEN"]]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
