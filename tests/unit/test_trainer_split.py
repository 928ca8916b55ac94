"""A batch cut for ranks, its way to them as messages, and the bound on what they do together."""

from __future__ import annotations

import subprocess
import sys
import threading
from dataclasses import fields, replace

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rollout_samples import make_config

from inflight.bus import Link, Listener
from inflight.messages import WireError, decode, encode
from inflight.messages.ranks import (
    MAX_PARCEL_BYTES,
    PIECE_BYTES,
    Learn,
    Learned,
    Piece,
    TensorData,
    Took,
    TrainerHello,
)
from inflight.trainer import budget
from inflight.trainer.batch import Batch
from inflight.trainer.coordinator import Coordinator, CoordinatorError
from inflight.trainer.packing import packed_tokens
from inflight.trainer.pieces import WINDOW, Assembly, PieceError, pieces
from inflight.trainer.split import rounds
from inflight.trainer.stats import COLUMNS, LAGS, Stats
from inflight.trainer.wire import RankDataError, from_wire, to_wire


def make_batch(sequences: int, length: int = 7) -> Batch:
    """Sequence n has n % 4 + 1 sampled tokens after a prompt of two, and n in front to recognise it by."""
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
    trained = [part for each in found for part in each if int(part.trained_mask.sum())]
    assert sorted(int(n) for part in trained for n in part.input_ids[:, 0]) == list(range(sequences))
    assert sum(int(part.trained_mask.sum()) for part in trained) == int(batch.trained_mask.sum())


LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=60)


@given(lengths=LENGTHS, tokens=st.sampled_from([40, 64, 200]), ranks=st.sampled_from([1, 2, 3]), packing=st.booleans())
def test_micro_batches_by_tokens(lengths, tokens, ranks, packing):
    """Every sequence once, none above the budget, and as many as make full rounds if there are sequences to divide."""
    if packing:
        parts = budget.mixed(lengths, tokens, ranks, packed_tokens)
        cost = packed_tokens
    else:
        parts, cost = budget.alike(lengths, tokens, ranks), budget.padded_tokens
    assert sorted(index for part in parts for index in part) == list(range(len(lengths)))
    costs = [cost([lengths[index] for index in part]) for part in parts]
    assert max(costs) <= tokens
    assert len(parts) % ranks == 0 or len(parts) == len(lengths)
    if not packing:
        assert costs == sorted(costs, reverse=True)


def test_no_more_micro_batches_than_are_needed():
    lengths = [8, 1, 5, 4, 2, 3, 8, 1]
    assert budget.alike(lengths, 16, 1) == [[0, 6], [2, 3, 5], [4, 1, 7]]
    packed = budget.mixed(lengths, 16, 1, packed_tokens)
    assert [sorted(lengths[index] for index in part) for part in packed] == [[1, 2, 5, 8], [1, 3, 4, 8]]
    assert budget.alike([5, 5, 5, 5], 20, 2) == [[0, 1], [2, 3]], "a rank has nothing to do beside one full one"
    assert budget.mixed([5, 5, 5, 5], 20, 2, packed_tokens) == [[0, 2], [1, 3]]


def test_a_sequence_above_the_budget_is_alone():
    assert budget.alike([9, 3, 2], 6, 1) == [[0], [1, 2]]
    assert budget.mixed([9, 3, 2], 6, 1, packed_tokens) == [[0], [1], [2]]


def test_rounds_by_tokens_are_what_the_ranks_get():
    batch = make_batch(9)  # of 3, 4, 5, 6, 3, … tokens with their prompts
    found = rounds(batch, 8, 2, tokens=12)
    assert [[part.lengths().tolist() for part in each] for each in found] == [
        [[6, 6], [4, 4, 3]],
        [[5, 5], [3, 3]],
    ]


def test_the_work_is_shared_evenly():
    ((first, second),) = rounds(make_batch(9), 8, 2)
    assert (first.input_ids.shape[0], second.input_ids.shape[0]) == (5, 4)


def test_a_batch_is_the_same_after_its_way():
    batch = replace(
        make_batch(3),
        kept=torch.arange(3 * 7 * 2).view(3, 7, 2),
        teacher_logprobs=torch.rand(3, 7),
        routed_experts=torch.arange(3 * 7 * 4, dtype=torch.int32).view(3, 7, 2, 2),
    )
    assembly = Assembly()
    for piece in pieces(1, batch):
        assembly.add(decode(encode(piece)))
    require_same(assembly.take(1), batch)


def require_same(unpacked, batch):
    for each in fields(Batch):
        ours, theirs = getattr(unpacked, each.name), getattr(batch, each.name)
        assert ours is theirs is None or (torch.equal(ours, theirs) and ours.dtype == theirs.dtype), each.name


def long_batch():
    """32 sequences of 8,192 tokens with kept sets of 38: 110 MB, more than a message or an outbox' share may hold."""
    batch = make_batch(32, 8192)
    return replace(batch, kept=torch.randint(0, 150_000, (32, 8192, 38)))


@pytest.fixture
def pair(tmp_path):
    """Rank 0's end with its team, and the link of another rank."""
    config = make_config(tmp_path)
    config = replace(config, trainer=replace(config.trainer, processes=2, rank_timeout_s=20.0))
    where = f"ipc://{tmp_path}/r"
    with Listener(where, config.bus) as listener, Link(where, "trainer.1", config.bus) as link:
        link.send(TrainerHello(rank=1))
        team = Coordinator(listener, config)
        team.wait_joined(20.0, "")
        yield team, link


def test_a_micro_batch_larger_than_a_message_is_sent_in_pieces(pair):
    """No faster than the rank takes them, so that it never waits whole in a socket."""
    team, link = pair
    batch, got, waiting = long_batch(), [], []

    def follow():
        assembly = Assembly()
        while not got:
            match link.receive(0.2):
                case Piece(number=number) as piece:
                    assert len(piece.data) <= PIECE_BYTES
                    taken = assembly.add(piece)
                    waiting.append(link._bytes_in)
                    link.send(Took(number=number, nbytes=taken))
                case Learn(number=number, purpose="learn"):
                    got.append(assembly.take(number))

    thread = threading.Thread(target=follow)
    thread.start()
    with team.learning([batch]):
        thread.join(60)
    require_same(got[0], batch)
    assert len(waiting) > 8
    assert max(waiting) <= (WINDOW + 1) * PIECE_BYTES


def test_a_rank_that_takes_no_pieces_is_named(pair):
    team, _ = pair
    team._bound_s = 0.5
    with pytest.raises(CoordinatorError, match=r"trainer\.1 has taken 0 bytes of its micro-batch, no more in 0\.5 s"):
        with team.learning([long_batch()]):
            pass


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ([{}, {"offset": 5}], r"\(1, 9, 5\) came in place of \(1, 9, 3\)"),
        ([{}, {"number": 2}], "came in place of"),
        ([{}, {"offset": 3, "total": 8}], "came in place of"),
        ([{"offset": 3}], "came in place of"),
        ([{}, {"offset": 3, "data": b"x" * 7}], "piece of 7 bytes at 3 of 9 does not fit"),
        ([{}, {"offset": 3}, {"offset": 6}, {"offset": 9}], "does not fit"),
    ],
)
def test_pieces_out_of_order_are_refused(changes, words):
    assembly = Assembly()
    with pytest.raises(PieceError, match=words):
        for each in changes:
            assembly.add(Piece(**({"number": 1, "offset": 0, "total": 9, "data": b"abc"} | each)))


def test_what_is_no_whole_micro_batch_is_refused():
    assembly = Assembly()
    with pytest.raises(PieceError, match="order 1: 0 of 0 bytes"):
        assembly.take(1)
    assembly.add(Piece(number=1, offset=0, total=6, data=b"abc"))
    with pytest.raises(PieceError, match="order 1: 3 of 6 bytes of order 1"):
        assembly.take(1)
    assembly.add(Piece(number=1, offset=3, total=6, data=b"abc"))
    with pytest.raises(PieceError, match="brings no micro-batch"):
        assembly.take(1)
    for total, data in ((MAX_PARCEL_BYTES + 1, b"x"), (PIECE_BYTES + 1, b"x" * (PIECE_BYTES + 1)), (9, b"")):
        with pytest.raises(WireError, match=r"total|data"):
            decode(encode(Piece(number=1, offset=0, total=total, data=data)))


def test_stats_are_the_same_after_their_way():
    stats = Stats(torch.rand(LAGS, len(COLUMNS), dtype=torch.float64), torch.rand(LAGS).double(), {"band": 3})
    got = decode(encode(Learned(number=1, loss=0.5, stats=to_wire(stats))))
    assert isinstance(got, Learned)
    unpacked = from_wire(Stats, got.stats)
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
    with pytest.raises(RankDataError, match=words):
        from_wire(Batch, to_wire(make_batch(2)) | change)
    with pytest.raises(RankDataError, match="not a Batch"):
        from_wire(Batch, {})


def test_a_tensor_of_another_kind_is_refused_on_the_wire():
    frame = msgspec.msgpack.encode({"input_ids": TensorData("object", [1], b"x")})
    assembly = Assembly()
    assembly.add(Piece(number=1, offset=0, total=len(frame), data=frame))
    with pytest.raises(PieceError, match=r"matching regex .*float64"):
        assembly.take(1)


def test_what_takes_too_long_ends_the_process_with_a_line():
    code = "import time\nfrom inflight.trainer.collective_timeout import bounded\n"
    code += "with bounded(60, lambda: 'no'): pass\nwith bounded(0.2, lambda: 'step: no answer'): time.sleep(60)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=180, check=False)
    assert (done.returncode, done.stderr) == (1, "inflight trainer: step: no answer\n")
