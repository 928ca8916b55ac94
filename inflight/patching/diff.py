"""A git diff with full blob ids, and one file of it: applied, or taken back."""

from __future__ import annotations

import hashlib
import io
import re
from dataclasses import dataclass, field

ABSENT = "0" * 40  # git's blob id of a file that does not exist
_FILE = re.compile(rb"diff --git a/(\S+) b/\1\n")
_INDEX = re.compile(rb"index ([0-9a-f]{40})\.\.([0-9a-f]{40})\b")
_HUNK = re.compile(rb"@@ -(\d+)(?:,\d+)? \+(\d+)(?:,\d+)? @@")


class PatchError(RuntimeError):
    """Patching is impossible; the text is one line for the user."""


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


def parse(text: bytes) -> list[FilePatch]:
    """Reads a git diff with full blob ids; text before the first file is ignored."""
    files: list[FilePatch] = []
    for line in io.BytesIO(text).readlines():
        if match := _FILE.fullmatch(line):
            files.append(FilePatch(match[1].decode(), old="", new=""))
        elif not files:
            continue
        elif match := _INDEX.match(line):
            files[-1].old = match[1].decode()
            files[-1].new = match[2].decode()
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


def blob_id(content: bytes | None) -> str:
    """The id that git gives a file with this content."""
    if content is None:
        return ABSENT
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
