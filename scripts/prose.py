"""Finds phrases for which the field has a standard word: `python scripts/prose.py [FILE ...]`.

Without arguments it reads README.md, docs/ and the package: of Python files the docstrings, comments and string
literals (messages, log lines). Prints `file:line: phrase: better words` for each, and exits with 1 if there is any.
Code, as in backticks or fences, is not prose: it may quote a log line or a name.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
BETTER = {
    r"Python's lock": "the GIL",
    r"for ever": "forever; never ends",
    r"asks? again|asked again": "retries, re-queues; retried, re-queued",
    r"(?:goes|going|gone|went|go) on(?! to)": "continues; a run resumes from a checkpoint",
    r"(?:left|leaves?|leaving) (?:\w+ ){0,2}behind": "skipped, abandoned, orphaned",
    r"tak(?:en|es?) for (?:lost|dead)": "presumed dead (a process), presumed lost (a request)",
    r"stands? still|stood still": "stalls",
    r"(?:comes?|came) to nothing": "fails",
    r"held up|holds? up": "delayed",
    r"(?:(?:is|are|was|were|be|been|being) )?told": "is reported, logged, sent",
    r"(?:run|train\w*|trained) in (?:turn|flight)": "synchronous, asynchronous",
    r"who(?:ever)? (?:waits?|asks?|keeps?|sends?|holds?|fails?|has sampled|sampled)": "name the process or thread",
    r"harmed|does harm|no harm": "corrupted, damaged",
    r"lacks|lacking": "is short of, is missing",
    r"(?:an? \w+|one(?: \w+)?) a (?:step|token|process|version|rollout|address|group|parameter)": "one per step",
    r"nobody|somebody": "no process, no caller: name it, or what does not happen",
    r"whoever": "name the process or person",
    r"travels?|travelled|travelling": "is sent; payload",
    r"learnt from": "trained on",
    r"comes? late": "is late",
    r"(?:has|have|had) come": "has arrived, has joined",
    r"what(?:ever)? (?:became|becomes|came|comes) of": "the outcome of",
    r"(?:can|could|to) be had": "is available",
    r"at the most": "at most",
}
PHRASES = [
    (re.compile(r"\b(?:" + phrase.replace(" ", r"\s+") + r")\b", re.IGNORECASE), better)
    for phrase, better in BETTER.items()
]
CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.MULTILINE | re.DOTALL)


def documents() -> list[Path]:
    """README.md, all pages of docs/, and the package."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "inflight").rglob("*.py"))]


def prose_of(path: Path) -> Iterator[tuple[int, str]]:
    """(line, text) for each piece of prose in a file; a file that is not Python is one piece."""
    source = path.read_text()
    if path.suffix != ".py":
        yield 1, source
        return
    yield from _comments(source)
    yield from _strings(ast.parse(source))


def _comments(source: str) -> Iterator[tuple[int, str]]:
    """Comments; those on lines that follow each other are one, because a phrase may run over the end of a line."""
    first, lines = 0, [""]
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            if token.start[0] != first + len(lines):
                yield first, "\n".join(lines)
                first, lines = token.start[0], []
            lines.append(token.string.lstrip("#"))
    yield first, "\n".join(lines)


def _strings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """String literals, docstrings among them; of an f-string, the pieces between its values."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


def found(text: str) -> Iterator[tuple[int, str, str]]:
    """(line, phrase, better words), in the order of the text."""
    prose = CODE.sub(lambda code: re.sub(r"[^\n]", "`", code[0]), text)
    hits = [(hit.start(), hit[0], better) for phrase, better in PHRASES for hit in phrase.finditer(prose)]
    for start, phrase, better in sorted(hits):
        yield text.count("\n", 0, start) + 1, " ".join(phrase.split()), better


def main(arguments: list[str]) -> int:
    """The exit code: 1 when a phrase was found."""
    problems = 0
    for path in [Path(each) for each in arguments] or documents():
        shown = path.resolve().relative_to(ROOT) if path.resolve().is_relative_to(ROOT) else path
        hits = [(first + line - 1, *rest) for first, text in prose_of(path) for line, *rest in found(text)]
        for line, phrase, better in sorted(hits):
            print(f"{shown}:{line}: {phrase!r}: {better}")
        problems += len(hits)
    return int(problems > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
