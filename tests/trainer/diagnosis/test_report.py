"""The report of random findings, and the findings of recorded runs with their time and evidence."""

import json
import random
import time

import pytest

from tests.support.paths import ROOT
from trainer.diagnosis.facts import Facts, Finding, LogLine
from trainer.diagnosis.find import find
from trainer.diagnosis.report import as_json, last_lines, lines, text

RECORDED = [
    json.loads(line)
    for line in (ROOT / "tests/golden/diagnosed_runs.jsonl").read_text().splitlines()
]


@pytest.mark.parametrize("each", RECORDED, ids=lambda each: str(each["recorded"]))
def test_every_finding_of_a_recorded_run_keeps_its_time_and_its_evidence(
    each: dict[str, object],
) -> None:
    found = find(Facts.model_validate(each["facts"]))
    said = [
        [finding.name, finding.level, finding.since, len(finding.evidence), finding.remedy != ""]
        for finding in found
    ]
    assert said == each["findings"]


def test_the_report_has_what_was_found_and_when() -> None:
    for seed in range(50):
        draw = random.Random(seed)
        now = 1.8e9 + draw.randint(0, 10**6)
        steps = [{"step": n, "time": now - 1000 + 50 * n, "total_steps": 60} for n in range(1, 9)]
        count = draw.randint(1, 3)
        findings = [
            Finding(
                name=f"Fault {n} of many",
                what=f"what {n}",
                since=draw.choice([None, now - draw.choice([3, 119, 121, 640, 5000])]),
                evidence=[f"evidence {n}.{m}" for m in range(draw.randint(0, 3))],
                remedy=f"remedy {n}",
                level="harm",
            )
            for n in range(count)
        ]
        logged = [
            LogLine(
                source=draw.choice(["ppo-trainer-rank0", "data-server"]),
                time=draw.choice([None, now - 20 + n]),
                level="ERROR",
                text=f"line {n}\n  its second\n  its third",
            )
            for n in range(draw.randint(0, 40))
        ]
        facts = Facts(directory="run", now=now, state="running", steps=steps, lines=logged)
        first, since, evidence, remedy, more = lines(facts, findings)
        main = findings[0]
        assert first == "Fault 0 of many: what 0"
        if main.since is None:
            assert since == "since    not known"
        else:
            at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(main.since))
            seconds = round(now - main.since)
            ago = f"{seconds} s" if seconds < 120 else f"{round(seconds / 60)} min"
            done = max((n for n in range(1, 9) if now - 1000 + 50 * n <= main.since), default=0)
            assert since == f"since    {at} ({ago} before this report), after step {done} of 60"
        assert evidence.split(maxsplit=1)[1] == ("; ".join(main.evidence) or "as above")
        assert remedy == "remedy   remedy 0"
        assert all(f"Fault {n} of many" in more for n in range(1, count))
        assert more.endswith("docs/how-to/operations.md#fault-0-of-many")

        whole = text(facts, findings)
        for finding in findings[1:]:
            assert f"\n{finding.name}: {finding.what}\n" in whole
        shown = last_lines(facts)
        ours = [line for line in logged if line.source == "ppo-trainer-rank0"]
        expected = [line for line in logged if line in ours[-12:] or line in logged[-12:]]
        assert [line.rpartition(" line ")[2] for line in shown] == [
            line.text.split()[1] for line in expected
        ]
        for line, of in zip(shown, expected, strict=True):
            begin = "" if of.time is None else time.strftime("%H:%M:%S ", time.localtime(of.time))
            assert line.startswith(f"{begin}{of.source} ERROR line")
            assert f"  {line}\n" in whole
        content = as_json(facts, findings)
        assert [each["name"] for each in content["findings"]] == [each.name for each in findings]
        assert content["lines"] == shown
        assert (content["step"], content["total_steps"], content["time"]) == (8, 60, now)
    nothing = Facts(directory="run", now=5.0, state="running")
    assert (nothing.silent_s, nothing.step, nothing.total_steps) == (0.0, 0, None)
