"""A batch cut for ranks, its way to them as messages, and the bound on what they do together."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields, replace

import pytest
import torch

from inflight.messages import WireError, decode, encode
from inflight.messages.ranks import Learn, Learned, TensorData
from inflight.trainer.batch import Batch
from inflight.trainer.parcel import ParcelError, pack, unpack
from inflight.trainer.split import rounds
from inflight.trainer.stats import COLUMNS, LAGS, Stats


def make_batch(sequences: int, length: int = 7) -> Batch:
    """Sequence n has n % 4 + 1 sampled tokens after a prompt of two, and n in front to be told by."""
    sampled = torch.arange(length) - 2
    drawn = (sampled >= 0) & (sampled <= (torch.arange(sequences) % 4)[:, None])
    ids = torch.arange(sequences)[:, None].expand(sequences, length).contiguous()
    floats = torch.rand(sequences, length)
    return Batch(ids, drawn, drawn.clone(), floats, ids.clone(), ids.clone(), floats.clone(), torch.rand(sequences))


@pytest.mark.parametrize("sequences", [1, 2, 3, 8, 9, 24])
@pytest.mark.parametrize("size", [1, 4, 64])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_sequence_is_trained_on_once_and_every_rank_takes_part_in_every_round(sequences, size, ranks):
    batch = make_batch(sequences)
    found = rounds(batch, size, ranks)
    assert all(len(each) == ranks for each in found)
    assert len(found) == -(-sequences // (size * ranks))
    assert all(part.input_ids.shape[0] <= size for each in found for part in each)
    trained = [part for each in found for part in each if part.trained_tokens]
    assert sorted(int(n) for part in trained for n in part.input_ids[:, 0]) == list(range(sequences))
    assert sum(part.trained_tokens for part in trained) == batch.trained_tokens


def test_the_work_is_shared_evenly():
    ((first, second),) = rounds(make_batch(9), 8, 2)
    assert (first.input_ids.shape[0], second.input_ids.shape[0]) == (5, 4)


def test_a_batch_is_the_same_after_its_way():
    batch = replace(
        make_batch(3), kept=torch.arange(3 * 7 * 2).view(3, 7, 2), teacher_logprobs=torch.rand(3, 7),
        routed_experts=torch.arange(3 * 7 * 4, dtype=torch.int32).view(3, 7, 2, 2),
    )  # fmt: skip
    got = decode(encode(Learn(number=1, purpose="learn", batch=pack(batch))))
    assert isinstance(got, Learn)
    unpacked = unpack(Batch, got.batch)
    for each in fields(Batch):
        ours, theirs = getattr(unpacked, each.name), getattr(batch, each.name)
        assert ours is theirs is None or (torch.equal(ours, theirs) and ours.dtype == theirs.dtype), each.name


def test_stats_are_the_same_after_their_way():
    stats = Stats(torch.rand(LAGS, len(COLUMNS), dtype=torch.float64), torch.rand(LAGS).double(), {"band": 3})
    got = decode(encode(Learned(number=1, loss=0.5, stats=pack(stats))))
    assert isinstance(got, Learned)
    unpacked = unpack(Stats, got.stats)
    assert torch.equal(unpacked.sums, stats.sums)
    assert torch.equal(unpacked.largest, stats.largest)
    assert unpacked.gated_by == {"band": 3}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"input_ids": TensorData("int64", [2, 3], b"x")}, r"input_ids of shape \[2, 3\] in int64 can't have 1 bytes"),
        ({"nonsense": TensorData("int64", [0], b"")}, "not a Batch: .*nonsense"),
    ],
)
def test_what_makes_no_batch_is_refused(change, words):
    with pytest.raises(ParcelError, match=words):
        unpack(Batch, pack(make_batch(2)) | change)
    with pytest.raises(ParcelError, match="not a Batch"):
        unpack(Batch, {})


def test_a_tensor_of_another_kind_is_refused_on_the_wire():
    frame = encode(Learn(number=1, purpose="learn", batch={"input_ids": TensorData("object", [1], b"x")}))
    with pytest.raises(WireError, match=r"matching regex .*float64"):
        decode(frame)


def test_what_takes_too_long_ends_the_process_with_a_line():
    code = "import time\nfrom inflight.trainer.bound import bounded\n"
    code += "with bounded(60, lambda: 'no'): pass\nwith bounded(0.2, lambda: 'step: no answer'): time.sleep(60)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50, check=False)
    assert (done.returncode, done.stderr) == (1, "inflight trainer: step: no answer\n")
