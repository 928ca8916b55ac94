"""Waiting for the device and moving the live range in one go, without letting another Python thread run in between.

When the step in flight ends, the worker's output thread wakes as well. With ordinary calls it may take Python's lock
between the wait and the launch of the next step, and the device stands idle meanwhile. `ctypes.PyDLL` keeps the lock
during a call. The price: for the length of that wait (at most one step) no other thread of the worker runs.
"""

from __future__ import annotations

import ctypes
import functools

from inflight.weights.transport.cuda import CudaError


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


_ON_DEVICE = 1  # CU_MEM_LOCATION_TYPE_DEVICE
_READ_WRITE = 3  # CU_MEM_ACCESS_FLAGS_PROT_READWRITE


@functools.cache
def _driver() -> ctypes.PyDLL:
    library = ctypes.PyDLL("libcuda.so.1")
    address, size = ctypes.c_ulonglong, ctypes.c_size_t
    library.cuCtxSynchronize.argtypes = []
    library.cuMemUnmap.argtypes = [address, size]
    library.cuMemMap.argtypes = [address, size, size, ctypes.c_ulonglong, ctypes.c_ulonglong]
    library.cuMemSetAccess.argtypes = [address, size, ctypes.POINTER(_Access), size]
    return library


def synchronize() -> None:
    """Waits for everything on the current context. Raises CudaError."""
    _check("cuCtxSynchronize", _driver().cuCtxSynchronize())


def unmap(address: int, nbytes: int) -> None:
    """Raises CudaError; then the range is mapped as before."""
    _check("cuMemUnmap", _driver().cuMemUnmap(address, nbytes))


def map_onto(address: int, nbytes: int, handle: int, device: int) -> None:
    """Maps a reserved range onto an allocation, readable and writable by `device`. Raises CudaError."""
    driver = _driver()
    _check("cuMemMap", driver.cuMemMap(address, nbytes, 0, handle, 0))
    access = _Access(_Location(_ON_DEVICE, device), _READ_WRITE)
    _check("cuMemSetAccess", driver.cuMemSetAccess(address, nbytes, ctypes.byref(access), 1))


def _check(call: str, status: int) -> None:
    if status != 0:
        raise CudaError(f"{call}: CUresult {status}")
