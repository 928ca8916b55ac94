"""The checksums of many runs of words in one launch; sums.py defines the checksum."""

import torch
import triton
import triton.language as tl

BLOCK = tl.constexpr(2048)
"""Words that are added at a time."""
PROGRAMS = 1 << 16
"""Most programs of a launch. Many short ones: a kernel of a decoding step waits for a multiprocessor no longer than one
of them takes."""
_WARPS = 4
_COLUMNS = tl.constexpr(6)

Row = tuple[int, int, int, int, int]
"""A run: its first byte; words from row to row, words per row and in total; bytes per word."""


class Blocks:
    """Groups of runs split into blocks, copied to the device once."""

    def __init__(self, groups: list[list[Row]], device: torch.device) -> None:
        rows = [row for group in groups for row in group]
        block = int(BLOCK.value)
        counts = torch.tensor([-(-row[3] // block) for row in rows], dtype=torch.int64)
        ends = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
        table = torch.tensor(rows, dtype=torch.int64).reshape(-1, 5)
        self._runs = torch.cat([table, ends[:-1, None]], dim=1).to(device)
        self._run_of_block = torch.repeat_interleave(torch.arange(len(rows), dtype=torch.int32), counts).to(device)
        marks = torch.tensor([0, *map(len, groups)]).cumsum(0)
        self._bounds: list[int] = ends[marks].tolist()

    def add(self, group: int, address: int, out: torch.Tensor) -> None:
        """Queues on the current stream: adds to int64 `out` `[runs]` the sums of a group at `address`, in memory of the
        device or pinned memory of the host."""
        first, stop = self._bounds[group : group + 2]
        if first < stop:
            grid = (min(PROGRAMS, stop - first),)
            add_blocks[grid](address, self._run_of_block, self._runs, out, first, stop, num_warps=_WARPS)


@triton.jit(do_not_specialize=["base", "first", "stop"])
def add_blocks(base, run_of_block, runs, out, first, stop):
    """Blocks `first` to `stop`: `run_of_block` int32 `[blocks]`, `runs` int64 `[runs, 6]` (see Row; the last is the
    run's first block), `out` int64 `[runs]`."""
    for block in range(first + tl.program_id(0), stop, tl.num_programs(0)):
        run = tl.load(run_of_block + block)
        entry = runs + run * _COLUMNS
        address = base + tl.load(entry)
        pitch = tl.load(entry + 1)
        columns = tl.load(entry + 2)
        count = tl.load(entry + 3)
        word = tl.load(entry + 4)
        begin = (block - tl.load(entry + 5)) * BLOCK
        index = begin.to(tl.uint32) + tl.arange(0, BLOCK).to(tl.uint32)
        row = begin // columns
        column = (begin - row * columns).to(tl.uint32) + tl.arange(0, BLOCK).to(tl.uint32)
        if columns >= BLOCK:  # a block has at most one end of a row: no division per word
            onward = tl.where(column >= columns.to(tl.uint32), pitch - columns, 0)
        else:
            onward = (column // columns.to(tl.uint32)).to(tl.int64) * (pitch - columns)
        offset = row * pitch + column.to(tl.int64) + onward
        words = _load(address, offset, index < count.to(tl.uint32), word)
        tl.atomic_add(out + run, tl.sum((words * _weight(index)).to(tl.int64)), sem="relaxed")


@triton.jit
def _load(address, offset, inside, word):
    """Words of `word` bytes, zero-extended."""
    if word == 4:
        words = tl.load(address.to(tl.pointer_type(tl.uint32)) + offset, inside, 0).to(tl.uint64)
    elif word == 2:
        words = tl.load(address.to(tl.pointer_type(tl.uint16)) + offset, inside, 0).to(tl.uint64)
    else:
        words = tl.load(address.to(tl.pointer_type(tl.uint8)) + offset, inside, 0).to(tl.uint64)
    return words


@triton.jit
def _weight(index):
    """As in sums.weights."""
    mixed = index + 1
    mixed = (mixed ^ (mixed >> 16)) * 0x7FEB352D
    mixed = (mixed ^ (mixed >> 15)) * 0x846CA68B
    return (mixed ^ (mixed >> 16)).to(tl.uint64)
