"""The documentation names only files, links, anchors, tests and settings that exist.

Reports and decision records are dated and may name things that are gone.
"""

import re
import subprocess
from collections.abc import Iterator
from functools import cache

import pytest

from common.settings.config import Config
from common.settings.sources import SHORT_NAMES
from tests.support.paths import ROOT
from trainer.observe.metrics import METRICS

GENERATED = {
    "docs/reference/settings.md",
    "docs/reference/commands.md",
    "docs/reference/http-api.md",
    "docs/reference/python.md",
}
"""Pages that docs/hooks.py generates when the site is built; `mkdocs build --strict` checks their
anchors."""
MADE = (
    ".venv",
    ".cache",
    "runs",
    "outputs",
    "site",
    "checkpoints",
    "trackers",
    "groups",
    "prompts",
    "critic",
)
"""Top-level folders that exist only after something has run."""
_FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
_CODE = re.compile(r"`([^`\n]+)`")
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]*)\)")
_PATH = re.compile(r"^(?:[\w.-]+/)+[\w.*-]*$")
_SETTING = re.compile(r"^(?:--)?([a-z]+)\.([a-z]\w*)(?:[ =:].*)?$")
_VARIABLE = re.compile(r"RLHF_[A-Z]+__[A-Z_]+")


def documents() -> list[str]:
    """Every tracked or new Markdown file."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return sorted(name for name in set(listed.stdout.split()) if (ROOT / name).exists())


DOCUMENTS = documents()
DATED = ("docs/reports/archive/", "docs/adr/")
CURRENT = [name for name in DOCUMENTS if not name.startswith(DATED)]


@cache
def text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


@cache
def anchors(name: str) -> set[str]:
    """The anchors of a document's headings, as GitHub and mkdocs make them."""
    heads = re.findall(r"^#+ (.*)$", _FENCE.sub("", text(name)), re.MULTILINE)
    return {re.sub(r"[\s]+", "-", re.sub(r"[^\w\s-]", "", head.lower()).strip()) for head in heads}


def spans(name: str) -> Iterator[str]:
    """The code spans of a document's prose."""
    yield from _CODE.findall(_FENCE.sub("", text(name)))


@cache
def suite() -> str:
    return "\n".join(
        path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py")
    )


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_relative_link_leads_somewhere(name: str) -> None:
    for link in _LINK.findall(_CODE.sub("", _FENCE.sub("", text(name)))):
        target, _, anchor = link.partition("#")
        if "://" in link or link.startswith("mailto:"):
            continue
        path = (ROOT / name).parent / target if target else ROOT / name
        found = path.resolve().relative_to(ROOT.resolve()).as_posix()
        if found in GENERATED:
            continue
        assert path.exists(), f"{name} links to {link}"
        if anchor:
            assert anchor in anchors(found), (
                f"{name} links to {link}, and {found} has no such heading"
            )


@pytest.mark.parametrize("name", CURRENT)
def test_every_path_named_exists(name: str) -> None:
    for span in spans(name):
        word = span.split()[0]
        if not _PATH.match(word) or word.split("/")[0] in MADE:
            continue
        first = word.split("/")[0]
        if not (
            ROOT / first
        ).exists():  # not a path of the repository: a data set on the hub, or a media type
            continue
        assert list(ROOT.glob(word.rstrip("/"))), f"{name} names {word}"


@pytest.mark.parametrize("name", CURRENT)
def test_every_test_named_exists(name: str) -> None:
    for span in spans(name):
        if re.fullmatch(r"test_\w+", span) and span != "test_cases":  # a column of code rewards
            assert f"def {span}(" in suite(), f"{name} names {span}"


@pytest.mark.parametrize("name", CURRENT)
def test_every_setting_named_exists(name: str) -> None:
    sections = {
        key: field.annotation
        for key, field in Config.model_fields.items()
        if hasattr(field.annotation, "model_fields")
    }
    numbers = {metric.name for metric in METRICS}
    for span in spans(name):
        match = _SETTING.match(span)
        if span in numbers:
            continue
        if match and match[1] in sections and match[2] not in ("jsonl", "md", "py"):
            fields = getattr(sections[match[1]], "model_fields", {})
            modules = (
                ROOT / match[1] / f"{match[2]}.py",
                ROOT / match[1] / match[2],
                ROOT / match[1] / "cli" / f"{match[2]}.py",
            )
            assert match[2] in fields or any(path.exists() for path in modules), (
                f"{name} names {span}"
            )
    for option, field in re.findall(r"--([a-z]+)\.([a-z_]+)", text(name)):
        if option in sections:
            assert field in getattr(sections[option], "model_fields", {}), (
                f"{name} names --{option}.{field}"
            )
    for variable in _VARIABLE.findall(text(name)):
        section, field = variable.removeprefix("RLHF_").lower().split("__")
        if (section, field) != ("section", "field"):
            assert field in getattr(sections.get(section), "model_fields", {}), (
                f"{name} names {variable}"
            )


def test_short_names_are_documented() -> None:
    assert all(
        name in text("README.md") + text("docs/tutorials/first-run.md")
        for name in ("MODEL_NAME", "RUN_DIR")
    )
    assert {"MODEL_NAME", "NUM_EPOCHS", "BATCH_SIZE", "RUN_DIR"} <= set(SHORT_NAMES)


@pytest.mark.integration
def test_documents_named_in_the_code_exist() -> None:
    pattern = r"docs/[a-z-]+(/[a-z0-9-]+)*\.(md|json|yml|yaml|png|svg)"
    kinds = ("*.py", "*.js", "*.html", "*.yaml", "*.yml", "*.sh", "*.toml", "Makefile")
    words = ["git", "grep", "-nohE", pattern, "--", *kinds]
    listed = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    named = {line.partition(":")[2] for line in listed.stdout.splitlines()} - GENERATED
    assert named
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


def test_every_decision_has_a_status_and_is_in_the_index() -> None:
    records = sorted((ROOT / "docs" / "adr").glob("[0-9]*.md"))
    index = text("docs/adr/README.md")
    assert records
    for record in records:
        assert "\n**Status.** " in record.read_text(encoding="utf-8"), record.name
        assert f"| {int(record.name[:4])} | [" in index, record.name
        assert f"]({record.name}) |" in index, record.name


def test_every_dated_report_is_named_by_the_results() -> None:
    reports = sorted((ROOT / "docs" / "reports" / "archive").glob("*.md"))
    assert reports
    results = text("docs/reports/README.md")
    assert [report.name for report in reports if f"(archive/{report.name}" not in results] == []
