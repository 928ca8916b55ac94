"""Sums of what a rank keeps, over the real rendezvous: the test does the copying; the kernel runs in Triton's
interpreter."""

import os
import struct
import subprocess
import sys
import threading
from dataclasses import replace

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inflight.messages import BucketMeta
from inflight.weights.pack import ChecksumError
from inflight.weights.transport import checksum_of, sums
from inflight.weights.transport.base import TransportError
from inflight.weights.transport.rendezvous import KeyValueStore
from inflight.weights.transport.scatter import CopyRegion, by_bucket, from_buffer
from inflight.weights.transport.sums import (
    MAX_WORDS,
    BufferSums,
    RankSums,
    Run,
    SenderSums,
    Summing,
    row_of,
    sum_on_host,
    warm_up,
    weights,
)

CPU = torch.device("cpu")
FOLD = 32 * 4048
NBYTES = 4 * FOLD
# As a rank of two has it: whole parameters, the left half of a matrix' rows, one that is aligned to two bytes.
STRIPS = (
    CopyRegion(0, 256, 3 * FOLD // 2),
    CopyRegion(3 * FOLD // 2, 2 * FOLD, 1024, 40, 2048, 1024),
    CopyRegion(3 * FOLD + 4, 3 * FOLD + 6, 20),
    CopyRegion(3 * FOLD + 512, 3 * FOLD + 1024, 4096),
)


def random_bytes(nbytes=NBYTES, seed=0):
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def view(flat, at, strip, pitch):
    return flat.as_strided((strip.rows, strip.width), (pitch or strip.width, 1), at)


def copy(strips, source, target):
    for strip in strips:
        there = view(source, strip.source, strip, strip.source_pitch)
        view(target, strip.target, strip, strip.target_pitch).copy_(there)


class Pair:
    """Both ends over a real store; `groups` is what lands together."""

    def __init__(self, groups=None, *, verify=True, size=2, timeout_s=10):
        store = KeyValueStore("", timeout_s)
        self.groups = [[strip] for strip in STRIPS] if groups is None else groups
        self.buffer_sums = BufferSums()
        self.sender = SenderSums(store, size, self.buffer_sums)
        self.stores = [KeyValueStore(store.address, timeout_s) for _ in range(1, size)]
        self.ranks = [RankSums(each, rank + 1, verify=verify) for rank, each in enumerate(self.stores)]
        self.number = 0

    def transfer(self, source, harm=lambda source, target: None, *, copied=copy, packed=True):
        """One transfer to all ranks; `harm` comes between the sender's sums and the copying."""
        for rank in self.ranks:
            rank.begin(self.groups, CPU)
        if packed:
            self.buffer_sums.forget()
        self.sender.post(self.number, source)
        target = torch.zeros(NBYTES, dtype=torch.uint8)
        harm(source, target)
        for rank in self.ranks:
            for index, group in enumerate(self.groups):
                copied(group, source, target)
                rank.add(index, target)
        number, self.number = self.number, self.number + 1
        for rank in self.ranks:
            rank.check(number)


def test_what_arrived_as_it_was_sent_passes_time_after_time():
    pair = Pair(size=3)
    for seed in range(3):
        pair.transfer(random_bytes(seed=seed))


@pytest.mark.parametrize("bit", [0, 7])
@pytest.mark.parametrize("at", [0, FOLD + 3, 3 * FOLD // 2 + 2048 * 39 + 1023, 3 * FOLD + 19, 3 * FOLD + 512 + 4095])
def test_one_bit_anywhere_is_found_and_the_next_transfer_passes(at, bit):
    pair = Pair()

    def harm(source, target):
        source[at] ^= 1 << bit

    with pytest.raises(ChecksumError, match="bytes differ from those sent in 1 of"):
        pair.transfer(random_bytes(), harm)
    pair.transfer(random_bytes())


def test_bytes_that_the_rank_does_not_keep_do_not_matter():
    def harm(source, target):
        source[3 * FOLD // 2 + 1024] ^= 1  # the right half of a row
        source[3 * FOLD] ^= 1

    Pair().transfer(random_bytes(), harm)


@pytest.mark.parametrize("part", [0, 1, 3])
def test_a_truncated_copy_is_found(part):
    def short(strips, source, target):
        cut_off = [replace(strip, width=strip.width - 64) if strip == STRIPS[part] else strip for strip in strips]
        copy(cut_off, source, target)

    with pytest.raises(ChecksumError, match="in 1 of"):
        Pair().transfer(random_bytes(), copied=short)


@pytest.mark.parametrize("by", [2, 256, 4096])
@pytest.mark.parametrize("end", ["source", "target"])
def test_a_wrong_offset_is_found(end, by):
    def shifted(strips, source, target):
        copy([replace(strip, **{end: getattr(strip, end) + by}) for strip in strips], source, target)

    with pytest.raises(ChecksumError):
        Pair([[STRIPS[0]]]).transfer(random_bytes(), copied=shifted)


def test_a_wrong_pitch_is_found():
    def slanted(strips, source, target):
        copy([replace(strip, source_pitch=2056) if strip.rows > 1 else strip for strip in strips], source, target)

    with pytest.raises(ChecksumError, match="in 1 of"):
        Pair().transfer(random_bytes(), copied=slanted)


def test_a_buffer_that_is_overwritten_during_the_copying_is_found():
    """The trainer's next version over it, when the first strip is there already."""

    def overwritten(strips, source, target):
        copy(strips, source, target)
        if strips == [STRIPS[0]]:
            source.copy_(random_bytes(seed=9))

    with pytest.raises(ChecksumError, match=f"from byte {STRIPS[1].source}"):
        Pair().transfer(random_bytes(), copied=overwritten)


def test_harm_to_the_buffer_is_found_at_every_attempt_and_gone_with_the_next_version():
    pair, source = Pair(), random_bytes()
    for _ in range(2):
        with pytest.raises(ChecksumError):
            pair.transfer(source, lambda source, target: source[0].bitwise_or_(1), packed=pair.number == 0)
    pair.transfer(source)


def test_ranks_that_keep_the_same_are_summed_once(monkeypatch):
    pair, summed = Pair(size=4), []

    def noting(buffer, run):
        summed.append(buffer)
        return sum_on_host(buffer, run)

    monkeypatch.setattr(sums, "sum_on_host", noting)
    source = random_bytes()
    pair.transfer(source)
    runs = len(pair.ranks[0]._here.runs)
    assert len(summed) == runs * (1 + 3)
    assert sum(buffer is source for buffer in summed) == runs


@pytest.mark.parametrize("distance", [4, 64, 512, 4096, 16384, 65536, 1 << 20])
def test_words_that_change_places_are_found(distance):
    """At any distance that a page, a piece of a copy or a row of a matrix can have."""
    flat, at = random_bytes(32 * FOLD), 8192
    run = Run(0, FOLD, 32, FOLD, 4)
    before = sum_on_host(flat, run)
    flat[at : at + 4], flat[at + distance : at + distance + 4] = (
        flat[at + distance : at + distance + 4].clone(),
        flat[at : at + 4].clone(),
    )
    assert sum_on_host(flat, run) != before


def test_highest_bits_of_two_words_do_not_cancel_out():
    flat = random_bytes(2 * FOLD)
    run = Run(0, FOLD, 2, FOLD, 4)
    before = sum_on_host(flat, run)
    flat[3] ^= 128
    flat[4 * 50 + 3] ^= 128
    assert sum_on_host(flat, run) != before


def test_weights_are_distinct_and_none_is_zero():
    """All of one block of indices, and of one that ends where they do."""
    for first in (0, MAX_WORDS - (1 << 20)):
        found = weights(first, 1 << 20)
        assert len(found.unique()) == len(found)
        assert 0 < int(found.min()) < int(found.max()) < 1 << 32


def test_a_sum_is_what_the_text_says(monkeypatch):
    """By plain integers: the figures must not depend on torch, device, threads or how much is summed at once."""
    monkeypatch.setattr(sums, "HOST_BYTES", 500)
    mask = (1 << 32) - 1

    def weight(index):
        z = index + 1
        z = (z ^ z >> 16) * 0x7FEB352D & mask
        z = (z ^ z >> 15) * 0x846CA68B & mask
        return z ^ z >> 16

    flat = random_bytes(5 * 256)
    for word, code in ((4, "I"), (2, "H"), (1, "B")):
        run = Run(8, 240, 5, 256, word)
        rows = [struct.unpack_from(f"<{240 // word}{code}", flat.numpy().tobytes(), 8 + 256 * row) for row in range(5)]
        words = [value for row in rows for value in row]
        expected = sum(weight(index) * value for index, value in enumerate(words))
        assert int(sum_on_host(flat, run)) & ((1 << 64) - 1) == expected & ((1 << 64) - 1)


KERNEL_RUNS = [
    [Run(0, 300_000, 1, 0, 4)],
    [],
    [Run(1024, 3584, 50, 8192, 4), Run(2, 7166, 40, 8192, 2), Run(1, 129, 100, 130, 1)],
    [Run(4, 20_000, 10, 24_000, 4), Run(500_000, 4, 1, 0, 4), Run(8, 2048 * 4, 4, 2048 * 4, 4)],
]


def run_kernel():
    """In a process of its own, where Triton interprets: the kernel's sums of each group, and a CPU's."""
    from inflight.weights.transport import sum_kernel

    memory = random_bytes(1 << 20)
    runs = [run for group in KERNEL_RUNS for run in group]
    here = Summing(KERNEL_RUNS, CPU)
    blocks = sum_kernel.Blocks([[row_of(run) for run in group] for group in KERNEL_RUNS], CPU)
    for programs in (1 << 16, 3):  # one for each block, and several blocks for one
        sum_kernel.PROGRAMS = programs
        out = torch.zeros(len(runs), dtype=torch.int64)
        for group in range(len(KERNEL_RUNS)):
            assert not out[here._marks[group] :].any(), "another group was summed as well"
            blocks.add(group, memory.data_ptr(), out)
            here.add(group, memory)
        assert out.tolist() == here.take()
        assert out.all()


def test_the_kernel_sums_as_a_cpu_does():
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "alike\n"), done.stderr


def test_a_device_that_can_not_sum_is_reported_in_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "inflight.weights.transport.sum_kernel", None)
    with pytest.raises(TransportError, match=r"open: cuda can't verify .* \(.*\); with publish\.checksum=none"):
        warm_up(torch.device("cuda"))


def test_what_is_too_long_for_one_run_is_several(monkeypatch):
    monkeypatch.setattr(sums, "RUN_BYTES", 4096)
    pair = Pair()
    pair.transfer(random_bytes())
    runs = pair.ranks[0]._there
    assert len(runs) > len(STRIPS)
    assert max(run.nbytes for run in runs) <= 4096
    assert sum(run.nbytes for run in runs) == sum(strip.nbytes for strip in STRIPS)
    with pytest.raises(ChecksumError, match="in 1 of"):
        pair.transfer(random_bytes(), lambda source, target: source[5000].bitwise_xor_(1))


def test_groups_of_buckets_are_the_same_bytes():
    """As NCCL has them: strips cut where buckets end."""
    buckets = [BucketMeta(offset=at, nbytes=min(100_000, NBYTES - at)) for at in range(0, NBYTES, 100_000)]
    groups = [from_buffer(parts, bucket) for parts, bucket in zip(by_bucket(STRIPS, buckets), buckets, strict=True)]
    assert sum(strip.nbytes for group in groups for strip in group) == sum(strip.nbytes for strip in STRIPS)
    Pair(groups).transfer(random_bytes())
    with pytest.raises(ChecksumError):
        Pair(groups).transfer(random_bytes(), lambda source, target: source[99_999].bitwise_xor_(1))


def test_a_rank_that_verifies_nothing_asks_for_nothing():
    pair = Pair(verify=False)
    for _ in range(3):
        pair.transfer(random_bytes(), lambda source, target: source[0].bitwise_xor_(1))
    assert not any(pair.stores[0].tcp.check([f"sums/{number}/1"]) for number in range(3)), "nothing piles up"


def test_who_keeps_nothing_to_sum_asks_no_device():
    """On CUDA it would load a kernel for it, and Triton, while the engine decodes."""
    summing = sums.Summing([[], []], torch.device("cuda"))
    summing.add(1, torch.zeros(4, dtype=torch.uint8))
    assert summing.take() == []


def test_a_rank_that_verifies_but_keeps_nothing_waits_for_no_sums():
    """The sender tells it none."""
    pair = Pair([[], []], timeout_s=0.5)
    pair.transfer(random_bytes())


@pytest.mark.parametrize(
    ("kind", "asked", "what"),
    [
        ("gloo", "auto", "crc32"),
        ("gloo", "always", "crc32"),
        ("gloo", "none", "none"),
        ("ipc", "auto", "none"),
        ("ipc", "always", "sum64"),
        ("ipc", "none", "none"),
        ("nccl", "auto", "none"),
        ("nccl", "always", "sum64"),
        ("nccl", "none", "none"),
    ],
)
def test_what_is_verified(kind, asked, what):
    assert checksum_of(kind, asked) == what


def test_a_rank_may_not_keep_other_bytes_than_it_said():
    pair = Pair()
    pair.transfer(random_bytes())
    with pytest.raises(TransportError, match="keeps other bytes"):
        pair.ranks[0].begin([[STRIPS[0]]], CPU)


@pytest.mark.parametrize(
    ("text", "asked"),
    [
        ("does not say what it keeps", b"\xc1"),
        ("does not say what it keeps", msgspec.msgpack.encode([[0, 4, 1, 0]])),
        ("does not say what it keeps", msgspec.msgpack.encode([[-4, 4, 1, 0, 4]])),
        ("words of 3 bytes", msgspec.msgpack.encode([[0, 3, 1, 0, 3]])),
        ("words of 4 bytes", msgspec.msgpack.encode([[2, 4, 1, 0, 4]])),
        ("bytes beyond the", msgspec.msgpack.encode([[NBYTES - 4, 8, 1, 0, 4]])),
        ("bytes beyond the", msgspec.msgpack.encode([[0, 4, 3, NBYTES, 4]])),
        ("more bytes than it can keep", msgspec.msgpack.encode([[0, NBYTES, 5, 0, 4]])),
    ],
)
def test_what_a_rank_asks_for_is_not_trusted(text, asked):
    pair = Pair()
    pair.stores[0].put("runs/1", asked)
    with pytest.raises(TransportError, match=f"send: transport rank 1 .*{text}"):
        pair.sender.post(0, random_bytes())


NUMBERS = st.one_of(st.integers(-2, 70), st.integers(3000, 5000), st.integers(-(1 << 63), (1 << 64) - 1))
ASKED = st.lists(st.lists(NUMBERS, min_size=4, max_size=6), max_size=3).map(msgspec.msgpack.encode)


@settings(max_examples=2000, deadline=None)
@given(st.one_of(st.binary(max_size=40), ASKED))
def test_whatever_a_rank_asks_for_is_refused_or_can_be_summed(asked):
    try:
        runs = sums.read_runs(asked, "transport rank 1", 4096)
    except TransportError:
        return
    assert len(BufferSums().of(torch.ones(4096, dtype=torch.uint8), Summing([runs], CPU))) == 8 * len(runs)


def test_a_rank_that_says_nothing_is_named():
    pair = Pair()
    pair.sender._store.timeout_s = 0.2
    with pytest.raises(TransportError, match=r"send: transport rank 1 did not answer within 0\.2 s"):
        pair.sender.post(0, random_bytes())


def test_a_sender_that_says_nothing_is_named():
    pair = Pair()
    pair.stores[0].timeout_s = 0.2
    pair.ranks[0].begin(pair.groups, CPU)
    with pytest.raises(TransportError, match="receive: the trainer did not answer"):
        pair.ranks[0].check(0)


def test_closing_ends_the_wait():
    pair = Pair(timeout_s=60)
    pair.ranks[0].begin(pair.groups, CPU)
    threading.Timer(0.2, pair.stores[0].close).start()
    with pytest.raises(TransportError, match="closed while waiting"):
        pair.ranks[0].check(0)


def test_a_run_has_no_more_words_than_there_are_weights():
    assert Run(0, MAX_WORDS, 1, 0, 1).objection(8 * MAX_WORDS) == ""
    assert Run(0, 4 * MAX_WORDS, 1, 0, 4).objection(8 * MAX_WORDS) == ""
    assert Run(0, MAX_WORDS + 1, 1, 0, 1).objection(8 * MAX_WORDS) == "more than is summed at once"
    assert Run(0, 8, MAX_WORDS, 0, 4).objection(8 * MAX_WORDS) == "more than is summed at once"


if __name__ == "__main__":
    run_kernel()
    print("alike")
