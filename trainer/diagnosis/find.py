"""What is wrong, the most important first. Pure."""

from trainer.diagnosis.facts import LEVELS, Facts, Finding
from trainer.diagnosis.learning import from_numbers
from trainer.diagnosis.messages import from_messages
from trainer.diagnosis.processes import from_processes, no_step
from trainer.observe import catalogue

_EFFECTS = (
    "same_answers",
    "format",
    "truncated",
    "short_answers",
    "entropy",
    "zero_variance_groups",
    catalogue.EQUAL_REWARDS,
    catalogue.NO_BATCH,
)
"""What other findings lead to: a broken policy, for example, to cut answers, and these to equal
rewards. Each comes after those that may be its cause."""


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
    is_explained = any(finding.level in ("stopped", "stalled") for finding in found.values())
    if not is_explained and catalogue.ENGINES_BUSY not in found:
        found |= {finding.name: finding for finding in no_step(facts)}

    def rank(finding: Finding) -> tuple[int, int]:
        effect = 1 + _EFFECTS.index(finding.name) if finding.name in _EFFECTS else 0
        return LEVELS.index(finding.level), effect

    return sorted(found.values(), key=rank)
