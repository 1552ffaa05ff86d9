"""What `--help` and `--help-all` print."""

from argparse import ArgumentParser
from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from common.settings.section import IN_HELP


def print_help(
    prog: str | None,
    about: str | None,
    known: Mapping[str, FieldInfo],
    *,
    everything: bool,
    defaults: Mapping[str, Any],
    meanings: Mapping[str, str],
) -> None:
    """Prints the settings `known`: those of type `InHelp`, or `everything`.

    `defaults` and `meanings` are those that differ from the declared ones.
    """
    parser = ArgumentParser(
        prog=prog,
        usage="%(prog)s [--config FILE] [--section.name VALUE ...]",
        description=about,
    )
    parser.add_argument("--help-all", action="help", help="show every setting and exit")
    shown = {
        name: field for name, field in known.items() if everything or IN_HELP in field.metadata
    }
    groups = {"": parser.add_argument_group("the whole run")}
    for name, field in shown.items():
        section = name.rpartition(".")[0]
        if section not in groups:
            groups[section] = parser.add_argument_group(section)
        default = defaults.get(name, field.default)
        text = f"{meanings.get(name, field.description)} (default: {default})"
        groups[section].add_argument(
            f"--{name}", metavar=_kind(field.annotation), help=text.replace("%", "%%")
        )
    if len(shown) < len(known):
        parser.epilog = f"{len(known) - len(shown)} more settings: --help-all"
    parser.print_help()


def _kind(annotation: Any) -> str:
    """Returns the type of a setting in a word, or its choices."""
    if get_origin(annotation) is Literal:
        return "{" + ",".join(map(str, get_args(annotation))) + "}"
    if get_origin(annotation) is Annotated:
        return _kind(get_args(annotation)[0])
    parts = [part for part in get_args(annotation) if part is not type(None)]
    kind = get_origin(annotation) or annotation
    if kind in (list, dict, tuple) or not parts:
        return str(kind.__name__)
    return ",".join(map(_kind, parts))
