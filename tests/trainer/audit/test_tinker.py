"""What a Tinker server has computed is computed again, and whatever else its record says is named."""

import json
import random
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec
import pytest
import torch

from common.settings.config import Config
from learning.ranks import Ranks
from tests.support.tinker.client import serving
from tests.support.tinker.stand_ins import CountingLearner, EchoEngine
from trainer.audit import tinker
from trainer.audit.__main__ import main
from trainer.observe.audit import Setup
from trainer.tinker.records import Checkpoint
from trainer.tinker.run_files import RUN
from trainer.tinker.settings import RECORDED
from trainer.tinker.store import TinkerStore


class Learner(CountingLearner):
    """Also lists its files, and is led by one rank."""

    def save(self, run: str, folder: Path) -> None:
        super().save(run, folder)
        (folder / RUN).write_bytes(self.runs[run].tobytes())

    def close(self) -> None:
        self.calls.append(("close", ""))


async def record(directory: Path, draw: random.Random, **options: int) -> dict[str, list[int]]:
    """Makes runs of random operations; returns how many each has that change it, and how many
    weights it has saved.
    """
    counts = {}
    async with serving(directory, Learner(), EchoEngine(), **options) as client:
        for number in range(3):
            run = await client.run(number, seed=number)
            counts[run] = [1, 0]
            kinds = ["save_weights_for_sampler", "pass", "step", "save_weights", "pass"]
            for seq, kind in enumerate(kinds + draw.choices(kinds, k=4), start=1):
                if kind == "pass":
                    request = await client.passes(run, seq, token=draw.randint(1, 9))
                elif kind == "step":
                    request = await client.step(run, seq)
                else:
                    made = await client.post(kind, model_id=run, seq_id=seq, path=f"at-{seq}")
                    request = made["request_id"]
                assert (await client.result(request)).status_code == 200
                counts[run][kind.startswith("save")] += 1
    setup = msgspec.structs.replace(Setup.here(Ranks()), device="another device", threads=2)
    content = {
        "config": Config().model_dump(mode="json"),
        "setup": msgspec.to_builtins(setup),
    }
    (directory / RECORDED).write_text(json.dumps(content))
    return counts


def change_answer(directory: Path, run: str) -> None:
    """Changes the answer to a step, with its checksum."""
    store = TinkerStore(directory / "tinker.sqlite")
    with store.transaction() as db:
        result = store.result(run, 3)
        assert result is not None
        changed = result.content.replace(b"}}", b"1}}")
        assert changed != result.content
        db.execute("DELETE FROM results WHERE line = ? AND seq = 3", (run,))
        store.finish(run, 3, replace(result, content=changed), repeatable=True)
    store.close()


def change_adapter(directory: Path, run: str) -> None:
    """Changes the checksum of a published adapter."""
    store = TinkerStore(directory / "tinker.sqlite")
    records = [each for each in store.records() if isinstance(each, Checkpoint)]
    found = next(each for each in records if each.run == run and each.kind != "weights")
    with store.transaction():
        store.put(replace(found, checksum="0"))
    store.close()


def change_weights(directory: Path, run: str) -> None:
    """Changes weights that were saved after everything before them was compared."""
    (file,) = (directory / "runs" / run.replace(":", "-")).glob(f"weights-4/{RUN}")
    file.write_bytes(b"other weights")


async def test_answers_and_saved_weights_come_out_again(
    tmp_path: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    request.addfinalizer(partial(torch.set_num_threads, torch.get_num_threads()))
    counts = await record(tmp_path / "server", random.Random(0))
    # Where only one run fits into memory, the others begin again with a snapshot.
    await record(tmp_path / "small", random.Random(1), resident=1)
    learners: list[Learner] = []

    def made(config: Config, ranks: Ranks) -> Learner:
        learners.append(Learner())
        return learners[-1]

    monkeypatch.setattr(tinker, "RunLearner", made)

    def audited(directory: Path) -> tuple[object, dict[str, str]]:
        with pytest.raises(SystemExit) as ended:
            main([str(directory)])
        assert learners[-1].runs == {}, "no run is left in memory"
        assert learners[-1].calls[-1] == ("close", "")
        told = dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines())
        assert "another device" in told.pop("numbers may differ"), "the threads are the same"
        return ended.value.code, told

    equal = {
        run: f"{operations} operations and {saved} saved weights are the same"
        for run, (operations, saved) in counts.items()
    }
    assert audited(tmp_path / "server") == (0, equal)
    assert audited(tmp_path / "small")[0] == 0
    for number, change in enumerate((change_answer, change_adapter, change_weights)):
        copy = tmp_path / str(number)
        shutil.copytree(tmp_path / "server", copy)
        run = list(counts)[number]
        change(copy, run)
        status, told = audited(copy)
        assert status == 1
        assert {each for each, text in told.items() if text.startswith("differs: ")} == {run}
        assert told | {run: ""} == equal | {run: ""}
