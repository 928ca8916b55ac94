"""Paths that no file can have: one that a user gives is refused by name, before the file system is asked."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

LONGEST_NAME = 255
"""Most bytes of one name on Linux (NAME_MAX)."""
LONGEST = 4095
"""Most bytes of a path (PATH_MAX, which counts a NUL at the end)."""


def why_impossible(path: str | Path) -> str:
    """What is allowed of a path that no file can have; empty for any other path, whether there is a file or not."""
    text = str(path)
    if "\0" in text:
        return "a path without the character NUL"
    try:
        names = [len(os.fsencode(name)) for name in (text, *Path(text).parts)]
    except UnicodeEncodeError:
        return f"a path that {sys.getfilesystemencoding()} can write"
    if names[0] > LONGEST or max(names[1:], default=0) > LONGEST_NAME:
        return f"a path of at most {LONGEST} bytes, with names of at most {LONGEST_NAME}"
    return ""


def file_path(text: str) -> Path:
    """The `type` of argparse for an argument that is a path. Raises ArgumentTypeError for an impossible one."""
    if allowed := why_impossible(text):
        shown = repr(text if len(text) <= 100 else text[:100] + "…")
        raise argparse.ArgumentTypeError(f"{shown} is not allowed: {allowed}")
    return Path(text)
