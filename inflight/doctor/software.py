"""Python, torch and vLLM: versions, whether they can be imported, the patch and the plugin."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from importlib.metadata import entry_points

from inflight import patching
from inflight.doctor.finding import Finding, fail, ok, warn
from inflight.doctor.probe import ProbeError, ask

IMPORT_S = 120.0
PYTHONS = ((3, 11), (3, 13))
PLUGINS = "vllm.general_plugins"


def python() -> Iterator[Finding]:
    """The interpreter that this command runs in, which a run's processes run in too."""
    version = sys.version_info[:2]
    text = f"{sys.version.split()[0]}, {sys.executable}"
    least, most = (".".join(map(str, each)) for each in PYTHONS)
    if PYTHONS[0] <= version <= PYTHONS[1]:
        yield ok("Python", text)
    else:
        yield fail("Python", text, f"use Python {least} to {most}")


def torch() -> Iterator[Finding]:
    """Whether torch can be imported."""
    try:
        found = ask("torch", timeout_s=IMPORT_S)
    except ProbeError as error:
        yield fail("torch", f"import torch: {error}", "install torch again: `pip install -e '.[cpu]'` or `.[gpu]`")
        return
    built = f"built for CUDA {found['cuda']}" if found["cuda"] else "built without CUDA"
    yield ok("torch", f"{found['version']}, {built}, imported in {found['seconds']:.1f} s")


def vllm(gpus: int) -> Iterator[Finding]:
    """Version, patch, import and plugin; `gpus` is how many the machine has."""
    try:
        state = patching.check()
    except patching.PatchError as error:
        yield fail("vLLM", str(error), f"install one of {', '.join(patching.supported_versions())}")
        return
    if state is patching.PatchState.PATCHED:
        yield ok("vLLM patch", state.value)
    else:
        yield fail("vLLM patch", f"the installed vLLM is {state.value}", "`inflight patch apply`")
    yield from _imported(gpus)
    yield from plugin()


def _imported(gpus: int) -> Iterator[Finding]:
    try:
        found = ask("vllm", timeout_s=IMPORT_S)
    except ProbeError as error:
        yield fail("vLLM", f"import vllm: {error}", "install a vLLM that fits torch, then `inflight patch apply`")
        return
    text = f"{found['version']} for {found['device']}, imported in {found['seconds']:.1f} s"
    if gpus and found["device"] == "cpu":
        yield warn("vLLM", text, f"this machine has {gpus} GPUs: install the extra gpu to use them")
    else:
        yield ok("vLLM", text)


def plugin() -> Iterator[Finding]:
    """Whether vLLM's processes will load inflight's plugin."""
    allowed = os.environ.get("VLLM_PLUGINS")
    if not any(each.name == "inflight" for each in entry_points(group=PLUGINS)):
        yield fail("vLLM plugin", "inflight is not installed as a package", "`pip install -e .`")
    elif allowed is not None and "inflight" not in allowed.split(","):
        yield fail("vLLM plugin", f"VLLM_PLUGINS={allowed} leaves it out", "unset VLLM_PLUGINS, or add inflight")
    else:
        yield ok("vLLM plugin", "vLLM will find it")


def compiler() -> Iterator[Finding]:
    """On GPUs the checksums' kernel and the swap by remapping are compiled at the start."""
    found = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if found:
        yield ok("C compiler", found)
    else:
        yield fail("C compiler", "none of cc, gcc and clang", "install one: `apt-get install gcc`")
