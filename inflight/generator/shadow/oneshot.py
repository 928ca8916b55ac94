"""Waits for the last use of the live range and remaps it, in one call without the GIL.

When the step in flight ends, the worker's output thread wakes as well and takes the GIL to pass the tokens on. Four
calls from Python would each have to wait for the GIL while the device is idle. One call (oneshot.c) takes the GIL once,
when the remap is done and the output thread has finished too. It is compiled when a worker starts, by the C compiler
that Triton needs anyway; without a compiler the worker makes the four calls.
"""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

from inflight.error_line import one_line

_SOURCE = Path(__file__).with_name("oneshot.c")
_STEPS = ("cuCtxSynchronize", "cuEventSynchronize", "cuMemUnmap", "cuMemMap", "cuMemSetAccess")
_COMPILE_S = 60.0


class NoCompiler(RuntimeError):
    """The call can't be compiled here; the text says why, in one line."""


class NotMoved(RuntimeError):
    """A driver call failed; `unmapped` tells whether the range had already lost its old memory."""

    def __init__(self, reason: str, *, unmapped: bool) -> None:
        super().__init__(reason)
        self.unmapped = unmapped


class Moved(NamedTuple):
    """Seconds that each part of a remap took."""

    wait: float
    """Wait for the step in flight: the device does useful work meanwhile."""
    unmap: float
    map: float
    access: float

    @property
    def move(self) -> float:
        """The remap itself, during which the device is idle."""
        return self.unmap + self.map + self.access


class _Driver(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_void_p) for name in _STEPS)


class OneShot:
    """The compiled call, bound to the driver's functions. The constructor raises NoCompiler."""

    def __init__(self) -> None:
        self._call = _compiled().wait_and_move
        self._call.argtypes = [
            ctypes.POINTER(_Driver),
            ctypes.c_void_p,
            ctypes.c_ulonglong,
            ctypes.c_size_t,
            ctypes.c_ulonglong,
            ctypes.c_int,
            ctypes.POINTER(ctypes.c_int),
            ctypes.POINTER(ctypes.c_double),
        ]
        self._call.restype = ctypes.c_int
        try:
            library = ctypes.CDLL("libcuda.so.1")
            found = [ctypes.cast(getattr(library, name), ctypes.c_void_p) for name in _STEPS]
        except (OSError, AttributeError) as error:
            raise NoCompiler(f"the CUDA driver is missing a function: {one_line(error)}") from None
        self._driver = _Driver(*found)

    def __call__(self, address: int, nbytes: int, handle: int, device: int, event: int = 0) -> Moved:
        """Waits, then maps `[address, address + nbytes)` onto `handle`, readable and writable. Raises NotMoved.

        `event` is a CUevent that was recorded after the last use of the range; 0 waits for all of the current context.
        """
        step = ctypes.c_int()
        seconds = (ctypes.c_double * 4)()
        status = self._call(self._driver, event or None, address, nbytes, handle, device, step, seconds)
        if status != 0:
            call = _STEPS[step.value]
            raise NotMoved(f"{call}: CUresult {status}", unmapped=call in ("cuMemMap", "cuMemSetAccess"))
        return Moved(*seconds)


@functools.cache
def _compiled() -> ctypes.CDLL:
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if not compiler:
        raise NoCompiler("no C compiler was found (CC, cc, gcc, clang)")
    with tempfile.TemporaryDirectory(prefix="inflight-") as folder:
        library = Path(folder) / "oneshot.so"
        command = [*compiler.split(), "-O2", "-shared", "-fPIC", "-o", str(library), str(_SOURCE)]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, errors="replace", timeout=_COMPILE_S, check=False
            )
            if done.returncode != 0:
                said = (done.stderr.strip() or "no output").splitlines()[-1]
                raise NoCompiler(f"{compiler} failed: {one_line(said)}")
            return ctypes.CDLL(str(library))
        except (OSError, subprocess.TimeoutExpired) as error:
            raise NoCompiler(f"{compiler} failed: {one_line(error)}") from None
