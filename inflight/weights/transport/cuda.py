"""The CUDA driver calls of transports and arenas, and copies of strips in stream order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from cuda.bindings import driver

from inflight.weights.transport.scatter import CopyRegion


class CudaError(RuntimeError):
    """A driver call failed; the text names call and error."""


def check(call: str, result: tuple[Any, ...]) -> Any:
    """The results of a driver call without its status: nothing, one value, or a tuple. Raises CudaError."""
    status, *values = result
    if status != driver.CUresult.CUDA_SUCCESS:
        raise CudaError(f"{call}: {getattr(status, 'name', status)}")
    if not values:
        return None
    return values[0] if len(values) == 1 else tuple(values)


_contexts: dict[int, Any] = {}


def bind(device: torch.device) -> None:
    """Makes the device's primary context, which torch uses, current in this thread: driver calls need it.

    `torch.cuda.set_device` alone does nothing in a fresh thread whose device is 0 already.
    """
    torch.cuda.set_device(device)
    index = torch.cuda.current_device()
    if index not in _contexts:
        handle = check("cuDeviceGet", driver.cuDeviceGet(index))
        _contexts[index] = check("cuDevicePrimaryCtxRetain", driver.cuDevicePrimaryCtxRetain(handle))
    check("cuCtxSetCurrent", driver.cuCtxSetCurrent(_contexts[index]))


def wait(stream: torch.cuda.Stream) -> None:
    """Returns when the work queued on `stream` is done. Sleeps: synchronising a stream keeps the driver's lock busy,
    which an engine's step loop needs."""
    done = torch.cuda.Event(blocking=True)
    done.record(stream)
    done.synchronize()


def copy(strips: Iterable[CopyRegion], source: int, target: int, stream: int) -> None:
    """Queues the copy of each strip from address `source` to address `target` on `stream`; returns at once.

    Addresses may be local, a peer's that was mapped into this process, or pinned host memory.
    """
    for strip in strips:
        if strip.rows == 1:
            done = driver.cuMemcpyAsync(target + strip.target, source + strip.source, strip.width, stream)
            check("cuMemcpyAsync", done)
        else:
            check("cuMemcpy2DAsync", driver.cuMemcpy2DAsync(_order(strip, source, target), stream))


def copy_in_one_call(strips: Sequence[CopyRegion], source: int, target: int, stream: int) -> None:
    """As `copy`, but all strips of one row take one driver call; they are copied in any order, on `stream`, which is
    not the default one.

    A driver call releases the GIL. A thread beside a decoding engine then waits for it, up to the interpreter's switch
    interval, so one call per strip takes longer than copying a strip does. A driver without cuMemcpyBatchAsync (older
    than CUDA 12.8; than 13.0 with cuda-bindings 13) gets one call per strip all the same.
    """
    flat = [strip for strip in strips if strip.rows == 1]
    copy((strip for strip in strips if strip.rows > 1), source, target, stream)
    if flat:
        order = driver.CUmemcpyAttributes()
        order.srcAccessOrder = driver.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
        to = [driver.CUdeviceptr(target + strip.target) for strip in flat]
        fro = [driver.CUdeviceptr(source + strip.source) for strip in flat]
        widths = [strip.width for strip in flat]
        try:
            done = driver.cuMemcpyBatchAsync(to, fro, widths, len(flat), [order], [0], 1, stream)
        except RuntimeError:  # cuda-bindings has not found the call in the driver
            copy(flat, source, target, stream)
        else:
            check("cuMemcpyBatchAsync", done)


def _order(strip: CopyRegion, source: int, target: int) -> driver.CUDA_MEMCPY2D:
    order = driver.CUDA_MEMCPY2D()
    order.srcMemoryType = order.dstMemoryType = driver.CUmemorytype.CU_MEMORYTYPE_UNIFIED
    order.srcDevice = source + strip.source
    order.srcPitch = strip.source_pitch
    order.dstDevice = target + strip.target
    order.dstPitch = strip.target_pitch
    order.WidthInBytes = strip.width
    order.Height = strip.rows
    return order
