"""Live weights in one virtual range that can be moved from one physical allocation to another.

    live range    --> set 0 or set 1      what parameters, compiled code and CUDA graphs point to
    own range 0   --> set 0               always mapped; used to write a set that is not live
    own range 1   --> set 1

`remap` moves the live range to the other set: unmap, map, set access, mostly under a millisecond for 15 GB, no byte
copied. It matters that a set is one allocation (one handle): 32 handles take 4 ms, 512 take 50 ms (not in bench/log).
Each set also has a range of its own, so that a swap has no second range to move and a shadow's address never aliases
the live weights.

The device must not use the live range while it is remapped: `remap` waits for all queued work, or for an event recorded
after the last use, and the caller must not queue work that uses the range meanwhile.
"""

from __future__ import annotations

import logging
import time
from typing import Any, NoReturn

import torch
from cuda.bindings import driver

from inflight.generator.shadow.oneshot import Moved, NoCompiler, NotMoved, OneShot
from inflight.weights.transport.cuda import CudaError, check

logger = logging.getLogger("vllm.inflight")


class ArenaError(RuntimeError):
    """The arena can't be made, or a remap failed and the old weights were mapped again."""


class ArenaLost(RuntimeError):
    """A remap failed half way and the live range is unmapped: the engine cannot continue."""


def supported(device: torch.device) -> bool:
    """Whether the device can map physical memory into a reserved virtual range."""
    attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
    handle = check("cuDeviceGet", driver.cuDeviceGet(device.index))
    return bool(check("cuDeviceGetAttribute", driver.cuDeviceGetAttribute(attribute, handle)))


class _Bytes:
    """Device memory at an address, for torch.as_tensor."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3}


class Arena:
    """See the module's docstring. `nbytes` is rounded up to the device's granularity."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.device = device
        self._location = self._memory_of(device)
        properties = driver.CUmemAllocationProp()
        properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location = self._location
        self._properties = properties
        grain = check(
            "cuMemGetAllocationGranularity",
            driver.cuMemGetAllocationGranularity(
                properties, driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
            ),
        )
        self.nbytes = -(-nbytes // grain) * grain
        self._handles: list[Any] = []
        self._own: list[int] = []
        self._current = 0
        self._oneshot = self._make_oneshot()
        self._add_set()
        self._live = self._reserve()
        self._map(self._live, 0)
        self.live = self._tensor(self._live)

    @staticmethod
    def _make_oneshot() -> OneShot | None:
        try:
            return OneShot()
        except NoCompiler as error:
            logger.warning("inflight: swaps take up to a millisecond longer: %s", error)
            return None

    @staticmethod
    def _memory_of(device: torch.device) -> driver.CUmemLocation:
        location = driver.CUmemLocation()
        location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        location.id = device.index
        return location

    def add_shadow(self) -> None:
        """Allocates the second set. Raises ArenaError that says how much memory is missing."""
        if len(self._handles) == 1:
            self._add_set()

    @property
    def shadow(self) -> torch.Tensor:
        """uint8 `[nbytes]`: the set that is not live, at an address that never changes for that set."""
        return self._tensor(self._own[1 - self._current])

    def remap(self, *, behind: torch.cuda.Event | None = None, in_one: bool = True) -> Moved:
        """Waits for the last use of the live range, then moves it to the other set.

        `behind` is an event recorded after the last use; None waits for all work of the device. `in_one`: in one call
        (see oneshot.py), if that could be compiled. Raises ArenaError when it failed and the old weights are live,
        ArenaLost when nothing is mapped any more.
        """
        target = 1 - self._current
        try:
            if in_one and self._oneshot is not None:
                handle = int(self._handles[target])
                event = int(behind.cuda_event) if behind is not None else 0
                moved = self._oneshot(self._live, self.nbytes, handle, self.device.index, event)
            else:
                moved = self._calls(target, behind)
        except NotMoved as error:
            if not error.unmapped:
                raise ArenaError(f"the old weights stay live: {error}") from None
            self._restore(error)
        self._current = target
        return moved

    def _calls(self, target: int, behind: torch.cuda.Event | None) -> Moved:
        started = time.perf_counter()
        if behind is not None:
            behind.synchronize()
        else:
            torch.cuda.synchronize(self.device)
        waited = time.perf_counter()
        try:
            check("cuMemUnmap", driver.cuMemUnmap(self._live, self.nbytes))
        except CudaError as error:
            raise NotMoved(str(error), unmapped=False) from None
        unmapped = time.perf_counter()
        try:
            self._map(self._live, target)
        except CudaError as error:
            raise NotMoved(str(error), unmapped=True) from None
        return Moved(waited - started, unmapped - waited, 0.0, time.perf_counter() - unmapped)

    def _restore(self, cause: NotMoved) -> NoReturn:
        driver.cuMemUnmap(self._live, self.nbytes)  # it may be mapped without access
        try:
            self._map(self._live, self._current)
        except CudaError as error:
            raise ArenaLost(f"no weights are live: {cause}, and mapping them back: {error}") from None
        raise ArenaError(f"the old weights stay live: {cause}") from None

    def _add_set(self) -> None:
        free, _ = torch.cuda.mem_get_info(self.device)
        try:
            self._handles.append(check("cuMemCreate", driver.cuMemCreate(self.nbytes, self._properties, 0)))
        except CudaError as error:
            missing = max(0, self.nbytes - free) / 2**30
            raise ArenaError(
                f"a second set of weights needs {self.nbytes / 2**30:.2f} GiB on {self.device}, "
                f"{free / 2**30:.2f} GiB are free, {missing:.2f} GiB are missing ({error})"
            ) from None
        self._own.append(self._reserve())
        self._map(self._own[-1], len(self._handles) - 1)

    def _reserve(self) -> int:
        return int(check("cuMemAddressReserve", driver.cuMemAddressReserve(self.nbytes, 0, 0, 0)))

    def _map(self, address: int, index: int) -> None:
        check("cuMemMap", driver.cuMemMap(address, self.nbytes, 0, self._handles[index], 0))
        access = driver.CUmemAccessDesc()
        access.location = self._location
        access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        check("cuMemSetAccess", driver.cuMemSetAccess(address, self.nbytes, [access], 1))

    def _tensor(self, address: int) -> torch.Tensor:
        return torch.as_tensor(_Bytes(address, self.nbytes), device=self.device)
