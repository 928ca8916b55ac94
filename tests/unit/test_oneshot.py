"""The compiled call: the driver's functions in their order, times, and which one failed."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest

from inflight.generator.shadow import oneshot
from inflight.generator.shadow.oneshot import NoCompiler, NotMoved, OneShot

RANGE, BYTES, HANDLE, DEVICE = 0x7_0000_0000, 15 << 30, 0x1234_5678_9ABC, 3
WAITS = ("cuCtxSynchronize", "cuEventSynchronize")
CALLS = (*WAITS, "cuMemUnmap", "cuMemMap", "cuMemSetAccess")
EVENT = 0x5555_0000_1111


class FakeDriver:
    """Notes the calls with their arguments; the one named `failing` returns 999."""

    def __init__(self, failing: str = "") -> None:
        self.calls: list[tuple[Any, ...]] = []
        u64, size = ctypes.c_ulonglong, ctypes.c_size_t
        waits, access = ((), (u64,)), (u64, size, ctypes.POINTER(ctypes.c_int), size)
        arguments = (*waits, (u64, size), (u64, size, size, u64, u64), access)

        def fake(name: str) -> Any:
            def call(*values: Any) -> int:
                plain = [tuple(value[:3]) if hasattr(value, "contents") else value for value in values]
                self.calls.append((name, *plain))
                return 999 if name == failing else 0

            return call

        for name, given in zip(CALLS, arguments, strict=True):
            setattr(self, name, ctypes.CFUNCTYPE(ctypes.c_int, *given)(fake(name)))


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes a call over a fake driver."""
    try:
        compiled = oneshot._compiled()
    except NoCompiler as error:
        pytest.skip(str(error))

    def make(driver: FakeDriver) -> OneShot:
        monkeypatch.setattr(oneshot, "_compiled", lambda: compiled)
        monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
        return OneShot()

    return make


def test_waits_then_unmaps_maps_and_sets_access(made: Any) -> None:
    driver = FakeDriver()
    moved = made(driver)(RANGE, BYTES, HANDLE, DEVICE)
    assert driver.calls == [
        ("cuCtxSynchronize",),
        ("cuMemUnmap", RANGE, BYTES),
        ("cuMemMap", RANGE, BYTES, 0, HANDLE, 0),
        ("cuMemSetAccess", RANGE, BYTES, (1, DEVICE, 3), 1),
    ]
    assert min(moved) > 0
    assert moved.move == pytest.approx(sum(moved) - moved.wait)


def test_waits_for_the_event_that_it_is_given(made: Any) -> None:
    driver = FakeDriver()
    made(driver)(RANGE, BYTES, HANDLE, DEVICE, EVENT)
    assert [call[0] for call in driver.calls] == ["cuEventSynchronize", *CALLS[2:]]
    assert driver.calls[0] == ("cuEventSynchronize", EVENT)


@pytest.mark.parametrize("failing", CALLS)
def test_stops_at_the_call_that_fails_and_names_it(made: Any, failing: str) -> None:
    driver = FakeDriver(failing)
    with pytest.raises(NotMoved, match=f"{failing}: CUresult 999") as caught:
        made(driver)(RANGE, BYTES, HANDLE, DEVICE, EVENT if failing == "cuEventSynchronize" else 0)
    before = ["cuCtxSynchronize", *CALLS[2 : CALLS.index(failing)]] if failing not in WAITS else []
    assert [call[0] for call in driver.calls] == [*before, failing]
    assert caught.value.unmapped == (failing in ("cuMemMap", "cuMemSetAccess"))


def test_what_a_compiler_says_last_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As it comes: in colours, in any encoding."""
    compiler = tmp_path / "cc"
    said = r"oneshot.c:1:\n\033[31merror:\033[0m \377\a no cuda.h\n"
    compiler.write_text(f"#!/bin/sh\nprintf '{said}' >&2\nexit 1\n")
    compiler.chmod(0o755)
    oneshot._compiled.cache_clear()
    monkeypatch.setenv("CC", str(compiler))
    with pytest.raises(NoCompiler) as caught:
        OneShot()
    assert str(caught.value) == f"{compiler} failed: [31merror: [0m \ufffd no cuda.h"
    oneshot._compiled.cache_clear()


def test_without_a_compiler_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    oneshot._compiled.cache_clear()
    monkeypatch.setenv("CC", "/nowhere/cc")
    with pytest.raises(NoCompiler, match="/nowhere/cc"):
        OneShot()
    oneshot._compiled.cache_clear()
