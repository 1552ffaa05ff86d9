"""The tables of TRL's arguments in docs/how-to/from-trl.md, as the code has them."""

from collections.abc import Mapping

from trainer.api.trl import Argument, Effect


def table(arguments: Mapping[str, Argument]) -> str:
    """Returns the arguments that have a field or setting, then the others by their reason."""
    rows = ["| TRL | here | remark |", "|---|---|---|"]
    reasons: dict[tuple[str, str], list[str]] = {}
    for name, argument in sorted(arguments.items()):
        if argument.effect is Effect.USED:
            rows.append(f"| `{name}` | `{argument.ours}` | {argument.remark} |")
        else:
            key = (argument.effect.value, argument.remark)
            reasons.setdefault(key, []).append(f"`{name}`")
    if len(rows) == 2:
        rows = []
    for kind in ("no effect, with a warning", "no effect", "refused"):
        of_kind = {reason: names for (its, reason), names in reasons.items() if its == kind}
        if of_kind:
            rows += ["", f"| {kind} | why |", "|---|---|"]
            rows += [f"| {', '.join(names)} | {reason} |" for reason, names in of_kind.items()]
    return "\n".join(rows).strip()
