"""Applies patches/vllm-X.patch to an installed vLLM or to a fork, and takes it back.

A patch is a plain git diff with full blob ids (`git diff --full-index`), so it can be applied to a fork by `git apply`.
The ids also tell, without any further file, whether a source is as vLLM shipped it, as the patch changes it, or
neither. Only files of known content are changed, so context is never guessed. vLLM itself is not imported here.
"""

from __future__ import annotations

import argparse
import contextlib
import enum
import hashlib
import importlib.util
import io
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from inflight import resources

_ABSENT = "0" * 40  # git's blob id of a file that does not exist
_FILE = re.compile(rb"diff --git a/(\S+) b/\1\n")
_INDEX = re.compile(rb"index ([0-9a-f]{40})\.\.([0-9a-f]{40})\b")
_HUNK = re.compile(rb"@@ -(\d+)(?:,\d+)? \+(\d+)(?:,\d+)? @@")
_VERSION = re.compile(r"^__version__ = .*?['\"]([^'\"+]+)", re.MULTILINE)


class PatchError(RuntimeError):
    """Patching is impossible; the text is one line for the user."""


class PatchState(enum.Enum):
    """The state of a vLLM's sources, compared with its patch."""

    PRISTINE = "pristine"
    PATCHED = "patched"
    MIXED = "partly patched"
    UNKNOWN = "unknown"  # some file is neither


@dataclass
class Hunk:
    """One change; lines keep their sign and count from 1."""

    old_first: int
    new_first: int
    lines: list[bytes] = field(default_factory=list)


@dataclass
class FilePatch:
    """The part of a patch that concerns one file; `old` and `new` are git blob ids."""

    path: str
    old: str
    new: str
    hunks: list[Hunk] = field(default_factory=list)

    def applied(self, content: bytes) -> bytes:
        """The patched content for the pristine one."""
        return self._rewrite(content, [hunk.old_first for hunk in self.hunks], removed=b"-", added=b"+")

    def reverted(self, content: bytes) -> bytes:
        """The pristine content for the patched one."""
        return self._rewrite(content, [hunk.new_first for hunk in self.hunks], removed=b"+", added=b"-")

    def _rewrite(self, content: bytes, firsts: list[int], removed: bytes, added: bytes) -> bytes:
        lines = io.BytesIO(content).readlines()
        result: list[bytes] = []
        taken = 0
        for first, hunk in zip(firsts, self.hunks, strict=True):
            start = max(first - 1, 0)
            before = [line[1:] for line in hunk.lines if line[:1] != added]
            if lines[start : start + len(before)] != before:
                raise PatchError(f"{self.path}, line {start + 1}: not what the patch expects")
            result += lines[taken:start]
            result += [line[1:] for line in hunk.lines if line[:1] != removed]
            taken = start + len(before)
        return b"".join(result + lines[taken:])


def check(path: Path | str | None = None, version: str | None = None) -> PatchState:
    """The state of a vLLM: of the installed one, or of the fork or site-packages at `path`."""
    root, _, files = _find(path, version)
    return _summary(_states(root, files))


def apply(path: Path | str | None = None, version: str | None = None) -> PatchState:
    """Patches a vLLM, all files or none; a patched one is unchanged. Returns the state found before."""
    return _turn(path, version, PatchState.PATCHED)


def revert(path: Path | str | None = None, version: str | None = None) -> PatchState:
    """Restores a vLLM's own sources, all files or none. Returns the state found before."""
    return _turn(path, version, PatchState.PRISTINE)


def supported_versions() -> list[str]:
    """The vLLM versions for which there is a patch."""
    names = [file.stem.removeprefix("vllm-") for file in resources.folder("patches").glob("vllm-*.patch")]
    return sorted(names, key=lambda name: [int(part) for part in name.split(".")])


def parse(text: bytes) -> list[FilePatch]:
    """Reads a git diff with full blob ids; text before the first file is ignored."""
    files: list[FilePatch] = []
    for line in io.BytesIO(text).readlines():
        if match := _FILE.fullmatch(line):
            files.append(FilePatch(match[1].decode(), old="", new=""))
        elif not files:
            continue
        elif match := _INDEX.match(line):
            files[-1].old, files[-1].new = match[1].decode(), match[2].decode()
        elif match := _HUNK.match(line):
            files[-1].hunks.append(Hunk(int(match[1]), int(match[2])))
        elif files[-1].hunks and line[:1] in (b" ", b"+", b"-"):
            files[-1].hunks[-1].lines.append(line)
        elif not line.startswith((b"index ", b"--- ", b"+++ ", b"new file mode ")):
            raise PatchError(f"patch of {files[-1].path}: can't read {line.decode(errors='replace').rstrip()!r}")
    for file in files:
        if not file.old or not file.hunks:
            raise PatchError(f"patch of {file.path}: no full blob ids or no change; write it by git diff --full-index")
    return files


def main(argv: Sequence[str] | None = None) -> int:
    """The command `inflight patch`. Code 0: done, or for `check` patched; 1: not patched; 2: refused."""
    parser = argparse.ArgumentParser(prog="inflight patch", description="Patch vLLM, or take the patch back.")
    parser.add_argument("action", choices=["check", "apply", "revert"])
    parser.add_argument("--path", type=Path, help="a fork or site-packages; by default the installed vLLM")
    parser.add_argument("--vllm-version", help="by default what the sources say")
    arguments = parser.parse_args(argv)
    action = {"check": check, "apply": apply, "revert": revert}[arguments.action]
    try:
        root, version, _ = _find(arguments.path, arguments.vllm_version)
        before = action(root, version)
    except (PatchError, OSError) as error:
        print(f"inflight patch: {error}", file=sys.stderr)
        return 2
    now = {"check": before, "apply": PatchState.PATCHED, "revert": PatchState.PRISTINE}[arguments.action]
    print(f"vLLM {version} in {root}: {now.value}" + (f", was {before.value}" if before is not now else ""))
    return 0 if now is PatchState.PATCHED or arguments.action == "revert" else 1


def _locate(path: Path | str | None) -> Path:
    """The folder that holds the package folder `vllm`."""
    if path is None:
        spec = importlib.util.find_spec("vllm")  # does not import a top-level package
        if spec is None or not spec.submodule_search_locations:
            raise PatchError("no vLLM is installed here; install one or give --path")
        return Path(spec.submodule_search_locations[0]).resolve().parent
    root = Path(path).resolve()
    if root.name == "vllm" and (root / "__init__.py").is_file():
        root = root.parent
    if not (root / "vllm" / "__init__.py").is_file():
        raise PatchError(f"--path {path} has no vllm/__init__.py; give the root of a fork or a site-packages folder")
    return root


def _version(root: Path, given: str | None) -> str:
    """The version of a vLLM, as given or else from vllm/_version.py; there must be a patch for it."""
    version, origin = given, "--vllm-version"
    allowed = ", ".join(supported_versions())
    if version is None:
        source = root / "vllm" / "_version.py"
        match = _VERSION.search(source.read_text(errors="replace")) if source.is_file() else None
        if match is None:
            raise PatchError(f"{source} does not tell the version; give --vllm-version, one of {allowed}")
        version, origin = match[1], str(source)
    if version not in supported_versions():
        raise PatchError(f"no patch for vLLM {version} (from {origin}); there is one for {allowed}")
    return version


def _find(path: Path | str | None, given: str | None) -> tuple[Path, str, list[FilePatch]]:
    """A vLLM's folder, its version, and the patch for it."""
    root = _locate(path)
    version = _version(root, given)
    return root, version, parse((resources.folder("patches") / f"vllm-{version}.patch").read_bytes())


def _states(root: Path, files: list[FilePatch]) -> dict[str, PatchState]:
    return {
        file.path: {file.old: PatchState.PRISTINE, file.new: PatchState.PATCHED}.get(
            _blob_id(_content(root / file.path)), PatchState.UNKNOWN
        )
        for file in files
    }


def _summary(states: dict[str, PatchState]) -> PatchState:
    found = set(states.values())
    mixed = PatchState.UNKNOWN if PatchState.UNKNOWN in found else PatchState.MIXED
    return found.pop() if len(found) == 1 else mixed


def _turn(path: Path | str | None, given: str | None, goal: PatchState) -> PatchState:
    """Brings every file to `goal`, or leaves all as they were."""
    root, version, files = _find(path, given)
    states = _states(root, files)
    unknown = [name for name, state in states.items() if state is PatchState.UNKNOWN]
    if unknown:
        raise PatchError(
            f"{root} differs from vLLM {version} and from its patched form in {', '.join(unknown)}; "
            f"to a fork, apply patches/vllm-{version}.patch by `git apply`; an installation, install anew"
        )
    contents = _recorded(root, files, goal)
    for file in files:
        if states[file.path] is not goal:
            contents[root / file.path] = _turned(file, _content(root / file.path) or b"", goal)
    _write_all(contents)
    return _summary(states)


def _turned(file: FilePatch, content: bytes, goal: PatchState) -> bytes | None:
    """The content of a file at `goal`, checked by its blob id; None when it does not exist there."""
    turn, wanted = (file.applied, file.new) if goal is PatchState.PATCHED else (file.reverted, file.old)
    new = turn(content) if wanted != _ABSENT else None
    if _blob_id(new) != wanted:
        raise PatchError(f"{file.path}: the patch does not give the content whose blob id it names")
    return new


def _recorded(root: Path, files: list[FilePatch], goal: PatchState) -> dict[Path, bytes | None]:
    """Adds the files of the patch to pip's RECORD, so that they are removed when vLLM is upgraded or removed."""
    added = [file.path.encode() for file in files if file.old == _ABSENT]
    records: dict[Path, bytes | None] = {}
    for record in root.glob("vllm*.dist-info/RECORD"):
        lines = io.BytesIO(record.read_bytes()).readlines()
        new = [line for line in lines if line.split(b",")[0] not in added]
        new += [path + b",,\r\n" for path in added if goal is PatchState.PATCHED]
        if new != lines and any(line.startswith(b"vllm/__init__.py,") for line in lines):
            records[record] = b"".join(new)
    return records


def _content(file: Path) -> bytes | None:
    return file.read_bytes() if file.is_file() else None


def _blob_id(content: bytes | None) -> str:
    """The id that git gives a file with this content."""
    if content is None:
        return _ABSENT
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def _write_all(contents: dict[Path, bytes | None]) -> None:
    """Replaces files by new contents (None: removes them); on any failure restores those already replaced."""
    with _staged(contents) as new, _staged({file: _content(file) for file in contents}) as old:
        done: list[Path] = []
        try:
            for file, staged in new.items():
                done.append(file)
                _put(staged, file)
        except BaseException:
            for file in done:
                _put(old[file], file)
            raise


@contextlib.contextmanager
def _staged(contents: dict[Path, bytes | None]) -> Iterator[dict[Path, Path | None]]:
    """Writes contents to temporary files beside their targets, so that only renames are left."""
    staged: dict[Path, Path | None] = {}
    try:
        for file, content in contents.items():
            staged[file] = None
            if content is not None:
                handle, name = tempfile.mkstemp(prefix=f".{file.name}.", dir=file.parent)
                os.close(handle)
                temporary = staged[file] = Path(name)
                temporary.write_bytes(content)
                _take_over(file, temporary)
        yield staged
    finally:
        for left in staged.values():
            if left is not None:
                left.unlink(missing_ok=True)


def _take_over(file: Path, staged: Path) -> None:
    """Gives the new file the old one's mode and a later whole second, so that compiled code counts as outdated."""
    staged.chmod(0o644)
    if file.is_file():
        shutil.copymode(file, staged)
        later = max(time.time(), file.stat().st_mtime + 1)
        os.utime(staged, (later, later))


def _put(staged: Path | None, file: Path) -> None:
    os.replace(staged, file) if staged else file.unlink(missing_ok=True)
