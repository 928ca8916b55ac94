"""scripts/prose.py: which texts of a file it reads, and where it finds a phrase."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "prose.py"


@pytest.fixture(scope="module")
def prose() -> ModuleType:
    spec = importlib.util.spec_from_file_location("prose", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def findings(prose: ModuleType, folder: Path, source: str, name: str = "module.py") -> list[tuple[int, str]]:
    """(line, phrase) that it prints for a file."""
    path = folder / name
    path.write_text(source)
    return [(first + line - 1, phrase) for first, text in prose.prose_of(path) for line, phrase, _ in prose.found(text)]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ('"""It waits for ever."""', [(1, "for ever")]),
        ('"""First line.\n\nThe trainer\nlacks memory.\n"""', [(4, "lacks")]),
        ('def f():\n    """Who\n    waits is late."""', [(2, "Who waits")]),
        ("x = 1  # the device stands still", [(1, "stands still")]),
        ("# the run goes\n# on without it\nx = 1", [(1, "goes on")]),
        ("# the run goes\nx = 1\n# on without it", []),
        ('raise ValueError("it is asked again")', [(1, "asked again")]),
        ('log.warning(\n    "%s is left "\n    "behind", name)', [(2, "left behind")]),
        ('f"{name} is told"', [(1, "is told")]),
        ('f"{name!r:>{width}} lacks {count} GiB"', [(1, "lacks")]),
        ("stands_still = lacks.asked_again(told)", []),
        ('"""`goes on` is the name of an event."""', []),
        ('"""```\nit goes on\n```"""', []),
        ('x = b"it goes on"', []),
    ],
)
def test_prose_of_python_is_docstrings_comments_and_strings(prose, tmp_path, source, expected):
    assert findings(prose, tmp_path, source) == expected


def test_a_page_is_read_whole(prose, tmp_path):
    page = "# Title\n\nThe run goes on.\n\n```python\nit goes on\n```\n\n`goes on` and it lacks words.\n"
    assert findings(prose, tmp_path, page, "page.md") == [(3, "goes on"), (9, "lacks")]


def test_a_finding_fails_the_check_and_names_the_place(prose, tmp_path, capsys):
    good, bad = tmp_path / "good.py", tmp_path / "bad.py"
    good.write_text('"""It waits forever."""\n')
    bad.write_text('"""Module."""\n\nlacks = "it lacks"  # held up\n')
    assert prose.main([str(good)]) == 0
    assert prose.main([str(good), str(bad)]) == 1
    first, second = capsys.readouterr().out.splitlines()
    assert first == f"{bad}:3: 'held up': delayed"
    assert second == f"{bad}:3: 'lacks': is short of, is missing"


def test_the_package_and_the_documentation_are_checked_by_default(prose):
    names = {path.relative_to(SCRIPT.parents[1]).as_posix() for path in prose.documents()}
    assert {"README.md", "docs/structure.md", "inflight/cli.py", "inflight/trainer/loop.py"} <= names
