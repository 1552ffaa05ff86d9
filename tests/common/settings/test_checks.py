"""The rows of settings that contradict one another are whole."""

from common.settings import checks
from common.settings.config import from_mapping, names


def test_every_conflict_is_about_a_setting() -> None:
    """A reason marks its settings, of which the first is the field of the error."""
    config = from_mapping({"sampling.top_p": 0.9})
    known = names()
    for rows in (
        checks._conflicts,
        checks._engine_args,
        checks._several_nodes,
        checks._gdpo,
        checks._sampling,
        checks._colocate,
        checks._environment,
        checks._reproducible,
        checks._lora,
    ):
        for _, reason, remedy in rows(config):
            marked = checks._NAME.findall(f"{reason} {remedy}")
            assert checks._NAME.search(reason), reason
            assert {name for name, _ in marked} <= known.keys(), reason
            assert "{" not in checks._NAME.sub("", reason + remedy), reason
