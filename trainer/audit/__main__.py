"""Re-executes a step of a run and compares every stage with what the run recorded: completions,
rewards, advantages, gradients and weights.
"""

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from common.process import watchdog
from common.process.cli import CommandParser, output_file, positive, run
from common.process.storage import storing
from trainer.audit.comparison import STAGES, StageOutcome
from trainer.audit.waits import waits_told
from trainer.observe.run_dir import audited_steps, check_run, not_audited
from trainer.tinker.settings import RECORDED

_EPILOG = """\
examples:
  rlhf audit runs/demo-seed0 --step 12
  rlhf audit runs/demo-seed0 --step 12 --stages completions rewards
  rlhf audit runs/demo-seed0 --certify certificate.json --seed "drawn in public" --count 5
  rlhf audit runs/demo-seed0/checkpoints/step_000060 --check certificate.json
  rlhf audit runs/tinker                     operations of a Tinker server that has ended

The run must have been made with trainer.audit true. Each stage is re-executed from what the run
recorded, and compared bit for bit; where bits cannot be compared, the line says why and states the
rounding. The first stage that differs is named, with what was expected and what was found.

exit status: 0 when nothing differs, 1 when a stage differs, 2 when the record is missing or damaged
"""
_RANK = "RLHF_AUDIT_RANK"
"""Set in the processes that re-execute a step of a run of several ranks."""
_LOOK_EVERY_S = 0.1
_STAGES_BY_WORD = {stage.replace(" ", "-"): stage for stage in STAGES}
"""Stages by their names on the command line."""


def parser() -> CommandParser:
    """Returns the command line."""
    usage = (
        "RUN_DIR --step STEP [--stages STAGE …]\n"
        "       rlhf audit RUN_DIR --certify FILE --seed SEED [--count N]\n"
        "       rlhf audit WEIGHTS_DIR --check FILE\n"
        "       rlhf audit TINKER_DIR"
    )
    made = CommandParser("rlhf audit", __doc__, usage, _EPILOG)
    made.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="directory of the run")
    what = made.add_mutually_exclusive_group()
    what.add_argument("--step", type=positive, metavar="STEP", help="the step to re-execute")
    what.add_argument(
        "--certify",
        type=output_file,
        metavar="FILE",
        help="re-execute steps that --seed draws, and write a record of it",
    )
    what.add_argument(
        "--check",
        type=Path,
        metavar="FILE",
        help="whether such a record holds for the published weights in a directory",
    )
    made.add_argument("--seed", metavar="SEED", help="any text, from whoever wants to know")
    made.add_argument(
        "--count", type=positive, default=3, metavar="N", help="steps to draw (default 3)"
    )
    made.add_argument(
        "--recorded-tools",
        action="store_true",
        help="of episodes, take what the tools said from the record and do not call them",
    )
    made.add_argument(
        "--json", type=output_file, metavar="FILE", help="write the outcomes of --step there, too"
    )
    made.add_argument(
        "--stages",
        nargs="+",
        metavar="STAGE",
        choices=_STAGES_BY_WORD,
        default=[word for word in _STAGES_BY_WORD if word != "checkpoint"],
        help=f"compare only these: {', '.join(_STAGES_BY_WORD)} (default: all but checkpoint)",
    )
    return made


def main(argv: list[str] | None = None) -> None:
    """Re-executes a step; exits with 1 when a stage differs. Raises ConfigError for a missing or
    damaged record.
    """
    words = sys.argv[1:] if argv is None else argv
    made = parser()
    arguments = made.parse_args(words)
    if arguments.check:
        from trainer.audit.certify import check_certificate

        raise SystemExit(check_certificate(arguments.check, arguments.run_dir))
    # The record of a Tinker server is of operations, not of steps.
    if (arguments.run_dir / RECORDED).exists():
        raise SystemExit(_audit_tinker(arguments.run_dir, words))
    # What is wrong is said before the libraries are loaded.
    check_run(arguments.run_dir)
    recorded = audited_steps(arguments.run_dir)
    if arguments.certify:
        if not arguments.seed:
            made.error("the following arguments are required: --seed")
        from trainer.audit.certify import certify

        more = ["--recorded-tools"] if arguments.recorded_tools else []
        raise SystemExit(
            certify(
                arguments.run_dir,
                arguments.seed,
                arguments.count,
                output=arguments.certify,
                more=more,
            )
        )
    if arguments.step not in recorded:
        raise not_audited(arguments.step, recorded)
    stages = [stage for word, stage in _STAGES_BY_WORD.items() if word in arguments.stages]
    is_one_of_several = _RANK in os.environ

    with waits_told():
        from trainer.audit.reexecution import StepReexecution  # torch: slow to import

        watchdog.at("reading the record")
        again = StepReexecution(
            arguments.run_dir,
            arguments.step,
            stages,
            tell=_print_outcome,
            recorded_tools=arguments.recorded_tools,
        )
        start = again.recorded.start
        setup = start.setup
        if not is_one_of_several:
            ranks = "1 rank" if setup.world_size == 1 else f"{setup.world_size} ranks"
            where = f"{setup.device}, torch {setup.packages.get('torch')}"
            made_by = f"made by {start.run_id} on {ranks} ({where})"
            print(f"step {again.step} of {again.run_dir}, {made_by}", flush=True)
    # The record is read first: a missing one is reported once, not by every rank.
    if setup.world_size > 1 and not is_one_of_several:
        raise SystemExit(_run_ranks(setup.world_size, setup.threads, words))

    import torch

    torch.set_num_threads(setup.threads)
    with waits_told():
        watchdog.at(f"waiting for {setup.world_size} ranks to join")
        with again.ranks() as rank:
            outcomes = again.run(rank)
            rank.barrier()
    if not rank.is_rank_zero:
        raise SystemExit(0)
    if arguments.json:
        with storing(arguments.json.name, arguments.json, "--json", "make room"):
            arguments.json.write_bytes(msgspec.json.encode(outcomes))
    raise SystemExit(_conclude(outcomes))


def _audit_tinker(directory: Path, words: Sequence[str]) -> int:
    """Re-executes what a Tinker server has computed, on as many ranks; returns the status."""
    with waits_told():
        from trainer.audit.tinker import audit_tinker, recorded_settings  # torch: slow to import

        setup = recorded_settings(directory).setup
        if setup.world_size == 1 or _RANK in os.environ:
            return audit_tinker(directory)
    return _run_ranks(setup.world_size, setup.threads, words)


def _print_outcome(outcome: StageOutcome) -> None:
    print(f"{outcome.stage:<12} {outcome.state:<13} {outcome.detail}", flush=True)
    if outcome.where:
        print(f"{'':<12} at            {outcome.where}")
        print(f"{'':<12} expected      {outcome.expected}")
        print(f"{'':<12} found         {outcome.found}", flush=True)


def _conclude(outcomes: Sequence[StageOutcome]) -> int:
    """Prints the conclusion; returns the exit status."""
    for outcome in outcomes:
        if outcome.state == "differs":
            print(f"the first stage that differs: {outcome.stage}")
            return 1
    left_out = [outcome.stage for outcome in outcomes if outcome.state == "not compared"]
    rest = f", except what was not compared ({', '.join(left_out)})" if left_out else ""
    print(f"nothing differs from what the run recorded{rest}")
    return 0


def _run_ranks(count: int, threads: int, words: Sequence[str]) -> int:
    """Runs this command in as many processes as the run had ranks; returns the status of rank 0, or
    that of the first that failed.
    """
    from torch.distributed import TCPStore

    # This process keeps the port: no other program can take it until the ranks have loaded.
    store = TCPStore("127.0.0.1", 0, count, is_master=True, wait_for_workers=False)
    shared = os.environ | {
        _RANK: "1",
        "WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": str(threads),
    }
    command = [sys.executable, "-m", "trainer.audit", *words]
    ranks = [
        subprocess.Popen(command, env=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(count)
    ]
    try:
        while True:
            statuses = [rank.poll() for rank in ranks]
            failed = [status for status in statuses if status]
            if failed:  # the others wait for it
                return failed[0]
            if None not in statuses:
                return 0
            time.sleep(_LOOK_EVERY_S)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


if __name__ == "__main__":
    run(main, "")
