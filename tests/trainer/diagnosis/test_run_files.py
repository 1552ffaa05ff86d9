"""What the files of a run say: of one that lives, was killed, ended, was interrupted, or never began."""

import json
import logging
import os
import platform
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from common.errors import ServiceError
from common.process.logs import JsonFormatter, TextFormatter
from common.process.run_lock import LOCK, RunLock
from common.process.topology import LocalHost, Topology
from common.settings.config import Config
from tests.support.paths import ROOT
from tests.support.run_files import make_run, write
from trainer.diagnosis import names, run_files
from trainer.diagnosis.find import find
from trainer.diagnosis.report import first_line, text
from trainer.diagnosis.run_files import read_facts, read_topology, write_topology
from trainer.diagnosis.self_diagnosis import diagnose, diagnosed

HOLDS = """
import sys, time
from pathlib import Path
from common.process.run_lock import RunLock
with RunLock(Path(sys.argv[1]), "group-1"):
    print("ready", flush=True)
    time.sleep(600)
"""


def says(directory: Path) -> str:
    facts = read_facts(directory)
    return first_line(facts, find(facts))


def log(
    directory: Path, name: str, *lines: tuple[float, str, str, str], json_lines: bool = False
) -> None:
    """Writes a log as our processes do: time, level, logger and message of each line."""
    formatter = JsonFormatter(service=name) if json_lines else TextFormatter()
    path = directory / "state" / "logs" / f"{name}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        for created, level, logger, message in lines:
            record = logging.LogRecord(
                logger, logging.getLevelNamesMapping()[level], "", 0, message, None, None
            )
            record.created, record.msecs = created, created % 1 * 1000
            file.write(formatter.format(record) + "\n")


def started(directory: Path, at: float) -> tuple[float, str, str, str]:
    return (
        at,
        "INFO",
        "trainer.start.rank",
        "ppo-trainer 0.1.0 starts: rank 0 of 2 on ppo-trainer-0 (cpu), model=x",
    )


def test_a_run_that_ended_well_is_finished(tmp_path: Path) -> None:
    assert says(make_run(tmp_path / "run", 60)) == "finished: step 60 of 60; nothing is wrong"
    assert says(tmp_path) == "empty: no run has started here"


def test_a_position_that_comes_again_after_many_steps_is_found(tmp_path: Path) -> None:
    """The store was set back while the run went on; its trainer noticed it some steps later."""
    run = make_run(tmp_path / "run", 20)
    positions = [*range(1, 20), 3]
    lines = [
        {"step": step, "groups": [{"position": position, "prompt_id": f"p{position}"}]}
        for step, position in enumerate(positions, 1)
    ]
    write(run / "groups.jsonl", lines)
    finding = find(read_facts(run))[0]
    assert finding.name == names.DRAWN_TWICE
    assert finding.what == "position 3 in the steps 3 and 20"


def test_a_finished_run_does_not_list_what_its_services_said_when_they_were_ended(
    tmp_path: Path,
) -> None:
    run = make_run(tmp_path / "run", 60)
    now = time.time()
    log(run, "ppo-trainer-rank0", started(run, now - 100))
    log(
        run,
        "rollout-server-0",
        (now - 50, "WARNING", "services.rollout", "an engine was restarted"),
        (now - 5, "WARNING", "services.rollout", "could not report to the trainer"),
    )
    lock = run / LOCK
    lock.touch()
    os.utime(lock, (now - 10, now - 10))
    facts = read_facts(run)
    assert [line.text for line in facts.lines] == ["an engine was restarted"]
    assert "could not report" not in text(facts, find(facts))


@pytest.mark.integration
def test_a_killed_run_is_told_from_a_living_one(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 3)
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(run)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    with holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        assert read_facts(run).state == "running"
        holder.send_signal(signal.SIGKILL)
    assert (
        says(run)
        == f"The trainer was killed: process {holder.pid} on {os.uname().nodename} is gone"
    )


@pytest.mark.parametrize("json_lines", [False, True])
def test_the_last_words_of_a_run_are_classified_in_both_formats(
    tmp_path: Path, json_lines: bool
) -> None:
    run = make_run(tmp_path / "run", 3)
    now = time.time()
    waited = "waited 20 s so far for reward-server to answer POST /grade: Cannot connect to host 127.0.0.1:8002 ssl:default [Connect call failed]"
    gave_up = (
        "error: reward-server did not answer POST /grade in time: Cannot connect to host 127.0.0.1:8002 ssl:default "
        "[Connect call failed] · field: url · value: http://127.0.0.1:8002 · remedy: look at the log of reward-server"
    )
    log(
        run,
        "ppo-trainer-rank0",
        (now - 500, "CRITICAL", "end", "error: of an earlier attempt · field: x · remedy: y"),
        started(run, now - 100),
        (now - 40, "WARNING", "common.clients.base", waited),
        (
            now - 30,
            "CRITICAL",
            "end",
            f"{gave_up}\ndiagnosis: of the run itself (run/diagnosis.txt)",
        ),
        json_lines=json_lines,
    )
    log(
        run,
        "reward-server",
        (now - 61, "CRITICAL", "end", "error: no memory"),
        json_lines=json_lines,
    )
    facts = read_facts(run)
    finding = find(facts)[0]
    assert facts.state == "ended"
    assert facts.exit_reason == gave_up
    assert finding.name == names.REWARD_DIES
    assert finding.since == pytest.approx(now - 60, abs=0.1)  # when the wait began
    assert "reward-server: error: no memory" in finding.evidence


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        ("error: the cursor of the prompts cannot be used: database disk image is malformed · field: state_dir · value: state/data/stream.db · remedy: remove the file: the stream then starts over", "remove the file: the stream then starts over"),
        ("error: the replay store cannot be read: database disk image is malformed · field: state_dir · value: state/replay/replay.db · remedy: restore the file from a copy", "restore the file from a copy"),
        ("error: the replay store cannot be read: file is not a database · field: state_dir · value: state/replay/replay.db · remedy: restore the file from a copy", "restore the file from a copy"),
        ("error: the checkpoint cannot be used: ValueError trainer_state.json has changed since it was written · field: trainer.run_dir · value: checkpoints/step_000002 · remedy: remove it to continue from the beginning", "remove it to continue from the beginning"),
        ("error: 4 rounds of dynamic sampling left groups of equal rewards in the batch · remedy: raise algorithm.dynamic_sampling_rounds", "raise algorithm.dynamic_sampling_rounds"),
        ("error: rank 0 is out of GPU memory in step 3: CUDA · field: trainer.micro_batch_tokens · value: 8192 · remedy: lower it", "lower it"),
        ("error: metrics.jsonl cannot be written: [Errno 28] No space left on device · field: trainer.run_dir", names.REMEDIES[names.DISK_OF_RUN]),
        ("error: reward-server did not answer POST /grade in time: Cannot connect · remedy: look at the log of reward-server", names.REMEDIES[names.REWARD_DIES]),
    ],
)  # fmt: skip
def test_the_remedy_is_that_of_the_error_which_names_its_file(
    tmp_path: Path, words: str, remedy: str
) -> None:
    run = make_run(tmp_path / "run", 3)
    now = time.time()
    log(run, "ppo-trainer-rank0", started(run, now - 100), (now - 2, "CRITICAL", "end", words))
    assert find(read_facts(run))[0].remedy == remedy
    if "state_dir" not in words:
        return
    # The same words of the service itself, which failed for good: the group ended its trainer.
    log(run, "data-server-0", (now - 1, "CRITICAL", "end", words))
    log(run, "ppo-trainer-rank0", (now, "CRITICAL", "end", "interrupted"))
    assert find(read_facts(run))[0].remedy == remedy


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("error: data-server: the token is wrong · remedy: set the same API_TOKEN in every task", names.WRONG_TOKEN),
        ("error: metrics.jsonl cannot be written: [Errno 28] No space left on device · field: trainer.run_dir", names.DISK_OF_RUN),
        ("error: 16 groups in a row were dropped, the last one because of reward: timeout: 3 s · field: trainer.max_failed_groups", names.NOT_GRADED),
        ("error: an answer could not be graded: reward: no answer within 0.5 s · field: prompt_id · value: tiny-test-0 · remedy: correct the reward function", names.NOT_GRADED),
        ("error: 16 groups in a row were dropped, the last one because of generation: HTTP 500: bad · field: x", names.NOT_GENERATED),
        ("error: 4 rounds of dynamic sampling left groups of equal rewards in the batch · field: algorithm.dynamic_sampling_rounds", names.EQUAL_REWARDS),
        ("error: weights.safetensors has changed since it was written · field: trainer.run_dir", names.CHECKPOINT_DAMAGED),
        ("error: after 720 s 0 of 2 rollout nodes serve weights 3; missing: rollout-server-0 (stale, weights 2)", names.OLD_WEIGHTS),
        ("error: not healthy after 60 s: data-server at http://data-server-0.x:8000 (Cannot connect to host data-server-0.x:8000 ssl:default [Name or service not known])", names.UNKNOWN_NAME),
        ("error: reward-server: the graders did not start 5 times in a row: died · remedy: see", names.CANNOT_START),
        ("error: rank 0 is out of GPU memory in step 3: CUDA · field: trainer.micro_batch_tokens", names.RANK_MEMORY),
        ("error: not healthy after 12 s without progress: data-server at http://data-server-0.x:8000 (Connection refused)", names.DATA_DIES),
        ("error: no progress for 1800 s of waiting for a batch of 4 groups · field: trainer.stuck_after_s", names.NO_BATCH),
        ("error: something that no heading is about · remedy: do this", names.ENDED),
        ("interrupted; start again with the same run directory to continue from its newest checkpoint", names.INTERRUPTED),
    ],
)  # fmt: skip
def test_an_error_is_known_by_its_words(tmp_path: Path, words: str, name: str) -> None:
    run = make_run(tmp_path / "run", 3)
    now = time.time()
    log(run, "ppo-trainer-rank0", started(run, now - 100), (now - 1, "CRITICAL", "end", words))
    finding = find(read_facts(run))[0]
    assert finding.name == name
    if name == names.ENDED:
        assert finding.remedy == "do this"


def test_a_task_that_failed_for_good_is_the_cause_of_an_interrupted_run(tmp_path: Path) -> None:
    """The local runner then ends the trainer with SIGTERM."""
    run = make_run(tmp_path / "run", 3)
    now = time.time()
    log(
        run,
        "ppo-trainer-rank0",
        started(run, now - 100),
        (now - 1, "CRITICAL", "end", "interrupted; start again"),
    )
    logs = run / "logs"
    logs.mkdir()
    (logs / "rollout-server-0.log").write_text(
        "error: engine crashed 5 times in a row, most recently: status 1\n"
    )
    facts = read_facts(run)
    found = [finding.name for finding in find(facts)]
    assert found == [names.ENGINE_DIES_AGAIN, names.INTERRUPTED]


def test_a_task_that_kept_the_run_from_beginning_is_named(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "logs").mkdir(parents=True)
    wrong = "error: this number is too small · field: reward.workers · value: 0 · remedy: give a number above 0"
    (run / "logs" / "reward-server-0.log").write_text(wrong + "\n")
    (finding,) = find(read_facts(run))
    assert (finding.name, finding.remedy) == (names.WRONG_SETTING, "give a number above 0")
    assert finding.what == "reward-server-0: this number is too small"
    assert "reward.workers is 0" in finding.evidence
    assert finding.since is not None


def test_the_newest_step_of_a_long_file_is_found_at_once(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 3000)
    facts = read_facts(run)
    assert (facts.step, len(facts.steps)) == (3000, 24)


def test_damaged_files_do_not_stop_it(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 3)
    for name in ("config.json", "topology.json", ".lock", "groups.jsonl"):
        (run / name).write_bytes(b"\xff{[")
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(b'not json\n{"no": "step"}\n{"step": 4, "hal')
    (run / "state" / "logs").mkdir(parents=True)
    (run / "state" / "logs" / "data-server.log").write_bytes(
        b'\xff\xfe\n{"time"\n2026-99-99 00:00:00,000 INFO x: y\n'
    )
    assert read_facts(run).step == 3


def test_the_addresses_are_read_as_they_were_written(tmp_path: Path) -> None:
    hosts = {
        "ppo-trainer-0.group": LocalHost("127.1.2.3", 7),
        "data-server-0.group": LocalHost("127.1.2.4"),
    }
    topology = Topology("group", node_ips=("127.1.2.3",), local_hosts=hosts)
    write_topology(tmp_path, topology, world_size=2)
    found = read_topology(tmp_path)
    assert found is not None
    assert (
        found.url("ppo-trainer", 8004)
        == topology.url("ppo-trainer", 8004)
        == "http://127.1.2.3:8011"
    )
    assert json.loads((tmp_path / "topology.json").read_text())["versions"]["python"]

    write_topology(tmp_path, None, world_size=1)
    assert read_topology(tmp_path) is None


def test_an_error_leaves_the_block_with_the_line_that_names_the_file(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 3)
    write(run / "attempts.jsonl", [{"time": time.time(), "run_id": "group-1", "step": 0}])
    with RunLock(run, "group-1"), pytest.raises(ServiceError) as raised, diagnosed(run, Config()):
        raise ServiceError("something", remedy="do this")
    line = "The run ended with an error: something"
    assert raised.value.__notes__ == [f"diagnosis: {line} ({run / 'diagnosis.txt'})"]
    assert json.loads((run / "diagnosis.json").read_text())["first_line"] == line
    assert "remedy   do this" in (run / "diagnosis.txt").read_text()

    # Without a log this is what later says why the run ended; a new attempt makes it old.
    assert says(run) == line
    write(run / "attempts.jsonl", [{"time": time.time(), "run_id": "group-2", "step": 0}])
    assert not says(run).startswith("The run ended")

    with diagnosed(run, Config()):
        pass
    assert not list(run.glob("diagnosis.*"))  # a run that ends well has none


@pytest.mark.parametrize(
    ("ending", "line"),
    [
        (KeyboardInterrupt(), "The run was interrupted: by SIGTERM or Ctrl-C"),
        (SystemExit(3), "The run ended with an error: SystemExit: 3 in test_"),
    ],
)
def test_a_script_that_ends_its_run_is_named(
    tmp_path: Path, ending: BaseException, line: str
) -> None:
    """A run in one process has no log that would say it."""
    run = make_run(tmp_path / "run", 3)
    write(run / "attempts.jsonl", [{"time": time.time(), "run_id": "in-process-1", "step": 0}])
    with RunLock(run, "1"), pytest.raises(type(ending)), diagnosed(run, Config()):
        raise ending
    assert says(run).startswith(line)


def test_a_full_disk_keeps_no_run_from_saying_what_it_found(tmp_path: Path) -> None:
    make_run(tmp_path, 3)
    (tmp_path / "diagnosis.txt").symlink_to("/dev/full")
    said = diagnose(
        tmp_path,
        Config(),
        reason="error: weights 4 cannot be written: [Errno 28] No space left on device "
        "· field: trainer.run_dir · value: runs/x/weights/v000004",
    )
    assert said.startswith(f"diagnosis: {names.DISK_OF_RUN}: weights 4 cannot be written")
    assert "diagnosis.txt cannot be written" in said


TITLED = """
import os, subprocess, sys
title = "import setproctitle, sys, time; setproctitle.setproctitle('smg::router'); print('up', flush=True); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", title], stdin=subprocess.DEVNULL)
print(child.pid, flush=True)
child.wait()
"""


@pytest.mark.integration
@pytest.mark.skipif(sys.platform != "linux", reason="processes are read on Linux")
def test_a_process_with_a_title_of_its_own_belongs_to_its_parents_node(tmp_path: Path) -> None:
    """The router: a title overwrites the arguments and the environment."""
    hosts = f"rollout-server-0.group=127.0.0.1:0,{tmp_path.name}"
    env = {
        **os.environ,
        "JOBGROUP_HOSTS": hosts,
        "SKYPILOT_TASK_ID": "sky-1_rollout-server",
        "SKYPILOT_NODE_RANK": "0",
    }
    command = [sys.executable, "-c", TITLED]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as node:
        assert node.stdout is not None
        titled = int(node.stdout.readline())
        try:
            assert node.stdout.readline() == "up\n"
            os.kill(titled, signal.SIGSTOP)
            holder = {"host": platform.node(), "pid": node.pid}
            found = {process.pid: process for process in run_files._processes(holder)}
            assert found[titled].name == "rollout-server-0"
            assert found[titled].command == "smg::router"
            assert found[titled].is_stopped
        finally:
            os.kill(titled, signal.SIGKILL)
            node.kill()
