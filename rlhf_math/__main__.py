"""`python -m rlhf_math MODULE ARGUMENT…`: `python -m MODULE` of the documentation, without a
checkout.
"""

import sys

from rlhf_math import PACKAGES, ROOT
from rlhf_math.commands import run


def main() -> None:
    """Runs the module named by the first argument."""
    if len(sys.argv) < 2 or sys.argv[1].partition(".")[0] not in (*PACKAGES, "benchmarks"):
        raise SystemExit(
            "usage: python -m rlhf_math MODULE ARGUMENT…   "
            "(for example trainer.tiny_model --help)\n"
            f"The job groups and settings files are in {ROOT / 'jobgroup'}"
        )
    run(sys.argv.pop(1))


if __name__ == "__main__":
    main()
