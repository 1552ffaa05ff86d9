"""What mkdocs builds beyond the pages in this folder: the generated reference, and the pages that
live elsewhere.

Every generated page is made from the code it describes, at build time, and is not committed.
"""

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from mkdocs.structure.files import File, Files
from pydantic_core import PydanticUndefined

ROOT = Path(__file__).resolve().parents[1]

COMMANDS = (
    "trainer",
    "trainer.sft",
    "trainer.tinker",
    "trainer.train_math",
    "trainer.evaluate_model",
    "trainer.export",
    "trainer.report",
    "trainer.compare",
    "trainer.audit",
    "trainer.what_if.regrade",
    "trainer.what_if.why",
    "trainer.what_if.fork",
    "trainer.dashboard",
    "trainer.diagnose",
    "trainer.tiny_model",
    "jobgroup.local",
    "jobgroup.doctor",
)
SERVICES = {
    "data": "data-server :8000",
    "reward": "reward-server :8002",
    "replay": "replay-buffer :8003",
    "environment": "environment-server :8006",
    "trainer": "ppo-trainer :8004",
    "agent": "rollout-server agent :30002",
    "engine": "embedded engine :30001",
}
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s#:]*)(#[^)\s]*)?\)")
_FENCE = re.compile(r"(^```.*?^```)", re.DOTALL | re.MULTILINE)


def on_config(config: Any) -> Any:
    """Adds every decision and every report to the navigation, and the code to the path."""
    sys.path.insert(0, str(ROOT))  # here, since mkdocs restores the path after it has loaded a hook
    docs = Path(config["docs_dir"])
    for title, folder in (("Decisions", "adr"), ("Results", "reports")):
        pages = sorted((docs / folder).rglob("*.md"), key=_index_first)
        config["nav"].append({title: [str(path.relative_to(docs)) for path in pages]})
    return config


def _index_first(path: Path) -> tuple[bool, str]:
    return path.name != "README.md", str(path)


def on_files(files: Files, config: Any) -> Files:
    """Adds the generated pages, SECURITY.md and the READMEs of the examples."""
    pages = {page: ROOT / source for source, page in _outside().items()}
    texts = {page: source.read_text(encoding="utf-8") for page, source in pages.items()}
    texts |= {
        "reference/settings.md": settings(),
        "reference/commands.md": commands(),
        "reference/http-api.md": http_api(),
        "reference/python.md": python_api(),
    }
    for page, text in texts.items():
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Links are written for the repository; here they get the address that their target has on the
    site.
    """
    where = page.file.src_uri
    sources = {name: source for source, name in _outside().items()}
    folder = (ROOT / sources[where] if where in sources else ROOT / "docs" / where).parent

    def link(match: re.Match[str]) -> str:
        image, text, target, anchor = match.groups()
        if not target:
            return match[0]
        path = os.path.relpath(folder / target, ROOT)
        site = _outside().get(path) or (
            path.removeprefix("docs/") if path.startswith("docs/") else None
        )
        if site is None:
            return text  # a file of the source: the text says which
        return f"{image}[{text}]({os.path.relpath(site, Path(where).parent)}{anchor or ''})"

    parts = _FENCE.split(markdown)
    return "".join(part if place % 2 else _LINK.sub(link, part) for place, part in enumerate(parts))


def _outside() -> dict[str, str]:
    """Markdown outside of docs/ that is part of the site: its path in the repository, and the page
    it becomes.
    """
    examples = {
        str(path.relative_to(ROOT)): f"examples/{path.parent.name}.md"
        for path in (ROOT / "examples").glob("*/README.md")
    }
    return {"SECURITY.md": "security.md", "examples/README.md": "examples/index.md", **examples}


# ---------------------------------------------------------------- settings


def settings() -> str:
    """A table of every setting by section, from its declaration."""
    from common.settings.config import Config
    from common.settings.sources import SHORT_NAMES

    short = {".".join(keys): name for name, keys in SHORT_NAMES.items()}
    lines = [
        "# Settings\n",
        "Generated from the declarations in `common/settings/`.",
        "A later source wins: defaults, the file of `--config` (or `RUN_CONFIG`), the environment",
        "(`RLHF_SECTION__FIELD` and the short names below), the command line (`--section.field`).",
        "A name that does not exist is refused, and so is a setting that the other settings make",
        "pointless.\n",
        "Short names: "
        + ", ".join(f"`{name}` for `{setting}`" for setting, name in short.items())
        + ".\n",
    ]
    own = {
        name: field
        for name, field in Config.model_fields.items()
        if not hasattr(field.annotation, "model_fields")
    }
    lines += ["## The whole run\n", *_setting_rows("", own)]
    for section, field in Config.model_fields.items():
        model = field.annotation
        if model is None or not hasattr(model, "model_fields"):
            continue
        lines += [f"\n## {section}\n", f"{_one_line(model.__doc__ or '')}\n"]
        lines += _setting_rows(f"{section}.", model.model_fields)
        if section == "reward":
            lines += _reward_entries()
    return "\n".join(lines) + "\n"


def _reward_entries() -> Iterator[str]:
    """The arguments of every entry of `reward.functions`, from their declarations."""
    from common.settings.rewards import BUILT_IN, Reward

    yield "\n### Arguments of the reward functions\n"
    yield "Every entry has these arguments; `name` alone may be written without a mapping.\n"
    yield from _setting_rows("", Reward.model_fields)
    for name, entry in BUILT_IN.items():
        own = {
            key: each for key, each in entry.model_fields.items() if key not in Reward.model_fields
        }
        if own:
            yield f"\nArguments of `{name}`:\n"
            yield from _setting_rows("", own)


def _setting_rows(prefix: str, fields: Mapping[str, Any]) -> Iterator[str]:
    yield "| setting | default | type | meaning |\n|---|---|---|---|"
    for name, field in fields.items():
        default = field.get_default(call_default_factory=True)
        empty = default is None or default == "" or default is PydanticUndefined
        shown = "" if empty else f"`{_plain(default)}`"
        bounds = [f"{sign} {limit}" for data in field.metadata for sign, limit in _bounds(data)]
        kind = ", ".join([_type(field.annotation), *bounds])
        yield f"| `{prefix}{name}` | {shown} | {kind} | {_one_line(field.description or '')} |"


def _bounds(data: Any) -> Iterator[tuple[str, object]]:
    for attribute, sign in (("gt", ">"), ("ge", "≥"), ("lt", "<"), ("le", "≤")):
        limit = getattr(data, attribute, None)
        if limit is not None:
            yield sign, limit


def _type(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        return " or ".join(f"`{_plain(value)}`" for value in get_args(annotation))
    parts = [part for part in get_args(annotation) if part is not type(None)]
    if get_origin(annotation) is UnionType:
        return " or ".join(_type(part) for part in parts)
    container = get_origin(annotation)
    if container in (list, dict, tuple):
        names_of_parts = dict.fromkeys(_type(part) for part in parts)
        return f"{container.__name__} of {' to '.join(names_of_parts)}"
    if hasattr(annotation, "__metadata__"):
        return _type(annotation.__origin__)
    if get_origin(annotation) is Union:
        return "name or entry"
    names = {
        "str": "text",
        "bool": "true or false",
        "float": "number",
        "int": "whole number",
        "Path": "path",
    }
    return names.get(annotation.__name__, str(annotation.__name__))


def _plain(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _one_line(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


# ---------------------------------------------------------------- commands


def commands() -> str:
    """What every command prints with `--help`."""
    lines = [
        "# Command lines\n",
        "What each command prints with `--help`. The services (`python -m services.data`,",
        "`services.reward`, `services.replay`, `services.rollout`,",
        "`services.environment`) take the same settings as `python -m trainer`.\n",
    ]
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "COLUMNS": "110",
        "OMP_WAIT_POLICY": "passive",
    }
    for name in COMMANDS:
        done = subprocess.run(
            [sys.executable, "-m", name, "--help"],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        lines += [f"## {name}\n", "```text", done.stdout.strip(), "```\n"]
    return "\n".join(lines)


# ---------------------------------------------------------------- HTTP


def http_api() -> str:
    """Every call of every service, from its OpenAPI description."""
    from tests.support.services import apps

    base = ROOT / ".cache" / "tiny-base"
    if not base.exists():
        raise FileNotFoundError(
            f"{base} is missing and the engine needs a model: rlhf tiny-model {base}"
        )
    lines = [
        "# HTTP API\n",
        "Generated from the OpenAPI description of each service, which it serves itself at `/docs`",
        "and `/openapi.json`. Errors, tokens, retries and encodings are the same everywhere:",
        "[conventions](http-conventions.md). `GET /health`, `GET /metrics`, `POST /flush` and",
        "`GET /where` are the same in every service and listed once.\n",
    ]
    with TemporaryDirectory() as directory:
        described = asyncio.run(_described(apps, base, Path(directory)))
    common = set.intersection(*(set(each["paths"]) for each in described.values()))
    lines += ["## Every service\n", *_calls(described["data"], common)]
    for service, title in SERVICES.items():
        lines += [
            f"## {title}\n",
            *_calls(described[service], set(described[service]["paths"]) - common),
        ]
    return "\n".join(lines) + "\n"


async def _described(apps: Any, base: Path, directory: Path) -> dict[str, dict[str, Any]]:
    """The OpenAPI description by service. Some apps want a running event loop when they are
    made.
    """
    return {name: apps.make(name, apps.tiny(base, directory / name)).openapi() for name in SERVICES}


def _calls(api: dict[str, Any], paths: set[str]) -> Iterator[str]:
    for path in sorted(paths):
        for method, call in api["paths"][path].items():
            yield f"### {method.upper()} {path}\n"
            yield _one_line(call.get("description", "")) + "\n"
            rows = [
                _field_row(
                    each["name"],
                    each["schema"],
                    required=each.get("required", False),
                    where=each["in"],
                )
                for each in call.get("parameters", [])
            ]
            for kind, body in call.get("requestBody", {}).get("content", {}).items():
                schema = _resolved(api, body["schema"])
                rows += _body_rows(schema, f"body, {kind.partition('/')[2]}")
            if rows:
                table = ["| field | in | type | meaning |", "|---|---|---|---|", *rows]
                yield "\n".join(table) + "\n"

            contents = call["responses"].get("200", {}).get("content", {})
            answer = contents.get("application/json", {}).get("schema", {})
            names = _resolved(api, answer).get("properties", {})
            if names:
                yield "Answer: " + ", ".join(f"`{name}`" for name in names) + ".\n"


def _resolved(api: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    """The schema that a reference names."""
    name = schema.get("$ref", "").rpartition("/")[2]
    found: dict[str, Any] = api["components"]["schemas"][name] if name else schema
    return found


def _body_rows(schema: dict[str, Any], where: str) -> list[str]:
    required = schema.get("required", [])
    return [
        _field_row(name, each, required=name in required, where=where)
        for name, each in schema.get("properties", {}).items()
    ]


def _field_row(name: str, schema: dict[str, Any], *, required: bool, where: str) -> str:
    limits = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    facts = [_schema_type(schema)]
    facts += [f"{sign} {schema[key]}" for key, sign in limits.items() if key in schema]
    if schema.get("default") not in (None, "", [], {}):
        facts.append(f"default `{_plain(schema['default'])}`")
    if required:
        facts.append("required")
    about = _one_line(schema.get("description", ""))
    return f"| `{name}` | {where} | {', '.join(facts)} | {about} |"


def _schema_type(schema: dict[str, Any]) -> str:
    if "anyOf" in schema:
        return " or ".join(_schema_type(each) for each in schema["anyOf"])
    if "enum" in schema:
        return " or ".join(f"`{value}`" for value in schema["enum"])
    if schema.get("type") == "array":
        return f"list of {_schema_type(schema.get('items', {}))}"
    return str(schema.get("$ref", "").rpartition("/")[2] or schema.get("type", "any"))


# ---------------------------------------------------------------- Python


def python_api() -> str:
    """A page for mkdocstrings: every public name of `trainer`, from its docstring."""
    import trainer

    lines = [
        "# Python API\n",
        "Every public name of the package `trainer`, from its docstring. How to use them:",
        "[training in one process](../how-to/python-api.md).\n",
    ]
    lines += [
        "The fields of `TrainerConfig`:\n",
        *_setting_rows("", trainer.TrainerConfig.model_fields),
        "",
    ]
    public = [getattr(trainer, name) for name in trainer.__all__]
    lines += [f"::: {each.__module__}.{each.__qualname__}\n" for each in public]
    return "\n".join(lines)
