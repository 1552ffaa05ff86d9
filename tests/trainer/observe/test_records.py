"""What a run records of its steps and refuses to read, whole and by name."""

import io
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from zipfile import ZipFile

import numpy as np
import pytest
import torch
from rich.console import Console

from common.errors import ConfigError, ServiceError
from common.process.metrics import Metrics
from common.process.storage import StorageFailed
from common.settings.config import Config, load
from common.weights.checksums import Hasher
from common.wire.schemas import Group, Prompt
from learning.digest import digest
from learning.ranks import Ranks
from tests.support.batches.groups import batch_of, make_group
from tests.support.errors import raises
from tests.support.runs.recorded_groups import group as recorded_group
from tests.support.runs.recorded_groups import record, trained
from trainer.algorithms.batch import Batch, TrainingGroup
from trainer.dashboard.runs import RunReader
from trainer.evaluation.verdicts import Verdicts
from trainer.observe import audit as audit_module
from trainer.observe import jsonl, run_dir
from trainer.observe.audit import AuditRecord, Setup, audited_step
from trainer.observe.group_files import read_group, read_trained
from trainer.observe.jsonl import JsonlReader, last_steps, parsed
from trainer.observe.problems import Problems, keep_problems, kept_problems
from trainer.observe.prometheus import TrainerMetrics
from trainer.observe.regrades import NewGrade, RegradedGroup, write_regrades
from trainer.observe.run_dir import (
    Recorder,
    append_line,
    check_run,
    damaged,
    no_run,
    read_lines,
    step_line,
)
from trainer.observe.run_log import RunLog
from trainer.policy.policy import PolicyUpdate
from trainer.policy.update_metrics import Sums
from trainer.rollouts.drops import Drops
from trainer.timing import STAGES, WAITING, StageClock
from trainer.what_if.run_facts import RunFacts

RUN = "trainer.run_dir"


def test_what_cannot_be_read_is_an_error_about_its_file(tmp_path: Path) -> None:
    zipped = tmp_path / "groups" / "step_000001.zip"
    record(tmp_path, [[trained(recorded_group(1, [1.0, 0.0]))]])
    with ZipFile(zipped, "w") as file:
        file.writestr("00000.msgpack", b"\x81")
    settings = tmp_path / "config.json"
    problems = tmp_path / "given_problems.json"
    audited = tmp_path / "audit.jsonl"
    lines = tmp_path / "lines.jsonl"
    for path in (settings, problems, audited, lines):
        path.write_text('"\n')
    reads: list[tuple[Callable[[], object], str, object]] = [
        (lambda: read_trained(tmp_path, 1), RUN, zipped),
        (lambda: read_group(tmp_path, 1, 0), RUN, zipped),
        (lambda: run_dir.read_settings(tmp_path), RUN, settings),
        (lambda: kept_problems(tmp_path), RUN, problems),
        (lambda: read_lines(lines), RUN, lines),
        (lambda: AuditRecord(tmp_path), RUN, audited),
        (lambda: AuditRecord(tmp_path / "x"), "trainer.audit", tmp_path / "x" / "audit.jsonl"),
        (lambda: check_run(tmp_path), "RUN_DIR", tmp_path),
        (lambda: check_run(tmp_path / "x"), "RUN_DIR", tmp_path / "x"),
    ]
    for read, field, value in reads:
        with raises(ServiceError, field=field, value=str(value)) as refused:
            read()
        assert refused.value.remedy
    with raises(ServiceError, code="damaged", status=500):
        read_group(tmp_path, 1, 0)
    with raises(ConfigError, remedy="remove that line, or move the file away"):
        read_lines(lines)
    for path in (problems, zipped):
        path.unlink()
        path.mkdir()
    with raises(ConfigError, field=RUN, value=str(problems)):
        kept_problems(tmp_path)
    (tmp_path / "attempts.jsonl").touch()
    for written, message in (("", "no step is recorded here yet"), ("{}\n", None)):
        (tmp_path / "metrics.jsonl").write_text(written)
        if message is None:
            check_run(tmp_path)
            continue
        with raises(ConfigError, field="RUN_DIR", value=str(tmp_path), message=message):
            check_run(tmp_path)
    assert no_run(tmp_path, " at all").message == "this is not a run directory at all"
    assert no_run(tmp_path / "x").message == "there is no such run directory"
    assert damaged("m", lines).remedy == "restore that file from a copy"
    assert damaged("m", lines, "do this").remedy == "do this"


@pytest.mark.parametrize("line", ["[1]", "5", '{"kind": "step"}', '{"step": "x"}', '{"step": 1.5}'])
def test_a_line_that_names_no_step_is_damaged_for_every_reader(tmp_path: Path, line: str) -> None:
    good = '{"step": 7, "kind": "step", "reward": 1.0}\n'
    for name in ("metrics.jsonl", "audit.jsonl"):
        (tmp_path / name).write_text(f"{good}{line}\n")
        path = tmp_path / name
        with raises(ConfigError, field=RUN, value=str(path)):
            read_lines(path)
        assert [each["step"] for each in last_steps(path, 9)] == [7]
    with raises(ConfigError, field=RUN):
        run_dir.audited_steps(tmp_path)
    assert list(RunFacts.read(tmp_path).steps) == [7]
    assert any(
        "line 2 of metrics.jsonl is damaged" in each for each in RunReader(tmp_path).problems
    )


def test_what_cannot_be_written_is_an_error_about_its_file(tmp_path: Path) -> None:
    item = trained(recorded_group(1, [1.0]))
    grade = RegradedGroup(1, "a", 1, {0: NewGrade(1.0, True, "1")})
    problems = Problems([Prompt(id="a", prompt="p", ground_truth="1")], [])
    file = tmp_path / "file"
    file.touch()
    writes: list[tuple[Callable[[], object], Path]] = [
        (lambda: append_line(file / "x.jsonl", {}), file / "x.jsonl"),
        (lambda: keep_problems(file, problems), file / "given_problems.json"),
        (lambda: write_regrades(file, [grade]), file / "regrade.jsonl"),
        (lambda: Recorder(file, Config(), Console(quiet=True)), file / "config.json"),
    ]
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "groups").touch()
    zipped = tmp_path / "run" / "groups" / "step_000001.zip"
    writes.append((lambda: record(tmp_path / "run", [[item]]), zipped))
    for write, path in writes:
        with raises(StorageFailed, field=RUN, value=str(path)) as failed:
            write()
        assert failed.value.message.startswith(f"{path.name} cannot be written")
        assert "start again with the same run directory" in (failed.value.remedy or "")


@pytest.mark.parametrize("count", [0, 2, 3, 4, 9])
def test_the_first_damaged_lines_are_named_and_the_others_counted(
    tmp_path: Path, count: int
) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text("{}\n" + "[]\n" * count)
    reader = JsonlReader(path, parsed)
    assert len(list(reader.read())) == 1
    named = [
        f"line {number} of x.jsonl is damaged and left out: it is not an object"
        for number in range(2, count + 2)
    ]
    more = [f"{count - 3} more lines of x.jsonl are damaged"] if count > 3 else []
    assert reader.problems() == [*named[:3], *more]
    assert not reader.unreadable
    path.unlink()
    path.mkdir()
    assert not reader.replaced()
    assert list(reader.read()) == []
    assert reader.problems()[0] == "x.jsonl cannot be read: Is a directory"


@pytest.mark.parametrize("tail", range(1, 60, 7))
def test_the_last_steps_are_those_at_the_end_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tail: int
) -> None:
    path = tmp_path / "x.jsonl"
    lines = [f'{{"step": {step}}}\n' for step in range(10, 20)]
    path.write_text("".join(lines) + '{"other": 1}\n{"step": "x"}\n{"step": 20')
    monkeypatch.setattr(jsonl, "_TAIL_BYTES", tail)
    content = path.read_text()
    whole = content[max(0, len(content) - tail) :]
    steps = [step for step in range(10, 20) if f'{{"step": {step}}}\n' in whole]
    assert [line["step"] for line in last_steps(path, 3)] == steps[-3:]
    assert last_steps(tmp_path / "none", 3) == []


def test_a_record_of_an_audit_has_the_checksums_of_every_column(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = load([], {})
    ranks = Ranks(device_kind="cpu")
    policy: Any = SimpleNamespace(
        config=config, ranks=ranks, step=3, total_steps=None, digest=lambda: "w"
    )
    rng = np.random.default_rng(0)
    batch = batch_of([make_group(rng, [1.0, 0.0], position=5)], config)
    columns = [
        [rng.normal(size=len(each.token_ids)).astype(np.float32) for each in group.completions]
        for group in [batch.groups[0].group] * 2
    ]
    batch.ref_logprobs = columns[0]
    batch.values = columns[1]
    model = torch.nn.Linear(2, 3)
    other = torch.nn.Linear(3, 1)
    update: Any = SimpleNamespace(norms=[0.5], gradients=["g"], digest_seconds=1.0)

    def critic(*models: torch.nn.Module) -> Any:
        return SimpleNamespace(resident=lambda: (list(models), []))

    of_ranks: list[Ranks] = []
    whole = Batch.gathered

    def gathered(self: Batch, column: Any, ranks: Ranks) -> Any:
        of_ranks.append(ranks)
        return whole(self, column, ranks)

    monkeypatch.setattr(Batch, "gathered", gathered)
    line = audited_step(policy, critic(model), batch, update, run_id="r")
    assert of_ranks == [ranks, ranks], "each rank has its rows alone"
    sums = [Hasher(np.concatenate(column).data).hexdigest() for column in columns]
    assert [line.reference_logprobs, line.values] == sums
    assert line.critic == digest(list(model.named_parameters()), ranks)
    both = audited_step(policy, critic(model, other), batch, update)
    tensors = [*model.named_parameters(), *other.named_parameters()]
    assert (both.critic, both.run_id) == (digest(tensors, ranks), "")
    assert (line.run_id, line.step, line.total_steps, line.weights) == ("r", 3, None, "w")
    assert (line.norms, line.gradients, line.seconds) == ([0.5], ["g"], 0.0)
    batch.values = []
    empty = audited_step(policy, critic(), batch, update)
    assert empty.critic is None
    nothing = Hasher(np.zeros(0, np.float32).data).hexdigest()
    assert audit_module._column_digest([]) == nothing

    times = iter([10.0, 12.25])
    monkeypatch.setattr(audit_module, "time", SimpleNamespace(perf_counter=lambda: next(times)))
    written: list[Any] = []
    audit = audit_module.Audit(None, "r")
    monkeypatch.setattr(audit, "_write", written.append)
    audit.step(policy, critic(), batch, update)
    assert (written[0].seconds, written[0].run_id) == (3.25, "r")

    setup = Setup.here(ranks)
    assert (setup.device, setup.world_size, setup.threads) == ("cpu", 1, torch.get_num_threads())
    assert setup.instructions.endswith(f" {torch.backends.cpu.get_cpu_capability()}")
    assert audit_module._version("no-such-package") == "none"


@pytest.mark.parametrize("number", [0, 3])
def test_the_setup_on_gpus_has_the_name_of_this_ranks_one(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"name of {device}")
    ranks: Any = SimpleNamespace(
        on_gpu=True, device=torch.device("cuda", number), world_size=2 + number
    )
    setup = Setup.here(ranks)
    assert (setup.device, setup.world_size) == (f"name of cuda:{number}", 2 + number)


def log_of(directory: Path, recorder: Recorder, config: Config, **options: Any) -> RunLog:
    return RunLog(
        config,
        recorder,
        TrainerMetrics(Metrics("trainer")),
        clock=StageClock(),
        step=0,
        collecting_cpu=lambda: 0.0,
        verdicts=options.pop("verdicts", Verdicts(True)),
        drops=Drops(),
        **options,
    )


def step_of(
    groups: list[Group], config: Config, step: int, **measured: Any
) -> tuple[Batch, PolicyUpdate]:
    batch = Batch.of([TrainingGroup(group) for group in groups], config, step - 1)
    answers = [answer for group in groups for answer in group.completions]
    batch.advantages = [np.zeros(len(answer.token_ids), np.float32) for answer in answers]
    metrics = Sums().metrics([0.1], 1e-6, 0.0, skipped=0, stopped=False)
    logprobs = [each.logprobs for each in answers]
    return batch, PolicyUpdate(replace(metrics, **measured), [*logprobs])


@pytest.mark.parametrize("age", [0, 1])
@pytest.mark.parametrize("before", [0.01, 0.3])
def test_a_difference_is_compared_with_the_last_step_without_one(
    tmp_path: Path, age: int, before: float
) -> None:
    """Only completions of the newest weights can agree with the trainer on them."""
    config = Config()
    rng = np.random.default_rng(0)
    with Recorder(tmp_path, config, Console(quiet=True)) as recorder:
        log = log_of(tmp_path, recorder, config)
        with log.training(0, 9):
            for step, delta in ((4, before), (5, 0.25)):
                groups = [make_group(rng, [1.0, 0.0], step - 1 - age)]
                made = step_of(groups, config, step, delta_logprob_current=delta)
                found = log.step(step, *made, None)
    assert ("delta_logprob" in read_lines(tmp_path / "metrics.jsonl")[0]["alarms"]) == (
        before > 0.02
    )
    text = found["alarms"]["delta_logprob"]
    assert ("until step 4 both agreed (0.01)" in text) == (before < 0.02 and age == 0)


@pytest.mark.parametrize("step", [1, 2])
@pytest.mark.parametrize("environment", ["", "calculator"])
@pytest.mark.parametrize("dropout", [(), ("lora.dropout 0.1",)])
def test_alarms_of_a_step_are_those_of_its_batch(
    tmp_path: Path, step: int, environment: str, dropout: tuple[str, ...]
) -> None:
    config = Config()
    config.model.reference = "another"
    config.environment.name = environment
    rng = np.random.default_rng(0)
    groups = [make_group(rng, [1.0] * 4, step - 1, position=n) for n in range(2)]
    for number, each in enumerate(groups):
        each.prompt = f"problem {number}"
        each.prompt_token_ids = groups[0].prompt_token_ids
        for answer in each.completions:
            answer.token_ids = each.completions[0].token_ids
            answer.logprobs = np.full(len(answer.token_ids), -30.0, np.float32)
    made = step_of(groups, config, step, kl_reference=0.7, delta_logprob_current=0.5)
    with Recorder(tmp_path, config, Console(quiet=True)) as recorder:
        log = log_of(tmp_path, recorder, config, dropout=dropout)
        with log.training(0, 9):
            found = log.step(step, *made, None)["alarms"]
    expected = {"copied_answers", "delta_logprob"}
    expected |= {"effective_sample_size"} & found.keys()
    expected |= {"reference"} if step == 1 else set()
    expected |= set() if environment else {"same_prompts"}
    assert found.keys() == expected
    assert ("lora.dropout 0.1" in found["delta_logprob"]) == bool(dropout)


def test_without_verdicts_nothing_is_right_or_wrong(tmp_path: Path) -> None:
    config = Config()
    groups = [make_group(np.random.default_rng(0), [1.0, 1.0], 0)]
    made = step_of(groups, config, 1)
    for is_sure, has_verdict, expected in ((False, True, None), (True, True, 1), (True, False, 1)):
        for answer in groups[0].completions:
            answer.verified = has_verdict
            answer.correct = True
        run = tmp_path / f"{is_sure}{has_verdict}"
        with Recorder(run, config, Console(quiet=True)) as recorder:
            log = log_of(run, recorder, config, verdicts=Verdicts(is_sure))
            with log.training(0, 9):
                found = log.step(1, *made, None)
        counts = (found["solved_groups"], found["failed_groups"])
        assert counts == (expected, None if expected is None else 0)
        assert found["accuracy"] == (1.0 if expected and has_verdict else None)
        assert found["zero_variance_groups"] == 1
        assert found["verified"] == is_sure


def test_a_line_of_a_step_has_its_counts_unless_they_are_zero() -> None:
    seconds = dict.fromkeys((*STAGES, WAITING), 0.0)
    step: dict[str, Any] = {
        **{"step": 3, "reward": 0.25, "accuracy": None, "completion_tokens": 7.6},
        **{"truncated": 0.0049, "staleness": 0.0, "refused_calls": 0},
        "lost_episodes": {},
        "dropped": {"stale": 0},
        "seconds": {**seconds, "update": 9.994, "publish": 0.001, "generation": 99.94},
    }
    begin = "step    3/40  reward 0.250  tokens 8  110 s (gen 99.9, train 9.99)"
    assert step_line(step, 40) == begin
    rounds = {"update": 5.0, "publish": 5.0, "generation": 100.0}
    shown = step_line({**step, "seconds": {**seconds, **rounds}}, 40)
    assert shown.endswith("110 s (gen 100, train 10.0)")
    full: dict[str, Any] = {
        "truncated": 0.005,
        "staleness": 0.04,
        "refused_calls": 1,
        "accuracy": 0.5,
    }
    full |= {"lost_episodes": {"a": 1, "b": 2}, "dropped": {"stale": 4}}
    shown = step_line({**step, **full}, 40)
    assert shown.endswith("train 9.99)  cut 0%  stale 0.0  lost 3  refused 1  dropped 4")
    assert "reward 0.250  acc 0.500  tokens" in shown


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_console_writes_to_standard_output_as_it_is_now(
    monkeypatch: pytest.MonkeyPatch, is_terminal: bool
) -> None:
    said = io.StringIO()
    monkeypatch.setattr(said, "isatty", lambda: is_terminal)
    monkeypatch.setattr(sys, "stdout", said)
    monkeypatch.setenv("COLUMNS", "70")
    console = run_dir.console()
    assert console.width == (70 if is_terminal else 120)
    run_dir.tell(console, "[b]x[/b] :fire: " + "word " * 40)
    assert said.getvalue() == "[b]x[/b] :fire: " + "word " * 40 + "\n"
    shown = run_dir.progress_bar("t", console, hidden=False)
    assert shown.disable != is_terminal
    assert run_dir.progress_bar("t", console, hidden=True).disable


def test_the_samples_of_a_run_are_its_first_groups_as_they_were(tmp_path: Path) -> None:
    config = Config()
    rng = np.random.default_rng(0)
    with Recorder(tmp_path, config, Console(quiet=True), run_id="é") as recorder:
        log = log_of(tmp_path, recorder, config)
        with log.training(0, 9):
            for step in (1, 2):
                groups = [make_group(rng, [1.0, 0.0], 0, position=step + n) for n in range(2)]
                groups[0].prompt = "é\u2028"
                log.step(step, *step_of(groups, config, step), None)
    lines = read_lines(tmp_path / "samples.jsonl")
    assert [(line["step"], line["position"], line["prompt"]) for line in lines] == [
        (1, 1, "é\u2028"),
        (2, 2, "é\u2028"),
    ]
    assert [each["reward"] for each in lines[0]["completions"]] == [1.0, 0.0]
    for name in ("samples.jsonl", "attempts.jsonl"):
        assert "é".encode() in (tmp_path / name).read_bytes(), "for people with an editor"
    settings = json.loads((tmp_path / "config.json").read_text())
    assert settings == config.model_dump(mode="json")
