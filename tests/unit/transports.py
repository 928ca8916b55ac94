"""What tests of the CUDA transports share on a machine without CUDA (not a test file)."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace

import pytest

PACKAGE = "inflight.weights.transport"
HOST = """
import sys
from inflight.weights.transport.rendezvous import KeyValueStore
store = KeyValueStore("", 5.0)
for key in sys.argv[1:]:
    store.put(key, bytes([255] * 88))
print(store.address, flush=True)
sys.stdin.read()
"""


@contextmanager
def without_cuda(monkeypatch: pytest.MonkeyPatch, name: str, *beneath: str) -> Iterator[ModuleType]:
    """A transport's module, imported with an empty driver; forgotten afterwards, as are those `beneath` it."""
    for module in ("cuda", "cuda.bindings", "cuda.bindings.driver"):
        monkeypatch.setitem(sys.modules, module, types.ModuleType(module))
    sys.modules["cuda.bindings"].driver = SimpleNamespace(CUDA_MEMCPY2D=object)  # type: ignore[attr-defined]
    for module in ("cuda", *beneath, name):
        monkeypatch.delitem(sys.modules, f"{PACKAGE}.{module}", raising=False)
    yield importlib.import_module(f"{PACKAGE}.{name}")
    for module in ("cuda", *beneath, name):
        sys.modules.pop(f"{PACKAGE}.{module}", None)


@contextmanager
def store_elsewhere(*keys: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process that hosts a store with an offer of a buffer at each of `keys`, and the store's address."""
    command = [sys.executable, "-c", HOST, *keys]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process, process.stdout.readline().strip()
    finally:
        process.kill()
        process.communicate(timeout=20)


def stop(process: subprocess.Popen[str]) -> None:
    """Stops a process; returns once all its threads have stopped. Until then one of them may still answer."""
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)


def kill(process: subprocess.Popen[str]) -> None:
    """Kills a process; returns once it is gone."""
    process.kill()
    process.wait(20)
