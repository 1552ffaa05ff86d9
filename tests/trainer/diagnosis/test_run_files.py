"""What the files of a run say: of one that lives, was killed, ended, was interrupted, or never began."""

import json
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from common.clients.base import Unreachable
from common.errors import ConfigError, ServiceError, ServiceLost, Unauthorized
from common.process import watchdog
from common.process.logs import JsonFormatter, TextFormatter
from common.process.run_lock import LOCK, RunLock
from common.process.storage import StorageFailed
from common.process.topology import LocalHost, Topology
from common.settings.config import Config
from tests.support.paths import ROOT
from tests.support.runs.run_files import make_run, write
from trainer.diagnosis import logs
from trainer.diagnosis.facts import LogLine
from trainer.diagnosis.find import find
from trainer.diagnosis.logs import read_log
from trainer.diagnosis.report import first_line, text
from trainer.diagnosis.run_files import (
    log_folders,
    read_facts,
    read_topology,
    token_file,
    write_topology,
)
from trainer.diagnosis.self_diagnosis import diagnose, diagnosed
from trainer.observe import catalogue

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
    directory: Path,
    name: str,
    *lines: tuple[float, str, str, str | ServiceError | LogLine],
    json_lines: bool = False,
) -> None:
    """Writes a log as our processes do: time, level, logger and message of each line; of an error,
    what the process says at its end; of a LogLine, its text with code and fields.
    """
    formatter = JsonFormatter(service=name) if json_lines else TextFormatter()
    path = directory / "state" / "logs" / f"{name}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        for created, level, logger, message in lines:
            number = logging.getLevelNamesMapping()[level]
            args = (message,) if isinstance(message, ServiceError) else ()
            text = "error: %s" if args else message
            if isinstance(message, LogLine):
                text = message.text
            record = logging.LogRecord(logger, number, "", 0, text, args, None)
            if isinstance(message, LogLine):
                record.event = {"code": message.code, **message.fields}
            record.created, record.msecs = created, created % 1 * 1000
            file.write(formatter.format(record) + "\n")


def started(directory: Path, at: float) -> tuple[float, str, str, LogLine]:
    return at, "INFO", "trainer.start.rank", told("ppo-trainer 0.1.0 starts", "started")


def told(text: str, code: str, **fields: str) -> LogLine:
    return LogLine(source="", time=None, text=text, code=code, fields=fields)


def test_a_run_that_ended_well_is_finished(tmp_path: Path) -> None:
    assert says(make_run(tmp_path / "run", 60)) == "finished: step 60 of 60; nothing is wrong"
    assert says(tmp_path) == "empty: no run has started here"
    (tmp_path / "metrics.jsonl").write_bytes(b"\xe2\x28\n{}\n")
    assert says(tmp_path).startswith("empty: no line of metrics.jsonl can be read")


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
    assert finding.name == catalogue.DRAWN_TWICE
    assert finding.what == "position 3 in the steps 3 and 20"
    assert finding.since == read_facts(run).steps[-1]["time"]


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


def test_a_run_that_stalls_writes_what_it_finds_while_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path / "run", 3)
    given: list[Any] = []
    monkeypatch.setattr(watchdog, "after_report", given.append)
    with diagnosed(run, Config()):
        [stalled] = given
        stalled("no step for long")
        found = json.loads((run / "diagnosis.json").read_text())
        assert found["state"] == "running"
        assert found["end"] is None
        assert (run / "diagnosis.txt").exists()
    assert given == [stalled, None]


@pytest.mark.parametrize("json_lines", [False, True])
def test_the_last_words_of_a_run_are_classified_in_both_formats(
    tmp_path: Path, json_lines: bool
) -> None:
    run = make_run(tmp_path / "run", 3)
    now = time.time()
    call = {"service": "reward-server", "problem": "refused"}
    waited = told("waited 20 s so far", "waiting", seconds="20", **call)
    gave_up = Unreachable("reward-server did not answer", remedy="look at its log", about=call)
    log(
        run,
        "ppo-trainer-rank0",
        (now - 500, "CRITICAL", "end", ConfigError("of an earlier attempt", field="x")),
        started(run, now - 100),
        (now - 40, "WARNING", "common.clients.base", waited),
        (now - 30, "CRITICAL", "end", gave_up),
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
    assert facts.end is not None
    assert facts.end.text == f"error: {gave_up}"
    assert finding.name == catalogue.REWARD_DIES
    assert finding.since == pytest.approx(now - 60, abs=0.1)  # when the wait began
    assert "reward-server: error: no memory" in finding.evidence


CALL = {"service": "reward-server", "problem": "refused"}
SQLITE = "the cursor of the prompts cannot be used: database disk image is malformed"
FULL = StorageFailed("words", code="disk_full", field="trainer.run_dir")


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (ConfigError(SQLITE, field="state_dir", remedy="remove the file"), "remove the file"),
        (ConfigError("words: file is not a database", field="state_dir", remedy="restore it"), "restore it"),
        (ConfigError("words", code="checkpoint_changed", field="trainer.run_dir", remedy="remove it"), "remove it"),
        (ServiceError("words", code="equal_rewards", remedy="raise it"), "raise it"),
        (ServiceError("words", code="out_of_memory", remedy="lower it"), "lower it"),
        (FULL, catalogue.DISK_OF_RUN.remedy),
        (Unreachable("words", remedy="look at the log", about=CALL), catalogue.REWARD_DIES.remedy),
    ],
)  # fmt: skip
def test_the_remedy_is_that_of_the_error_which_names_its_file(
    tmp_path: Path, error: ServiceError, remedy: str
) -> None:
    run = make_run(tmp_path / "run", 3)
    now = time.time()
    log(run, "ppo-trainer-rank0", started(run, now - 100), (now - 2, "CRITICAL", "end", error))
    assert find(read_facts(run))[0].remedy == remedy
    if error.field != "state_dir":
        return
    # The same words of the service itself, which failed for good: the group ended its trainer.
    log(run, "data-server-0", (now - 1, "CRITICAL", "end", error))
    interrupted = told("words", "interrupted")
    log(run, "ppo-trainer-rank0", (now, "CRITICAL", "end", interrupted))
    assert find(read_facts(run))[0].remedy == remedy


def dropped(reason: str, cause: str = "") -> ServiceError:
    about = {"reason": reason, "cause": cause} if cause else {"reason": reason}
    return ServiceError("words", code="groups_dropped", about=about)


REWORDED: list[tuple[ServiceError, str]] = [
    (Unauthorized("words"), catalogue.WRONG_TOKEN),
    (FULL, catalogue.DISK_OF_RUN),
    (StorageFailed("words", code="disk_full", field="state_dir"), catalogue.DISK_OF_SERVICE),
    (ServiceError("words", code="disk_full", about={"service": "replay-buffer"}), catalogue.DISK_OF_SERVICE),
    (dropped("reward"), catalogue.NOT_GRADED),
    (dropped("generation"), catalogue.NOT_GENERATED),
    (dropped("teacher", "teacher_failed"), catalogue.NOT_GENERATED),
    (dropped("reward", "unauthorized"), catalogue.WRONG_TOKEN),
    (ServiceError("words", code="not_graded"), catalogue.NOT_GRADED),
    (ServiceError("words", code="equal_rewards"), catalogue.EQUAL_REWARDS),
    (ConfigError("words", code="checkpoint_changed"), catalogue.CHECKPOINT_DAMAGED),
    (ConfigError("words", code="damaged"), catalogue.SQLITE_DAMAGED),
    (ConfigError("words", code="run_in_use"), catalogue.SECOND_RUN),
    (ConfigError("words", code="unfit_model"), catalogue.ENGINE_CANNOT),
    (ServiceError("words", code="nodes_behind"), catalogue.OLD_WEIGHTS),
    (ServiceError("words: [Errno 28] No space left on device", code="nodes_behind"), catalogue.DISK_OF_NODE),
    (ServiceError("words", code="engine_failed"), catalogue.ENGINE_DIES_AGAIN),
    (ServiceLost("words", about={"cause": "engine_failed"}), catalogue.ENGINE_DIES_AGAIN),
    (ServiceLost("words", about={"service": "rollout-server"}), catalogue.ENGINE_OF_PROCESS),
    (ServiceLost("words", about={"service": "reward-server"}), catalogue.CANNOT_START),
    (Unreachable("words", about={"service": "data-server", "problem": "unknown_name"}), catalogue.UNKNOWN_NAME),
    (Unreachable("words", about={"service": "data-server", "problem": "refused"}), catalogue.DATA_DIES),
    (Unreachable("words", about={"service": "rollout-server-1", "problem": "disk_full"}), catalogue.DISK_OF_NODE),
    (ServiceError("words", code="out_of_memory"), catalogue.RANK_MEMORY),
    (ServiceError("words", code="not_finite"), catalogue.NOT_FINITE),
    (ServiceError("words", code="no_batch"), catalogue.NO_BATCH),
    (ServiceError("words", code="stuck"), catalogue.NO_BATCH),
    (ServiceError("words", remedy="do this"), catalogue.ENDED),
]  # fmt: skip


@pytest.mark.parametrize("json_lines", [False, True])
@pytest.mark.parametrize(("error", "name"), REWORDED, ids=lambda each: str(each))
def test_an_error_is_known_by_its_code_whatever_its_words(
    tmp_path: Path, error: ServiceError, name: str, json_lines: bool
) -> None:
    run = make_run(tmp_path / "run", 3)
    now = time.time()
    end = (now - 1, "CRITICAL", "end", error)
    log(run, "ppo-trainer-rank0", started(run, now - 100), end, json_lines=json_lines)
    finding = find(read_facts(run))[0]
    assert finding.name == name
    if name == catalogue.ENDED:
        assert finding.remedy == "do this"


def test_a_task_that_failed_for_good_is_the_cause_of_an_interrupted_run(tmp_path: Path) -> None:
    """The local runner then ends the trainer with SIGTERM."""
    run = make_run(tmp_path / "run", 3)
    now = time.time()
    log(
        run,
        "ppo-trainer-rank0",
        started(run, now - 100),
        (now - 1, "CRITICAL", "end", told("words", "interrupted")),
    )
    logs = run / "logs"
    logs.mkdir()
    crashed = ServiceError("engine crashed 5 times in a row", code="engine_failed")
    log(run, "rollout-server-0", (now - 2, "CRITICAL", "end", crashed))
    # What it printed says the same, without the code.
    (logs / "rollout-server-0.log").write_text(f"error: {crashed}\n")
    facts = read_facts(run)
    found = [finding.name for finding in find(facts)]
    assert found == [catalogue.ENGINE_DIES_AGAIN, catalogue.INTERRUPTED]


def test_a_task_that_kept_the_run_from_beginning_is_named(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "logs").mkdir(parents=True)
    wrong = "error: this number is too small · field: reward.workers · value: 0 · remedy: give a number above 0"
    (run / "logs" / "reward-server-0.log").write_text(wrong + "\n")
    (finding,) = find(read_facts(run))
    assert (finding.name, finding.remedy) == (catalogue.WRONG_SETTING, "give a number above 0")
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
        b'\xff\xfe\n{"time"\n{"time": "2026-01-01T00:00:00"}\n2026-99-99 00:00:00,000 INFO x: y\n'
    )
    assert read_facts(run).step == 3


def test_the_addresses_are_read_as_they_were_written(tmp_path: Path) -> None:
    hosts = {
        "ppo-trainer-0.group": LocalHost("127.1.2.3", 7),
        "data-server-0.group": LocalHost("127.1.2.4"),
    }
    topology = Topology("group", node_ips=("127.1.2.3",), local_hosts=hosts)
    began = time.time()
    write_topology(tmp_path, topology, world_size=2)
    started_at = read_facts(tmp_path).started
    assert started_at is not None
    assert began <= started_at <= time.time()
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


def test_the_logs_are_those_of_the_newest_group(tmp_path: Path) -> None:
    names = ["logs", "logs/a", "logs/b", "elsewhere"]
    for name in (*names, "logs/none"):
        (tmp_path / name).mkdir()
    for name in names:
        (tmp_path / name / "ppo-trainer-0.log").write_text("")
    for number, name in enumerate(names):
        os.utime(tmp_path / name, (0, 10 - number))
    of_services = [tmp_path / "services" / "logs", tmp_path / "state" / "logs"]
    settings = {"state_dir": str(tmp_path / "services")}
    os.utime(tmp_path / "logs" / "a", (0, 50))
    assert log_folders(tmp_path, settings) == [*of_services, tmp_path / "logs" / "a"]
    os.utime(tmp_path / "logs", (0, 60))
    assert log_folders(tmp_path, settings) == [*of_services, tmp_path / "logs"]
    given = log_folders(tmp_path, settings, tmp_path / "elsewhere")
    assert given == [*of_services, tmp_path / "elsewhere"]
    assert log_folders(tmp_path / "new", {}) == [tmp_path / "new" / "state" / "logs"] * 2
    assert token_file(given) is None
    for folder in (*of_services[1:], tmp_path / "elsewhere"):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "api_token").write_text("secret")
        assert token_file(given) == folder / "api_token"


def test_of_a_long_log_the_whole_lines_at_its_end_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [f"fault {number}" for number in range(20)]
    now = time.time()
    log(tmp_path, "data-server", *[(now, "ERROR", "services.data", each) for each in texts])
    path = tmp_path / "state" / "logs" / "data-server.log"
    size = len(path.read_bytes()) // 20
    for count in (1, 2, 5):
        monkeypatch.setattr(logs, "_READ_BYTES", (count + 1) * size - 3)
        assert [line.text for line in read_log(path, 0.0)] == texts[-count:]


def test_an_error_leaves_the_block_with_the_line_that_names_the_file(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 3)
    write(run / "attempts.jsonl", [{"time": time.time(), "run_id": "group-1", "step": 0}])
    with RunLock(run, "group-1"):
        assert read_facts(run).lives
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

    # A process that does not have the run diagnoses nothing.
    with pytest.raises(ServiceError) as raised, diagnosed(tmp_path / "none", Config()):
        raise ServiceError("something")
    assert not hasattr(raised.value, "__notes__")


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
    full = StorageFailed("weights 4 cannot be written", code="disk_full", field="trainer.run_dir")
    said = diagnose(tmp_path, Config(), error=full)
    assert said.startswith(f"diagnosis: {catalogue.DISK_OF_RUN}: weights 4 cannot be written")
    assert "diagnosis.txt cannot be written" in said
