"""What is wrong, the most important first. Pure."""

from trainer.diagnosis import names
from trainer.diagnosis.facts import LEVELS, Facts, Finding
from trainer.diagnosis.learning import from_numbers
from trainer.diagnosis.messages import from_messages
from trainer.diagnosis.processes import from_processes


def find(facts: Facts) -> list[Finding]:
    """Returns the findings: what ended the run, then what keeps it from going on, then what harms
    it, then what makes it slow; among these, causes before their effects.
    """
    found: dict[str, Finding] = {}
    for finding in [*from_processes(facts), *from_messages(facts), *from_numbers(facts)]:
        known = found.setdefault(finding.name, finding)
        if known is not finding:
            known.evidence += [each for each in finding.evidence if each not in known.evidence][:2]
            times = [each for each in (known.since, finding.since) if each is not None]
            known.since = min(times, default=None)
    return sorted(found.values(), key=_rank)


def _rank(finding: Finding) -> tuple[int, bool]:
    # That no batch comes is an effect of everything that keeps the run from going on.
    return LEVELS.index(finding.level), finding.name == names.NO_BATCH
