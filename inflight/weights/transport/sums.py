"""Checksums where the bytes are: what a rank keeps is summed in the send buffer and again where it has landed.

A rank keeps strips of the send buffer, not buckets (landing.py). So it says once which runs of bytes it will keep;
before each transfer the sender sums these runs of its buffer, and the rank sums what lies in its shadow. Any harm
between the two shows: bytes that changed, that did not come, that belong elsewhere, or that were overwritten while they
were read.

The sum of a run is over its words of four bytes (fewer where it is aligned to less), as signed integers. Words that lie
a GROUPth of a row apart are added first; the results are multiplied by odd pseudo-random 64-bit weights, each by its
own, and added modulo 2^64. So an exchange of words shows too, unless they were added first: in a long run, whose rows
are FOLD bytes, those lie 4,048 bytes apart, which is no page, no piece and no row of a matrix.
"""

from __future__ import annotations

import math
import threading
from array import array
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Annotated

import msgspec
import torch
from msgspec import Meta

from inflight.weights.pack import ChecksumError
from inflight.weights.transport.base import TransportError
from inflight.weights.transport.landing import Strip, split
from inflight.weights.transport.rendezvous import Board

GROUP = 32
FOLD = GROUP * 4048
PART_BYTES = 32 << 20
MAX_GROUPS = 1 << 20
"""Results of a run before they are weighted: 24 MiB with the weights and the products."""
MAX_RUNS = 1 << 18
_WORDS = {4: torch.int32, 2: torch.int16, 1: torch.int8}
_Count = Annotated[int, Meta(ge=0, lt=1 << 62)]


class Run(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """`rows` times `width` bytes, `pitch` bytes apart from byte `source` of the send buffer on, in words of `word`."""

    source: _Count
    width: Annotated[int, Meta(gt=0, lt=1 << 62)]
    rows: Annotated[int, Meta(gt=0, lt=1 << 32)]
    pitch: _Count
    word: int

    def objection(self, nbytes: int) -> str:
        """Why it can't be summed in a buffer of `nbytes`; empty when it can."""
        if self.word not in _WORDS or math.gcd(self.source, self.width, self.pitch) % self.word:
            return f"words of {self.word} bytes"
        if self.source + (self.rows - 1) * self.pitch + self.width > nbytes:
            return f"bytes beyond the {nbytes} that there are"
        if self.rows * _row_groups(self.width, self.word) > MAX_GROUPS:
            return "more than is summed at once"
        return ""


def cut(strip: Strip) -> Iterator[Strip]:
    """The strip in parts that can be summed at once."""
    if strip.width < FOLD:
        rows = min(PART_BYTES // strip.width, MAX_GROUPS // _row_groups(strip.width, _word(strip)))
        yield from split(strip, rows * strip.width)
        return
    for row in range(strip.rows):
        start = strip.part_of_row(row, 0, FOLD)
        whole, rest = divmod(strip.width, FOLD)
        yield from split(Strip(start.source, start.target, FOLD, whole, FOLD, FOLD), PART_BYTES)
        if rest:
            yield strip.part_of_row(row, whole * FOLD, rest)


def sum_of(buffer: torch.Tensor, at: int, pitch: int, run: Run, out: torch.Tensor) -> None:
    """Queues the sum of a run that lies in flat uint8 `buffer` from byte `at` on, with rows `pitch` bytes apart.

    `out`: int64 `[]`, on the device that is to do it; a buffer on the host is copied there.
    """
    columns = run.width // run.word
    group = math.gcd(columns, GROUP)
    words = buffer[at : at + (run.rows - 1) * pitch + run.width].view(_WORDS[run.word])
    rows = words.as_strided((run.rows, group, columns // group), (pitch // run.word, columns // group, 1))
    grouped = rows.to(out.device).sum(1, dtype=torch.int64).view(-1)
    torch.sum(grouped.mul_(_weights(out.device)[: grouped.numel()]), dim=0, out=out)


def read_runs(encoded: bytes, who: str, nbytes: int) -> tuple[Run, ...]:
    """What a rank asks for. Raises TransportError unless all of it can be done."""
    try:
        runs = msgspec.msgpack.decode(encoded, type=Annotated[list[Run], Meta(max_length=MAX_RUNS)])
    except msgspec.MsgspecError as error:
        raise TransportError(f"send: {who} does not say what it keeps: {error}") from None
    if sum(run.rows * run.width for run in runs) > 4 * nbytes:  # a rank keeps tied weights twice at the most
        raise TransportError(f"send: {who} wants sums of more bytes than it can keep")
    for run in runs:
        if objection := run.objection(nbytes):
            raise TransportError(f"send: {who} wants a sum over {objection}")
    return tuple(runs)


class BufferSums:
    """What was summed of a send buffer since it was packed: once for all ranks that keep the same and for all attempts,
    so that harm to the buffer itself is found too."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[tuple[Run, ...], bytes] = {}

    def forget(self) -> None:
        """Another version is in the buffer."""
        with self._lock:
            self._known = {}

    def of(self, buffer: torch.Tensor, runs: tuple[Run, ...]) -> bytes:
        """The sums, int64 each, in order; computed on the buffer's device, on the current stream. Waits for it."""
        with self._lock:
            known = self._known
            if runs not in known:
                out = torch.zeros(len(runs), dtype=torch.int64, device=buffer.device)
                for run, place in zip(runs, out.unbind(), strict=True):
                    sum_of(buffer, run.source, run.pitch, run, place)
                known[runs] = array("q", out.tolist()).tobytes()
            return known[runs]


class SenderSums:
    """The sender's side: tells each rank the sums of what that rank keeps."""

    def __init__(self, board: Board, size: int, sums: BufferSums | None = None) -> None:
        """`sums` are those that the buffer's other senders use; without it each transfer is summed afresh."""
        self._board, self._sums = board, sums
        self._runs: dict[int, tuple[Run, ...]] = {}
        self._ranks = range(1, size)

    def post(self, number: int, buffer: torch.Tensor) -> None:
        """Sums before transfer `number`, on the current stream, and tells the ranks; waits for it.

        Raises TransportError when a rank does not say in time what it keeps, or says what can't be.
        """
        for rank in self._ranks:
            if rank not in self._runs:
                who = f"transport rank {rank}"
                self._runs[rank] = read_runs(self._board.take(f"runs/{rank}", who, "send"), who, buffer.numel())
            if runs := self._runs[rank]:
                sums = self._sums or BufferSums()
                self._board.put(f"sums/{number}/{rank}", sums.of(buffer, runs))


class RankSums:
    """A rank's side. With `verify` false it asks for nothing and checks nothing."""

    def __init__(self, board: Board, rank: int, *, verify: bool) -> None:
        self._board, self._rank, self._verify = board, rank, verify
        self._groups: Sequence[Sequence[Strip]] | None = None
        self._parts: list[list[tuple[int, Strip, Run]]] = []
        self._out = torch.empty(0, dtype=torch.int64)
        self._left: list[tuple[int, torch.Tensor]] = []

    def begin(self, groups: Sequence[Sequence[Strip]], device: torch.device) -> None:
        """`groups`: what lands together, the same for each transfer. At first tells the sender what is kept."""
        if self._groups is None:
            self._groups = groups
            parts = [[part for strip in group for part in cut(strip)] for group in groups if self._verify]
            numbers = iter(range(sum(map(len, parts))))
            self._parts = [[(next(numbers), part, _run_of(part)) for part in group] for group in parts]
            runs = [run for group in self._parts for _, _, run in group]
            self._out = torch.zeros(len(runs), dtype=torch.int64, device=device)
            self._board.put(f"runs/{self._rank}", msgspec.msgpack.encode(runs))
        elif groups != self._groups:
            raise TransportError("receive: this rank keeps other bytes than it has told the sender")

    def add(self, group: int, target: torch.Tensor) -> None:
        """Queues the sums of a group that has landed in uint8 `target`, on the current stream. A target on the host is
        left to `check`: the host would have to wait for the stream, which ends only if the sender lives."""
        if target.device == self._out.device:
            self._sum(group, target)
        else:
            self._left.append((group, target))

    def _sum(self, group: int, target: torch.Tensor) -> None:
        for number, part, run in self._parts[group] if self._verify else ():
            sum_of(target, part.target, part.target_pitch, run, self._out[number])

    def check(self, number: int) -> None:
        """Compares, when all has landed and what `add` queued is done.

        Raises ChecksumError naming what differs, TransportError when the sender has not told its sums.
        """
        left, self._left = self._left, []
        if not self._verify:
            return
        for group, target in left:
            self._sum(group, target)
        key = f"sums/{number}/{self._rank}"
        sent = array("q", self._board.take(key, "the trainer", "receive"))
        self._board.drop(key)
        runs = [run for group in self._parts for _, _, run in group]
        if len(sent) != len(runs):
            raise ChecksumError(f"{len(sent)} checksums came for {len(runs)} runs")
        bad = [run for run, here, there in zip(runs, self._out.tolist(), sent, strict=True) if here != there]
        if bad:
            first = min(run.source for run in bad)
            many = f"{len(bad)} of {len(runs)} runs ({sum(run.rows * run.width for run in bad)} bytes)"
            raise ChecksumError(f"bytes differ from those sent in {many}, from byte {first} of the send buffer on")


def _run_of(strip: Strip) -> Run:
    return Run(strip.source, strip.width, strip.rows, strip.source_pitch, _word(strip))


def _word(strip: Strip) -> int:
    """Bytes of the words that a strip is aligned to on both sides."""
    return math.gcd(4, strip.source, strip.target, strip.width, strip.source_pitch, strip.target_pitch)


def _row_groups(width: int, word: int) -> int:
    columns = width // word
    return columns // math.gcd(columns, GROUP)


@cache
def _weights(device: torch.device) -> torch.Tensor:
    """int64 `[MAX_GROUPS]`, odd: splitmix64 of the index (Steele, Lea, Flood 2014), alike on all devices."""
    z = torch.arange(1, MAX_GROUPS + 1) * -0x61C8864680B583EB
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        z = (z ^ ((z >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return (z ^ ((z >> 31) & ((1 << 33) - 1)) | 1).to(device)
