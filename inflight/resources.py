"""Finds the folders that ship with the code: `configs` and `patches`.

In a checkout they are beside the package, where a reader looks for them; a wheel has them inside it.
"""

from __future__ import annotations

from pathlib import Path


def folder(name: str) -> Path:
    """The folder `name` of the checkout or of the installed package. Raises FileNotFoundError when neither has it."""
    package = Path(__file__).resolve().parent
    beside = package.parent / name
    if (package.parent / "pyproject.toml").is_file() and beside.is_dir():
        return beside
    inside = package / name
    if inside.is_dir():
        return inside
    raise FileNotFoundError(f"this installation of inflight has no {name}: neither {beside} nor {inside} exists")
