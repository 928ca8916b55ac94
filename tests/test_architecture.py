"""The shape of the code: imports only point down, foreign libraries stay where they belong, files stay small."""

from __future__ import annotations

import ast
import graphlib
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MAX_FILE_LINES = 300
MAX_FUNCTION_LINES = 60

# What each part of inflight/ may import of the others. Parts not named may import all (they start things).
MAY_IMPORT = {
    "arrays": set(),
    "http_body": set(),
    "types": {"arrays"},
    "config": set(),
    "named": {"config"},
    "sampling": {"config"},
    "peft_layers": {"config"},
    "base_digest": {"models"},
    "agreement": set(),
    "vocabulary": set(),
    "resources": set(),
    "metrics": set(),
    "clocks": {"messages", "metrics"},
    "packed_logprobs": {"arrays"},
    "completions": {"arrays", "http_body", "packed_logprobs", "types", "config"},
    "surroundings": set(),
    "lifeline": set(),
    "processes": {"exits", "lifeline", "starters", "surroundings"},
    "starters": {"bus", "config", "exits", "lifeline", "messages", "surroundings"},
    "exits": set(),
    "descendants": {"processes"},
    "models": set(),
    "groups": {"arrays", "types"},
    "messages": {"arrays", "types"},
    "bus": {"config", "messages"},
    "listening": {"config"},
    "patching": {"exits", "resources"},
    "prompts": {"models", "vocabulary"},
    "tasks": {"config", "http_body", "models", "prompts", "rewards", "types"},
    "rewards": {"config", "http_body", "prompts"},
    "weights": {"types", "config", "messages", "bus", "completions", "agreement", "listening"},
    "rollout": {"arrays", "types", "config", "groups", "messages", "bus", "tasks", "models", "named"},
    # Not rollout: the actor does not know the trainer's books.
    "actor": {
        "prometheus",
        "arrays",
        "http_body",
        "types",
        "config",
        "exits",
        "groups",
        "lifeline",
        "messages",
        "bus",
        "tasks",
        "rewards",
        "models",
        "named",
        "metrics",
        "descendants",
        "processes",
        "completions",
        "packed_logprobs",
        "prompts",
    },
    "generator": {
        "prometheus",
        "base_digest",
        "types",
        "vocabulary",
        "config",
        "completions",
        "exits",
        "lifeline",
        "listening",
        "messages",
        "bus",
        "models",
        "processes",
        "surroundings",
        "weights",
    },
    "trainer": {
        "prometheus",
        "base_digest",
        "arrays",
        "agreement",
        "types",
        "config",
        "exits",
        "completions",
        "groups",
        "listening",
        "messages",
        "bus",
        "metrics",
        "models",
        "named",
        "peft_layers",
        "processes",
        "weights",
        "rollout",
        "sampling",
        "tasks",
    },
    # Above the actor, whose child processes it scores in; the trainer knows its messages alone.
    "evaluation": {
        "prometheus",
        "types",
        "config",
        "exits",
        "messages",
        "bus",
        "metrics",
        "models",
        "descendants",
        "processes",
        "completions",
        "actor",
    },
    "audit": {
        "base_digest",
        "agreement",
        "exits",
        "groups",
        "types",
        "config",
        "models",
        "metrics",
        "peft_layers",
        "rollout",
        "sampling",
        "generator",
    },
    "doctor": {"config", "exits", "launcher", "models", "patching", "surroundings", "weights"},
    "prometheus": {"config", "listening"},
    "view": {"config", "exits", "metrics", "report", "trainer", "types"},
    "report": {"types", "audit", "clocks", "config", "exits", "groups", "metrics", "rollout"},
    "export": {"config", "exits", "locked_folder", "merge", "models", "run_template", "trainer"},
    "run_template": {"config", "tasks"},
    "merge": {"base_digest", "models"},
    "locked_folder": set(),
}
UNBOUND = {"launcher", "hosted", "cli"}
OF_ALL = {"error_line", "file_path", "nearest_name"}
"""What each part may import besides: they import nothing themselves."""
# Inside weights/: what is below must not know what is above.
WEIGHTS_BELOW = {"source", "plan", "pack", "transport"}
WEIGHTS_ABOVE = {"publish", "receive"}
# Libraries that belong to one place alone.
BELONGS_TO = {
    "zmq": r"bus(\..*)?",
    "vllm": r"generator\..*|doctor\.probes",
    "huggingface_hub": r"models\.hub",
    "ray": r"starters\.ray",
    "hydra": r"launcher\.(compose|chosen)",
    "prometheus_client": r"prometheus\..*|[a-z]+\.exported|generator\.status",
    "psutil": r"processes|descendants|listening|launcher\.run_lock|generator\..*",
}
FORBIDDEN = {"pickle", "marshal", "shelve", "dill", "cloudpickle"}
DISTRIBUTION = {"zmq": "pyzmq", "hydra": "hydra-core", "yaml": "omegaconf", "tokenizers": "transformers"}
"""Where the name on the package index differs from the module, or another declared package always brings it."""
IN_THE_PATCH = {"vllm/packed_logprobs.py"}
"""Files that docs/structure.md names and the patch adds to vLLM."""
COME_WITH_VLLM = {"uvicorn", "vllm", "fastapi", "cuda", "triton"}


def name_of(path: Path) -> str:
    """`weights.plan` for inflight/weights/plan.py."""
    parts = path.relative_to(ROOT / "inflight").with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def sources() -> dict[str, tuple[Path, ast.Module]]:
    """Every module of inflight/ with its syntax tree; the package itself is ""."""
    return {name_of(path): (path, tree_of(path)) for path in sorted((ROOT / "inflight").rglob("*.py"))}


def imports(tree: ast.AST) -> Iterator[str]:
    """Dotted names that a module imports anywhere, in functions too; `from a import b` gives `a.b`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import, line {node.lineno}"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def own_imports(name: str) -> set[str]:
    """Modules of inflight/ that a module of it imports."""
    found = set()
    for imported in imports(sources()[name][1]):
        if imported.split(".")[0] != "inflight":
            continue
        target = imported.removeprefix("inflight").lstrip(".")
        while target not in sources():
            target = target.rpartition(".")[0]
        if target:
            found.add(target)
    return found - {name}


def part(name: str) -> str:
    return name.split(".")[0]


@pytest.mark.parametrize("name", [name for name in sources() if name])
def test_imports_point_down(name):
    if part(name) in UNBOUND:
        return
    allowed = (MAY_IMPORT[part(name)] | {part(name)} | OF_ALL) if name not in OF_ALL else set()
    wrong = {imported for imported in own_imports(name) if part(imported) not in allowed}
    assert not wrong, f"inflight.{name} must not import {sorted(wrong)}"


def test_weights_are_layered():
    for name in sources():
        inner = name.split(".")[1:2] if part(name) == "weights" else []
        imported = {each.split(".")[1] for each in own_imports(name) if each.startswith("weights.")}
        if inner and inner[0] in WEIGHTS_BELOW:
            assert not imported & WEIGHTS_ABOVE, f"inflight.{name} must not import {sorted(imported & WEIGHTS_ABOVE)}"
        if inner and inner[0] in WEIGHTS_ABOVE:
            others = imported & WEIGHTS_ABOVE - set(inner)
            assert not others, f"inflight.{name} must not import {sorted(others)}"
        if part(name) == "generator":
            assert "publish" not in imported, f"inflight.{name} must not know the publisher"


def test_no_module_cycle():
    try:
        graphlib.TopologicalSorter({name: own_imports(name) for name in sources()}).prepare()
    except graphlib.CycleError as error:
        pytest.fail(f"import cycle: {' -> '.join(error.args[1])}")


@pytest.mark.parametrize("name", list(sources()))
def test_foreign_libraries_stay_where_they_belong(name):
    for imported in imports(sources()[name][1]):
        library = imported.split(".")[0]
        assert library not in FORBIDDEN, f"inflight.{name} imports {library}"
        if library in BELONGS_TO:
            assert re.fullmatch(BELONGS_TO[library], name), f"inflight.{name} imports {library}"


def test_every_library_is_declared():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    texts = project["dependencies"] + [each for extra in project["optional-dependencies"].values() for each in extra]
    declared = {re.split(r"[<>=!~\[; ]", text)[0].lower().replace("-", "_") for text in texts}
    used = {imported.split(".")[0] for _, tree in sources().values() for imported in imports(tree)}
    foreign = used - set(sys.stdlib_module_names) - {"inflight"} - COME_WITH_VLLM
    undeclared = {name for name in foreign if DISTRIBUTION.get(name, name).lower().replace("-", "_") not in declared}
    assert not undeclared, f"not declared in pyproject.toml: {sorted(undeclared)}"


@pytest.mark.parametrize("path", [path for top in ("inflight", "bench") for path in sorted((ROOT / top).rglob("*.py"))])
def test_files_and_functions_stay_small(path):
    text = path.read_text()
    assert text.count("\n") <= MAX_FILE_LINES, f"{path.name} has {text.count(chr(10))} lines"
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            assert lines <= MAX_FUNCTION_LINES, f"{path.name}: {node.name} has {lines} lines"


@pytest.mark.parametrize("path", [path for top in ("inflight", "bench") for path in sorted((ROOT / top).rglob("*.py"))])
def test_names_tell_what_a_thing_is(path):
    vague = re.compile(r"util|helper|manager|misc|common", re.IGNORECASE)
    assert not vague.search(path.stem), f"{path.name}: a vague file name"
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            assert not vague.search(node.name), f"{path.name}, line {node.lineno}: {node.name} is a vague name"


def shortens_an_error(node: ast.AST) -> bool:
    """`str(error).split()` or `str(error).splitlines()`, the beginnings of a wording of one's own."""
    match node:
        case ast.Call(func=ast.Attribute(value=ast.Call() as text, attr="split" | "splitlines"), args=[]):
            return ast.unparse(text.func) == "str" and all(isinstance(each, ast.Name) for each in text.args)
    return False


def test_an_error_becomes_a_line_in_one_place():
    own = {"launcher.compose"}  # takes Hydra's explanations off, and gives the rest to one_line
    found = [name for name, (_, tree) in sources().items() if any(map(shortens_an_error, ast.walk(tree)))]
    assert not set(found) - own, f"{sorted(set(found) - own)}: inflight/error_line.py has one_line and with_kind"


def test_the_formatter_is_switched_off_nowhere():
    """Not in tests either: a table of data reads as well with an entry in each line."""
    paths = [path for top in ("inflight", "bench", "scripts", "tests") for path in sorted((ROOT / top).rglob("*.py"))]
    off = [path for path in paths if re.search(r"# fmt: ?(skip|off)", path.read_text())]
    assert not off, [str(path.relative_to(ROOT)) for path in off]


def packed(node: ast.AST) -> bool:
    """An assignment with a value for each of several names, unless it exchanges: a value reads another one's name."""
    if not (isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple | ast.List)):
        return False
    values = [
        {ast.unparse(each) for each in ast.walk(value) if isinstance(each, ast.expr)} for value in node.value.elts
    ]
    for target in node.targets:
        if isinstance(target, ast.Tuple | ast.List) and len(target.elts) == len(values):
            names = [ast.unparse(name) for name in target.elts]
            return not any(name in reads for i, reads in enumerate(values) for name in names[:i] + names[i + 1 :])
    return False


@pytest.mark.parametrize(
    "code, several",
    [
        ("a, b = 1, 2", True),
        ("x, y = x[known], y[known]", True),
        ("self.a, (b, c) = 1, pair", True),
        ("low, high = high, low", False),
        ("error, self.error = self.error, None", False),
        ("left, right = pair", False),
        ("first, *rest = ids", False),
    ],
)
def test_which_assignments_are_packed(code, several):
    assert packed(ast.parse(code).body[0]) == several


def test_an_assignment_has_a_line_of_its_own():
    paths = [path for top in ("inflight", "bench") for path in sorted((ROOT / top).rglob("*.py"))]
    found = [(path, node) for path in paths for node in ast.walk(tree_of(path)) if packed(node)]
    assert not (lines := [f"{path.relative_to(ROOT)}:{node.lineno}" for path, node in found]), lines


def test_a_class_name_is_one_thing_in_every_module():
    """In all of inflight/, with or without an underscore: `State` would have to be looked up by its import."""
    places: dict[str, list[str]] = {}
    for name, (_, tree) in sources().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name.lstrip("_"), []).append(f"inflight.{name}")
    assert not (more := {name: found for name, found in places.items() if len(found) > 1}), more


def test_names_of_weight_files_are_in_one_module():
    """A checkpoint is written, checked, digested and exported in different ones, which must agree."""
    spelt = {
        name: {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and type(node.value) is str}
        for name, (_, tree) in sources().items()
    }
    names = {each for each in spelt.pop("models.weight_files") if re.fullmatch(r"[\w.]+\.(safetensors|json)", each)}
    assert "model.safetensors.index.json" in names
    assert not (wrong := {name: found & names for name, found in spelt.items() if found & names}), wrong


@pytest.mark.parametrize("path", sorted((ROOT / "inflight").rglob("*.py")))
def test_every_module_says_what_it_is_for(path):
    tree = tree_of(path)
    assert ast.get_docstring(tree) or not tree.body, f"{path} has no docstring"


def stray_strings(tree: ast.Module) -> Iterator[int]:
    """Lines of strings that document nothing: neither at the start of a module, class or function, nor after a name
    that is assigned."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        before = node if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) else None
        for each in body if isinstance(body, list) else []:
            text = isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant) and each.value.value is not ...
            if text and before is not node and not isinstance(before, ast.Assign | ast.AnnAssign):
                yield each.lineno
            before = each


@pytest.mark.parametrize(
    "code, lines",
    [
        ('"""Module."""\nA = 1\n"""Of A."""', []),
        ('"""Module."""\n"""Module, again."""', [2]),
        ('class A:\n    """Of A."""\n\n    """Of A, again."""\n    b: int\n    """Of b."""', [4]),
        ('def f():\n    """Of f."""\n    ...', []),
        ('if A:\n    """Why."""\n    b = 1', [2]),
    ],
)
def test_which_strings_document_nothing(code, lines):
    assert list(stray_strings(ast.parse(code))) == lines


def test_every_string_documents_what_is_before_it():
    """A second docstring is a statement without an effect, and its text contradicts the first one some day."""
    found = [f"inflight.{name}:{line}" for name, (_, tree) in sources().items() for line in stray_strings(tree)]
    assert not found, found


def loaded_by(*packages: str) -> set[str]:
    """Top-level modules in a fresh interpreter that has imported every module of the packages."""
    code = f"""
import importlib, pkgutil, sys
for package in {packages!r}:
    found = importlib.import_module(package)
    for module in pkgutil.walk_packages(found.__path__, package + "."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
print(*sorted({{name.split(".")[0] for name in sys.modules}} | {{n for n in sys.modules if n.startswith("inflight.")}}))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_trainer_and_rollouts_load_no_engine():
    loaded = loaded_by("inflight.trainer", "inflight.rollout", "inflight.actor", "inflight.tasks")
    assert "vllm" not in loaded
    assert not {name for name in loaded if name.startswith("inflight.generator")}


def test_the_map_names_every_module():
    """docs/structure.md has a row for each file, and none for a file that is gone."""
    text = (ROOT / "docs" / "structure.md").read_text()
    rows = re.findall(r"^\| `([a-z_/]+\.py)` \|", text, re.MULTILINE)
    files = {str(path.relative_to(ROOT / "inflight")) for path, _ in sources().values()}
    modules = {file for file in files if not file.endswith(("__init__.py", "__main__.py"))}
    assert not modules - set(rows), f"docs/structure.md has no row for {sorted(modules - set(rows))}"
    assert not set(rows) - files, f"docs/structure.md has a row for {sorted(set(rows) - files)}, which is no file"
    assert len(rows) == len(set(rows)), "docs/structure.md has two rows for one file"


def named_file(name: str) -> Path | None:
    """The file that docs/structure.md means: below inflight/ or at the top, or a bare name that stands for one file."""
    places = [ROOT / "inflight" / name, ROOT / name]
    if "/" not in name:
        places += sorted((ROOT / "inflight").rglob(name))
    return next((path for path in places if path.is_file()), None)


def map_rows() -> list[str]:
    """The rows of the table "To change X, open Y"."""
    text = (ROOT / "docs" / "structure.md").read_text()
    table = text[text.index("## To change X") : text.index("## Life of a version")]
    return [line for line in table.splitlines() if line.startswith("| ")][1:]


@pytest.mark.parametrize("row", map_rows(), ids=lambda row: row.split("|")[1].strip()[:60])
def test_a_row_of_the_map_names_files_and_what_is_in_them(row):
    """`Replica.keep` must be a word of a file that its row names."""
    ticks = re.findall(r"`([^`]+)`", row)
    files = {name: named_file(name) for name in ticks if name.endswith((".py", ".js")) and name not in IN_THE_PATCH}
    assert not (gone := [name for name, path in files.items() if path is None]), gone
    folders = [ROOT / "inflight" / name for name in ticks if name.endswith("/") and (ROOT / "inflight" / name).is_dir()]
    paths = [path for path in files.values() if path] + [path for each in folders for path in each.rglob("*.py")]
    words = {word for path in paths for word in re.findall(r"\w+", path.read_text())}
    names = [name for name in ticks if re.fullmatch(r"_?[A-Za-z]\w*(\.\w+)*(\(.*\))?", name) and name not in files]
    assert not (gone := [name for name in names if re.findall(r"\w+", name.split("(")[0])[-1] not in words]), gone
