"""A vLLM on disk: where it is, its version, its state compared with its patch, and changing that state."""

from __future__ import annotations

import enum
import importlib.util
import io
import re
from pathlib import Path

from inflight import resources
from inflight.patching.diff import ABSENT, FilePatch, PatchError, blob_id, parse
from inflight.patching.replacing import content_of, replace_all

_VERSION = re.compile(r"^__version__ = .*?['\"]([^'\"+]+)", re.MULTILINE)


class PatchState(enum.Enum):
    """The state of a vLLM's sources, compared with its patch."""

    PRISTINE = "pristine"
    PATCHED = "patched"
    MIXED = "partly patched"
    UNKNOWN = "unknown"  # some file is neither


def check(path: Path | str | None = None, version: str | None = None) -> PatchState:
    """The state of a vLLM: of the installed one, or of the fork or site-packages at `path`."""
    root, _, files = find(path, version)
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


def find(path: Path | str | None, given: str | None) -> tuple[Path, str, list[FilePatch]]:
    """A vLLM's folder, its version, and the patch for it."""
    root = _locate(path)
    version = _version(root, given)
    return root, version, parse((resources.folder("patches") / f"vllm-{version}.patch").read_bytes())


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
    version = given
    origin = "--vllm-version"
    allowed = ", ".join(supported_versions())
    if version is None:
        source = root / "vllm" / "_version.py"
        match = _VERSION.search(source.read_text(errors="replace")) if source.is_file() else None
        if match is None:
            raise PatchError(f"{source} does not tell the version; give --vllm-version, one of {allowed}")
        version = match[1]
        origin = str(source)
    if version not in supported_versions():
        raise PatchError(f"no patch for vLLM {version} (from {origin}); there is one for {allowed}")
    return version


def _states(root: Path, files: list[FilePatch]) -> dict[str, PatchState]:
    return {
        file.path: {file.old: PatchState.PRISTINE, file.new: PatchState.PATCHED}.get(
            blob_id(content_of(root / file.path)), PatchState.UNKNOWN
        )
        for file in files
    }


def _summary(states: dict[str, PatchState]) -> PatchState:
    found = set(states.values())
    mixed = PatchState.UNKNOWN if PatchState.UNKNOWN in found else PatchState.MIXED
    return found.pop() if len(found) == 1 else mixed


def _turn(path: Path | str | None, given: str | None, goal: PatchState) -> PatchState:
    """Brings every file to `goal`, or leaves all as they were."""
    root, version, files = find(path, given)
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
            contents[root / file.path] = _turned(file, content_of(root / file.path) or b"", goal)
    replace_all(contents)
    return _summary(states)


def _turned(file: FilePatch, content: bytes, goal: PatchState) -> bytes | None:
    """The content of a file at `goal`, checked by its blob id; None when it does not exist there."""
    turn, wanted = (file.applied, file.new) if goal is PatchState.PATCHED else (file.reverted, file.old)
    new = turn(content) if wanted != ABSENT else None
    if blob_id(new) != wanted:
        raise PatchError(f"{file.path}: the patch does not give the content whose blob id it names")
    return new


def _recorded(root: Path, files: list[FilePatch], goal: PatchState) -> dict[Path, bytes | None]:
    """Adds the files of the patch to pip's RECORD, so that they are removed when vLLM is upgraded or removed."""
    added = [file.path.encode() for file in files if file.old == ABSENT]
    records: dict[Path, bytes | None] = {}
    for record in root.glob("vllm*.dist-info/RECORD"):
        lines = io.BytesIO(record.read_bytes()).readlines()
        new = [line for line in lines if line.split(b",")[0] not in added]
        new += [path + b",,\r\n" for path in added if goal is PatchState.PATCHED]
        if new != lines and any(line.startswith(b"vllm/__init__.py,") for line in lines):
            records[record] = b"".join(new)
    return records
