"""Syntax trees of the sources: calls that run foreign code or open a shell occur only in the known
places."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.paths import ROOT

FOLDERS = ("common", "learning", "services", "trainer", "jobgroup")
ALLOWED = {
    ("common/settings/sources.py", "yaml.load"): "with a SafeLoader that refuses double keys",
    ("common/settings/sources.py", "yaml.load_all"): "the same",
    ("services/sandbox/inside.py", "exec"): "the program of a model, in the sandbox",
    ("services/sandbox/inside.py", "eval"): "the test of a program, in the sandbox",
    (
        "services/sandbox/program.py",
        "pickle",
    ): "written by the test's process, read by the program's, in the sandbox",
    ("services/sandbox/remote.py", "exec"): "the data set's test of a program, in the sandbox",
    ("services/sandbox/remote.py", "eval"): "the name of the tested function, in the sandbox",
    ("services/sandbox/remote.py", "pickle"): "only writes: values of the test, in the sandbox",
    (
        "services/sandbox/program_names.py",
        "import_module",
    ): "what the data set's test imports, in the sandbox",
    (
        "services/sandbox/program_names.py",
        "exec",
    ): "a program's imports from modules of a closed list, in the sandbox",
    (
        "services/sandbox/library_values.py",
        "import_module",
    ): "modules of a closed list, in the sandbox",
    ("common/process/imports.py", "import_module"): "what a setting of the operator's names",
    ("trainer/api/on_use.py", "import_module"): "modules of a closed list, at their first use",
    ("learning/ranks.py", "pickle"): "between the ranks of one trainer, as its gradients",
    (
        "services/reward/worker.py",
        "import_module",
    ): "modules of this project, which run the operator's functions",
    ("trainer/__init__.py", "import_module"): "this package's own modules, by a table",
    (
        "trainer/policy/checkpoint.py",
        "all_gather_object",
    ): "between the ranks of a run, as DCP does itself",
    (
        "learning/ranks.py",
        "all_gather_object",
    ): "between the ranks of a run, as DCP does itself",
    (
        "learning/saving.py",
        "dcp",
    ): "its metadata is a pickle: read from the operator's own run directory alone",
    ("services/rollout/api_key_launcher.py", "run_module"): "the module of the agent's command",
}
"""(file, what) → why."""
BUILT_IN = {"eval", "exec", "compile", "__import__"}
OBJECTS = {"all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list", "send_object_list",
           "recv_object_list"}  # fmt: skip
SHELLS = {
    "os.system",
    "os.popen",
    "subprocess.getoutput",
    "subprocess.getstatusoutput",
    "tempfile.mktemp",
    "mktemp",
}
PICKLES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "jsonpickle"}


def dotted(node: ast.AST) -> str:
    """Returns the dotted name of an expression, such as `torch.load`; `?` replaces a part that is
    not a name."""
    if isinstance(node, ast.Name):
        return node.id
    return f"{dotted(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else "?"


def said(call: ast.Call, name: str) -> object:
    """Returns a keyword argument's literal: None if absent, ... if it is not a literal."""
    for keyword in call.keywords:
        if keyword.arg == name:
            return keyword.value.value if isinstance(keyword.value, ast.Constant) else ...
    return None


def dangers(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Yields every construct of a module that needs a reason, with its line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = (
                [alias.name for alias in node.names]
                if isinstance(node, ast.Import)
                else [node.module or ""]
            )
            for name in names:
                if name.split(".")[0] in PICKLES:
                    yield name.split(".")[0], node.lineno
                if name.startswith("torch.distributed.checkpoint"):
                    yield "dcp", node.lineno
        if not isinstance(node, ast.Call):
            continue
        name = dotted(node.func)
        last = name.rpartition(".")[2]
        if (name in BUILT_IN and name != "compile") or last in OBJECTS or name in SHELLS:
            yield last if last in OBJECTS else name, node.lineno
        if last in ("import_module", "run_module", "run_path") and name != "run_module":
            yield last, node.lineno
        if name.startswith("yaml.") and last in (
            "load",
            "load_all",
            "unsafe_load",
            "full_load",
            "unsafe_load_all",
            "full_load_all",
        ):
            yield name, node.lineno
        if name == "torch.load" and said(node, "weights_only") is not True:
            yield name, node.lineno
        if said(node, "shell") not in (None, False):
            yield "shell", node.lineno
        for keyword in ("trust_remote_code", "allow_pickle"):
            if said(node, keyword) is True:
                yield keyword, node.lineno
        if last == "from_pretrained" and f".{name}".split(".")[-2].startswith(
            ("AutoModel", "auto")
        ):
            options = any(
                keyword.arg is None for keyword in node.keywords
            )  # **options, built on the lines before
            if said(node, "use_safetensors") is not True and not options:
                yield "from_pretrained", node.lineno


def test_every_call_that_runs_foreign_code_is_known() -> None:
    found: dict[tuple[str, str], list[int]] = {}
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            place = path.relative_to(ROOT).as_posix()
            for what, line in dangers(ast.parse(path.read_text(encoding="utf-8"))):
                found.setdefault((place, what), []).append(line)
    unknown = [
        f"{place}:{lines[0]}: {what}"
        for (place, what), lines in found.items()
        if (place, what) not in ALLOWED
    ]
    assert unknown == [], "give a reason in ALLOWED, or do without"
    assert set(ALLOWED) <= set(found), "a reason for what is not there any more"


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ("import pickle", "pickle"),
        ("from dill import loads", "dill"),
        ("eval(x)", "eval"),
        ("exec(x, {})", "exec"),
        ("__import__(x)", "__import__"),
        ("import os\nos.system(x)", "os.system"),
        ("subprocess.run(x, shell=True)", "shell"),
        ("Popen(x, shell=y)", "shell"),
        ("torch.load(x)", "torch.load"),
        ("torch.load(x, weights_only=False)", "torch.load"),
        ("np.load(x, allow_pickle=True)", "allow_pickle"),
        ("yaml.load(x, Loader)", "yaml.load"),
        ("yaml.unsafe_load(x)", "yaml.unsafe_load"),
        ("AutoModelForCausalLM.from_pretrained(x)", "from_pretrained"),
        ("load(x, trust_remote_code=True)", "trust_remote_code"),
        ("dist.broadcast_object_list(x)", "broadcast_object_list"),
        ("tempfile.mktemp()", "tempfile.mktemp"),
        ("import torch.distributed.checkpoint as dcp", "dcp"),
    ],
)
def test_dangerous_construct_is_found(source: str, what: str) -> None:
    assert what in [found for found, _ in dangers(ast.parse(source))]


def test_safe_construct_is_not_reported() -> None:
    source = (
        "torch.load(x, weights_only=True)\nsubprocess.run(x)\nmodel.eval()\nast.literal_eval(x)\nyaml.safe_load(x)\n"
        "re.compile(x)\nload(x, trust_remote_code=config.trust_remote_code)\nself.auto.from_pretrained(x, use_safetensors=True)"
    )
    assert list(dangers(ast.parse(source))) == []


def test_no_tracked_file_looks_like_a_pickle() -> None:
    endings = (".pkl", ".pickle", ".pt", ".pth", ".bin", ".joblib", ".npy")
    folders = [ROOT / folder for folder in (*FOLDERS, "benchmarks", "docs", "tests")]
    assert [
        path for folder in folders for path in folder.rglob("*") if Path(path).suffix in endings
    ] == []
