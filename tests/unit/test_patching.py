"""Patching a small stand-in for vLLM: all files or none, back byte for byte, and nothing unknown is touched."""

from __future__ import annotations

import difflib
import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from inflight import patching, resources
from inflight.patching import PatchError, PatchState, command, replacing
from inflight.patching.diff import parse

VERSION = "0.9.1"
ENGINE = "".join(f"line {number}\n" for number in range(1, 61))
OLD = {
    "vllm/__init__.py": "# a package\n",
    "vllm/_version.py": "__version__ = version = '0.9.1+cpu'\n",
    "vllm/engine.py": ENGINE,
    "vllm/odd.py": "page\x0cbreak\u2028 stays one line\r\nplain\n",
}
NEW = {
    "vllm/engine.py": ENGINE.replace("line 3\n", "line 3\nadded\n")
    .replace("line 20\n", "")
    .replace("line 55", "LINE 55"),
    "vllm/odd.py": OLD["vllm/odd.py"].replace("plain", "plainer"),
    "vllm/marker.py": "PATCH_VERSION = 1\n",
}
TOUCHED = sorted(NEW)


def blob(text: str | None) -> str:
    if text is None:
        return "0" * 40
    content = text.encode()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def diff(new: dict[str, str]) -> str:
    """A git diff from OLD to `new`, behind a line of prose."""
    text = "What it does.\n\n"
    for name in sorted(new):
        old = OLD.get(name)
        text += f"diff --git a/{name} b/{name}\n" + ("" if old else "new file mode 100644\n")
        text += f"index {blob(old)}..{blob(new[name])} 100644\n"
        before, after = (old or "").split("\n"), new[name].split("\n")
        lines = difflib.unified_diff(
            before[:-1], after[:-1], f"a/{name}" if old else "/dev/null", f"b/{name}", lineterm=""
        )
        text += "".join(line + "\n" for line in lines)
    return text


@pytest.fixture
def patches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "patches"
    folder.mkdir()
    for version in (VERSION, "0.10.0"):
        (folder / f"vllm-{version}.patch").write_bytes(diff(NEW).encode())
    monkeypatch.setattr(resources, "folder", lambda name: folder)
    return folder


@pytest.fixture
def site(tmp_path: Path, patches: Path) -> Path:
    """A site-packages folder with the stand-in, pristine."""
    root = tmp_path / "site"
    for name, text in OLD.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(text.encode())
    (root / f"vllm-{VERSION}.dist-info").mkdir()
    record = "".join(f"{name},sha256=x,1\r\n" for name in OLD)
    (root / f"vllm-{VERSION}.dist-info" / "RECORD").write_bytes(record.encode())
    return root


def contents(root: Path) -> dict[str, bytes]:
    return {str(file.relative_to(root)): file.read_bytes() for file in root.rglob("*") if file.is_file()}


def test_apply_and_revert_give_back_every_byte(site: Path) -> None:
    before = contents(site)
    assert patching.check(site) is PatchState.PRISTINE
    assert patching.apply(site) is PatchState.PRISTINE
    assert patching.check(site) is PatchState.PATCHED
    for name, text in NEW.items():
        assert (site / name).read_bytes() == text.encode()
    assert patching.revert(site) is PatchState.PATCHED
    assert contents(site) == before


def test_git_takes_the_same_patch(site: Path, patches: Path) -> None:
    if shutil.which("git") is None:
        pytest.skip("no git here")
    fork = site.parent / "fork"
    shutil.copytree(site, fork)
    subprocess.run(["git", "apply", patches / f"vllm-{VERSION}.patch"], cwd=fork, check=True)
    assert patching.check(fork) is PatchState.PATCHED


def test_a_second_apply_or_revert_changes_nothing(site: Path) -> None:
    patching.apply(site)
    once, times = contents(site), {name: os.stat(site / name).st_mtime_ns for name in NEW}
    assert patching.apply(site) is PatchState.PATCHED
    assert contents(site) == once
    assert {name: os.stat(site / name).st_mtime_ns for name in NEW} == times
    patching.revert(site)
    assert patching.revert(site) is PatchState.PRISTINE


def test_an_interrupted_patch_is_completed_or_taken_back(site: Path) -> None:
    (site / "vllm/engine.py").write_text(NEW["vllm/engine.py"])
    assert patching.check(site) is PatchState.MIXED
    assert patching.apply(site) is PatchState.MIXED
    assert patching.check(site) is PatchState.PATCHED
    (site / "vllm/marker.py").unlink()
    assert patching.revert(site) is PatchState.MIXED
    assert patching.check(site) is PatchState.PRISTINE


@pytest.mark.parametrize("name", TOUCHED)
@pytest.mark.parametrize("action", [patching.apply, patching.revert])
def test_one_unknown_file_stops_all(site: Path, name: str, action: object) -> None:
    (site / name).write_bytes(b"a line of somebody's own\n")
    before = contents(site)
    assert patching.check(site) is PatchState.UNKNOWN
    with pytest.raises(PatchError, match=rf"in {name};.*git apply"):
        action(site)  # type: ignore[operator]
    assert contents(site) == before


@pytest.mark.parametrize("fails", range(1, 5))
@pytest.mark.parametrize("patched", [False, True])
def test_a_write_that_fails_midway_leaves_all_as_it_was(
    site: Path, monkeypatch: pytest.MonkeyPatch, fails: int, patched: bool
) -> None:
    if patched:
        patching.apply(site)
    before, put, calls = contents(site), replacing._put, 0

    def failing(staged: Path | None, file: Path) -> None:
        nonlocal calls
        calls += 1
        if calls == fails:
            raise OSError(28, "No space left on device")
        put(staged, file)

    monkeypatch.setattr(replacing, "_put", failing)
    with pytest.raises(OSError, match="No space left"):
        (patching.revert if patched else patching.apply)(site)
    assert contents(site) == before  # nor did a temporary file stay


def test_compiled_code_of_the_old_source_counts_as_outdated(site: Path) -> None:
    ahead = 4_000_000_000.0
    os.utime(site / "vllm/engine.py", (ahead, ahead))
    patching.apply(site)
    assert int(os.stat(site / "vllm/engine.py").st_mtime) > ahead


def test_modes_stay_and_pip_learns_of_added_files(site: Path) -> None:
    (site / "vllm/engine.py").chmod(0o640)
    patching.apply(site)
    assert (site / "vllm/engine.py").stat().st_mode & 0o777 == 0o640
    record = site / f"vllm-{VERSION}.dist-info" / "RECORD"
    assert record.read_bytes().endswith(
        b"vllm/_version.py,sha256=x,1\r\nvllm/engine.py,sha256=x,1\r\nvllm/odd.py,sha256=x,1\r\nvllm/marker.py,,\r\n"
    )


def test_an_unsupported_version_is_refused_with_what_there_is(site: Path) -> None:
    (site / "vllm/_version.py").write_text("__version__ = version = '1.2.3'\n")
    with pytest.raises(
        PatchError, match=r"no patch for vLLM 1\.2\.3 \(from .*_version\.py\); there is one for 0\.9\.1, 0\.10\.0"
    ):
        patching.apply(site)
    with pytest.raises(PatchError, match=r"no patch for vLLM 7 \(from --vllm-version\)"):
        patching.apply(site, "7")
    assert patching.apply(site, VERSION) is PatchState.PRISTINE


def test_a_source_without_version_asks_for_it(site: Path) -> None:
    (site / "vllm/_version.py").unlink()
    with pytest.raises(PatchError, match=r"does not tell the version; give --vllm-version, one of 0\.9\.1, 0\.10\.0"):
        patching.check(site)
    assert patching.check(site, VERSION) is PatchState.PRISTINE


def test_the_package_folder_itself_will_do_as_path(site: Path) -> None:
    assert patching.check(site / "vllm") is PatchState.PRISTINE
    with pytest.raises(PatchError, match=r"has no vllm/__init__\.py"):
        patching.check(site.parent)


def test_the_installed_vllm_is_found_without_importing_it(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (site / "vllm/__init__.py").write_text("raise RuntimeError('imported')\n")
    monkeypatch.syspath_prepend(site)
    monkeypatch.delitem(__import__("sys").modules, "vllm", raising=False)
    assert patching.check() is PatchState.PRISTINE


def test_a_patch_that_can_not_be_applied_exactly_says_so(site: Path, patches: Path) -> None:
    whole = diff(NEW)
    broken = {
        "no full blob ids": whole.replace(f"index {blob(ENGINE)}", "index 1234567"),
        "not what the patch expects": whole.replace(" line 4\n", " line 44\n"),
        "does not give the content": whole.replace("+added\n", "+other\n"),
        "can't read 'Binary": whole + "Binary files differ\n",
    }
    before = contents(site)
    for message, text in broken.items():
        (patches / f"vllm-{VERSION}.patch").write_bytes(text.encode())
        with pytest.raises(PatchError, match=message):
            patching.apply(site)
        assert contents(site) == before


def test_the_command_tells_state_and_code(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = ["--path", str(site)]
    assert command.main(["check", *path]) == 1
    assert command.main(["apply", *path]) == 0
    assert command.main(["check", *path]) == 0
    assert command.main(["revert", *path]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(": ")[1] for line in lines] == [
        "pristine",
        "patched, was pristine",
        "patched",
        "pristine, was patched",
    ]
    (site / "vllm/engine.py").write_text("")
    assert command.main(["apply", *path]) == 2
    errors = capsys.readouterr().err
    assert errors.startswith("inflight patch: ")
    assert errors.count("\n") == 1


def test_every_patch_that_ships_can_be_read() -> None:
    versions = patching.supported_versions()
    assert versions == ["0.26.0", "0.32.0", "0.33.0"]
    for version in versions:
        files = parse((resources.folder("patches") / f"vllm-{version}.patch").read_bytes())
        marker = next(file for file in files if file.path == "vllm/inflight_patch.py")
        assert f'VLLM_VERSION = "{version}"\n'.encode() in marker.applied(b"")
