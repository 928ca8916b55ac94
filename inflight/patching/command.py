"""The command `inflight patch`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from inflight.exits import BAD_INPUT, say_why
from inflight.file_path import file_path
from inflight.patching.diff import PatchError
from inflight.patching.sources import PatchState, apply, check, find, revert


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0: done, or for `check` patched; 1: not patched; 2: refused."""
    parser = argparse.ArgumentParser(prog="inflight patch", description="Patch vLLM, or take the patch back.")
    parser.add_argument("action", choices=["check", "apply", "revert"])
    parser.add_argument("--path", type=file_path, help="a fork or site-packages; by default the installed vLLM")
    parser.add_argument("--vllm-version", help="by default what the sources say")
    arguments = parser.parse_args(argv)
    action = {"check": check, "apply": apply, "revert": revert}[arguments.action]
    try:
        root, version, _ = find(arguments.path, arguments.vllm_version)
        before = action(root, version)
    except (PatchError, OSError) as error:
        return say_why("patch", error, BAD_INPUT)
    now = {"check": before, "apply": PatchState.PATCHED, "revert": PatchState.PRISTINE}[arguments.action]
    print(f"vLLM {version} in {root}: {now.value}" + (f", was {before.value}" if before is not now else ""))
    return 0 if now is PatchState.PATCHED or arguments.action == "revert" else 1
