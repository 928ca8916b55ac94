"""What an installed wheel holds."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory) -> Path:
    """The wheel of this checkout, unpacked as pip would. Built from a copy, so that the checkout stays clean."""
    copy, wheel, site = (tmp_path_factory.mktemp(name) for name in ("copy", "wheel", "site"))
    for folder in ("inflight", "configs", "patches"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, copy)
    code = f"from setuptools import build_meta; print(build_meta.build_wheel({str(wheel)!r}))"
    subprocess.run([sys.executable, "-c", code], cwd=copy, capture_output=True, timeout=120, check=True)
    zipfile.ZipFile(next(wheel.glob("*.whl"))).extractall(site)
    return site


def test_every_package_is_listed():
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    found = {
        ".".join(path.parent.relative_to(ROOT).parts)
        for path in (ROOT / "inflight").rglob("*.py")
        if "__pycache__" not in path.parts
    }
    assert set(listed) == found | {"inflight.configs", "inflight.patches"}


def test_a_wheel_carries_configurations_and_patches(unpacked):
    for folder in ("configs", "patches"):
        inside = unpacked / "inflight" / folder
        carried = {path.relative_to(inside) for path in inside.rglob("*")}
        shipped = {path.relative_to(ROOT / folder) for path in (ROOT / folder).rglob("*")}
        assert {path for path in shipped if path.suffix in (".yaml", ".patch", ".md")} <= carried


def test_an_installed_wheel_composes_its_configurations(unpacked, tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "inflight.cli", "launch", "--config-name", "tiny", "--print"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(unpacked)},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr
    assert "name: tiny" in done.stdout
    assert str(tmp_path) in done.stdout
