"""Checksums computed on the device: a rank's bytes are summed in the send buffer and again at their destination.

A rank keeps strips of the send buffer, not buckets (scatter.py). So it announces once which runs of bytes it will keep;
before each transfer the sender sums these runs of its buffer, and the rank sums the bytes in its shadow. Any corruption
between the two is detected: bytes that changed, did not arrive, belong elsewhere, or were overwritten while they were
read.

The sum of a run is over its words of four bytes (fewer for lower alignment), as unsigned integers, each multiplied by
its weight and added modulo 2^64. The weights are distinct pseudo-random numbers between 0 and 2^32. So one changed word
and two exchanged words are always detected: the sum differs by less than 2^64, and not by 0. Any other corruption is
missed by chance alone.
"""

from __future__ import annotations

import math
import threading
from array import array
from collections.abc import Sequence
from itertools import accumulate
from typing import Annotated

import msgspec
import torch
from msgspec import Meta

from inflight.error_line import first_line
from inflight.weights.pack import ChecksumError
from inflight.weights.transport.base import TransportError
from inflight.weights.transport.rendezvous import KeyValueStore
from inflight.weights.transport.scatter import CopyRegion, split

RUN_BYTES = 1 << 30
MAX_WORDS = RUN_BYTES
"""Most words of a run: their indices have 32 bits."""
MAX_RUNS = 1 << 18
HOST_BYTES = 4 << 20
"""Most bytes that a CPU sums at once; this takes 40 MiB of temporary memory, or four times that for single bytes."""
_WORDS = {4: torch.int32, 2: torch.int16, 1: torch.uint8}
_LOW = (1 << 32) - 1
_Count = Annotated[int, Meta(ge=0, lt=1 << 62)]


class Run(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """`rows` times `width` bytes, starting `pitch` bytes apart at byte `at` of a memory, in words of `word` bytes."""

    at: _Count
    width: Annotated[int, Meta(gt=0, lt=1 << 62)]
    rows: Annotated[int, Meta(gt=0, lt=1 << 32)]
    pitch: _Count
    word: int

    @property
    def nbytes(self) -> int:
        """Number of bytes that are summed."""
        return self.rows * self.width

    def objection(self, nbytes: int) -> str:
        """Why it can't be summed in a buffer of `nbytes`; empty when it can."""
        if self.word not in _WORDS or math.gcd(self.at, self.width, self.pitch) % self.word:
            return f"words of {self.word} bytes"
        if self.at + (self.rows - 1) * self.pitch + self.width > nbytes:
            return f"bytes beyond the {nbytes} that there are"
        if self.nbytes > MAX_WORDS * self.word:
            return "more than is summed at once"
        return ""


class Summing:
    """Groups of runs that one device sums repeatedly; the kernel's tables are copied to it once."""

    def __init__(self, groups: Sequence[Sequence[Run]], device: torch.device) -> None:
        self.runs = tuple(run for group in groups for run in group)
        self._marks = [0, *accumulate(map(len, groups))]
        self._blocks = None
        if not self.runs:  # without verification no kernel is loaded: loading takes the GIL from a decoding engine
            device = torch.device("cpu")
        if device.type == "cuda":
            from inflight.weights.transport.sum_kernel import Blocks

            self._blocks = Blocks([[row_of(run) for run in group] for group in groups], device)
        self._sums = torch.zeros(len(self.runs), dtype=torch.int64, device=device)
        self.take()  # returns when all tables are on the device, for any stream

    def add(self, group: int, memory: torch.Tensor) -> None:
        """Sums a group in flat uint8 `memory`, the device's or pinned memory of the host. On CUDA it is queued on the
        current stream."""
        if self._blocks is not None:
            self._blocks.add(group, memory.data_ptr(), self._sums)
            return
        for number in range(self._marks[group], self._marks[group + 1]):
            self._sums[number] += sum_on_host(memory, self.runs[number])

    def take(self) -> list[int]:
        """The sums since the last call. Waits for the current stream: work of `add` on other streams must be done."""
        taken = self._sums.clone()
        self._sums.zero_()
        return taken.tolist()


def row_of(run: Run) -> tuple[int, int, int, int, int]:
    """A run in the kernel's format, see sum_kernel.Row."""
    return run.at, run.pitch // run.word, run.width // run.word, run.nbytes // run.word, run.word


def sum_on_host(memory: torch.Tensor, run: Run) -> torch.Tensor:
    """int64 `[]`: the sum of a run of flat uint8 `memory`, both on the CPU."""
    total = torch.zeros((), dtype=torch.int64)
    index = 0
    for part in split(CopyRegion(run.at, 0, run.width, run.rows, run.pitch), HOST_BYTES):
        nbytes = (part.rows - 1) * part.source_pitch + part.width
        words = memory[part.source : part.source + nbytes].view(_WORDS[run.word])
        rows = words.as_strided((part.rows, part.width // run.word), (part.source_pitch // run.word, 1))
        values = rows.reshape(-1).to(torch.int64) & ((1 << 8 * run.word) - 1)
        total += (values * weights(index, len(values))).sum()
        index += len(values)
    return total


def weights(first: int, count: int) -> torch.Tensor:
    """int64 `[count]`: a mix of 32 bits of each index and 1, which no two share (C. Wellons, lowbias32, 2018)."""
    mixed = torch.arange(first + 1, first + 1 + count)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        mixed = ((mixed ^ (mixed >> shift)) * factor) & _LOW
    return mixed ^ (mixed >> 16)


def warm_up(device: torch.device) -> None:
    """Compiles the kernel in advance, which takes a second. Raises TransportError when that fails."""
    try:
        with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):  # an engine's own would wait
            summing = Summing([[Run(0, 256, 1, 0, 4)]], device)
            summing.add(0, torch.zeros(256, dtype=torch.uint8, device=device))
            summing.take()
    except Exception as error:  # noqa: BLE001 - any error of Triton, its compilers or the driver
        reason = first_line(error)
        raise TransportError(
            f"open: {device} can't verify what it receives ({reason}); with publish.checksum=none it does not have to"
        ) from None


def read_runs(encoded: bytes, who: str, nbytes: int) -> tuple[Run, ...]:
    """The runs that a rank has announced. Raises TransportError unless all of them can be summed."""
    try:
        runs = msgspec.msgpack.decode(encoded, type=Annotated[list[Run], Meta(max_length=MAX_RUNS)])
    except msgspec.MsgspecError as error:
        raise TransportError(f"send: {who} does not say what it keeps: {error}") from None
    if sum(run.nbytes for run in runs) > 4 * nbytes:  # a rank keeps tied weights at most twice
        raise TransportError(f"send: {who} wants sums of more bytes than it can keep")
    for run in runs:
        if objection := run.objection(nbytes):
            raise TransportError(f"send: {who} wants a sum over {objection}")
    return tuple(runs)


class BufferSums:
    """The sums of a send buffer since it was packed: shared by all ranks that keep the same runs and by all attempts,
    so that corruption of the buffer itself is detected too."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[tuple[Run, ...], bytes] = {}

    def forget(self) -> None:
        """Another version is in the buffer."""
        with self._lock:
            self._known = {}

    def of(self, buffer: torch.Tensor, summing: Summing) -> bytes:
        """The sums, int64 each, in order; computed on the buffer's device, on the current stream. Waits for it."""
        with self._lock:
            known = self._known
            if summing.runs not in known:
                summing.add(0, buffer)
                known[summing.runs] = array("q", summing.take()).tobytes()
            return known[summing.runs]


class SenderSums:
    """The sender's side: sends each rank the sums of the bytes that the rank keeps."""

    def __init__(self, store: KeyValueStore, size: int, sums: BufferSums | None = None) -> None:
        """`sums` are shared with the buffer's other senders; without it each transfer is summed anew."""
        self._store = store
        self._sums = sums
        self._kept: dict[int, Summing] = {}
        self._ranks = range(1, size)

    def post(self, number: int, buffer: torch.Tensor) -> None:
        """Sums before transfer `number`, on the current stream, and sends the sums to the ranks; waits for the device.

        Raises TransportError when a rank does not announce its runs in time, or announces invalid ones.
        """
        for rank in self._ranks:
            if rank not in self._kept:
                self._kept[rank] = self._asked(rank, buffer)
            if self._kept[rank].runs:
                sums = self._sums or BufferSums()
                self._store.put(f"sums/{number}/{rank}", sums.of(buffer, self._kept[rank]))

    def _asked(self, rank: int, buffer: torch.Tensor) -> Summing:
        who = f"transport rank {rank}"
        runs = read_runs(self._store.take(f"runs/{rank}", who, "send"), who, buffer.numel())
        alike = (summing for summing in self._kept.values() if summing.runs == runs)
        return next(alike, None) or Summing([runs], buffer.device)


class RankSums:
    """A rank's side. With `verify` false it announces nothing and checks nothing."""

    def __init__(self, store: KeyValueStore, rank: int, *, verify: bool) -> None:
        self._store = store
        self._rank = rank
        self._verify = verify
        self._groups: Sequence[Sequence[CopyRegion]] | None = None
        self._there: list[Run] = []
        self._here = Summing([], torch.device("cpu"))

    def begin(self, groups: Sequence[Sequence[CopyRegion]], device: torch.device) -> None:
        """`groups`: strips that arrive together, the same for each transfer. The first call announces the runs to the
        sender."""
        if self._groups is None:
            self._groups = groups
            parts = [[part for strip in group for part in split(strip, RUN_BYTES)] for group in groups if self._verify]
            self._there = [_run_of(part, part.source, part.source_pitch) for group in parts for part in group]
            here = [[_run_of(part, part.target, part.target_pitch) for part in group] for group in parts]
            self._here = Summing(here, device)
            self._store.put(f"runs/{self._rank}", msgspec.msgpack.encode(self._there))
        elif groups != self._groups:
            raise TransportError("receive: this rank keeps other bytes than it has announced to the sender")

    def add(self, group: int, target: torch.Tensor) -> None:
        """Queues the sums of a group that has arrived in uint8 `target`, the device's or the host's, on the current
        stream."""
        if self._verify:
            self._here.add(group, target)

    def check(self, number: int) -> None:
        """Compares the sums, after the whole transfer and all work that `add` queued.

        Raises ChecksumError that names the differing bytes, TransportError when the sender has not sent its sums.
        """
        if not self._there:  # the sender sends no sums of nothing
            return
        found = self._here.take()
        key = f"sums/{number}/{self._rank}"
        sent = array("q", self._store.take(key, "the trainer", "receive", drop=True))
        if len(sent) != len(found):
            raise ChecksumError(f"{len(sent)} checksums came for {len(found)} runs")
        bad = [run for run, here, there in zip(self._there, found, sent, strict=True) if here != there]
        if bad:
            first = min(run.at for run in bad)
            many = f"{len(bad)} of {len(found)} runs ({sum(run.nbytes for run in bad)} bytes)"
            raise ChecksumError(f"bytes differ from those sent in {many}, from byte {first} of the send buffer on")


def _run_of(strip: CopyRegion, at: int, pitch: int) -> Run:
    """One side of a strip, in words to which both sides are aligned."""
    word = math.gcd(4, strip.source, strip.target, strip.width, strip.source_pitch, strip.target_pitch)
    return Run(at, strip.width, strip.rows, pitch, word)
