"""Layout and bytes of a version: what any set of parameters keeps, and what a received layout may not do."""

import zlib

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from inflight.messages import BucketMeta, Manifest
from inflight.types import ParamMeta
from inflight.weights.pack import ChecksumError, Packer, PackError, checksums, content_digest, unpack, verify
from inflight.weights.plan import ALIGNMENT, ManifestError, check, digest, plan
from inflight.weights.source import WIRE_DTYPES, WeightSource

shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple)
parameters = st.lists(st.tuples(shapes, st.sampled_from(sorted(WIRE_DTYPES))), min_size=1, max_size=12)


def metas_of(parameters):
    return [ParamMeta(name=f"p{i}", shape=shape, dtype=dtype) for i, (shape, dtype) in enumerate(parameters)]


@given(parameters, st.integers(1, 2000), st.sampled_from([4, 64, ALIGNMENT]))
@settings(max_examples=60, deadline=None)
def test_a_plan_is_aligned_ordered_tiled_and_survives_the_wire(parameters, bucket_bytes, alignment):
    manifest = plan(metas_of(parameters), {"tied": "p0"}, bucket_bytes, "crc32", alignment=alignment)
    end = 0
    for slot in manifest.slots:
        assert slot.offset >= end
        assert slot.offset % alignment == 0
        end = slot.offset + slot.meta.nbytes
    assert end <= manifest.total_bytes
    assert sum(bucket.nbytes for bucket in manifest.buckets) == manifest.total_bytes
    assert all(bucket.nbytes == bucket_bytes for bucket in manifest.buckets[:-1])
    received = msgspec.msgpack.decode(msgspec.msgpack.encode(manifest), type=Manifest)
    check(received)
    assert digest(received) == digest(manifest)


@given(parameters, st.integers(1, 600), st.integers(0, 2**32 - 1))
@settings(max_examples=60, deadline=None)
def test_what_is_packed_comes_out_again_cast(parameters, bucket_bytes, seed):
    torch.manual_seed(seed)
    model = nn.Module()
    for index, (shape, dtype) in enumerate(parameters):
        model.register_parameter(f"p{index}", nn.Parameter(torch.randn(shape).to(WIRE_DTYPES[dtype])))
    source = WeightSource(model, "bfloat16")
    manifest = plan(source.metas, source.tied, bucket_bytes, "crc32")
    buffer = torch.zeros(manifest.total_bytes, dtype=torch.uint8)
    Packer(manifest, buffer).pack(source)
    views = unpack(manifest, buffer.clone())
    assert list(views) == [meta.name for meta in source.metas]
    for name, tensor in source:
        assert torch.equal(views[name], tensor.to(torch.bfloat16))
    sums = checksums(manifest, buffer)
    assert sums == [zlib.crc32(bytes(buffer[b.offset : b.offset + b.nbytes].tolist())) for b in manifest.buckets]
    assert verify(manifest, buffer, sums) == content_digest(sums)


def test_more_buckets_than_a_message_holds_are_refused_by_the_setting(monkeypatch):
    monkeypatch.setattr("inflight.weights.plan.MAX_BUCKETS", 3)
    metas = [ParamMeta(name="a", shape=(256,), dtype="float32")]
    assert len(plan(metas, {}, 342, "none").buckets) == 3
    with pytest.raises(ManifestError, match=r"publish\.bucket_bytes=341 makes more than 3 buckets .*: 342 or more"):
        plan(metas, {}, 341, "none")


def layout(**changes):
    manifest = plan(
        [ParamMeta(name="a", shape=(100,), dtype="float32"), ParamMeta(name="b", shape=(3, 5), dtype="bfloat16")],
        {"c": "a"},
        300,
        "crc32",
    )
    return msgspec.structs.replace(manifest, **changes)


def slots(**changes):
    first, second = layout().slots
    return [first, msgspec.structs.replace(second, **changes)]


def test_the_digest_tells_layouts_apart_but_not_the_order_of_ties():
    ties = {"c": "a", "d": "b"}
    assert digest(layout(tied=ties)) == digest(layout(tied=dict(reversed(ties.items()))))
    others = [layout(), layout(tied=ties), layout(checksum="none"), layout(alignment=64), layout(total_bytes=1024)]
    assert len({digest(other) for other in others}) == len(others)


@pytest.mark.parametrize(
    ("text", "changes"),
    [
        ("no parameters", {"slots": []}),
        ("overlaps", {"slots": slots(offset=256)}),
        ("b at byte 511 is not aligned", {"slots": slots(offset=511)}),
        ("b ends at byte 798 of a buffer of 768", {"slots": slots(offset=768)}),
        ("overlaps", {"slots": layout().slots[::-1]}),
        ("a is sent twice", {"slots": slots(meta=layout().slots[0].meta)}),
        ("buffer of 1024 bytes for parameters that end at 542", {"total_bytes": 1024}),
        ("alignment of 6", {"alignment": 6}),
        ("buckets cover 600 bytes of 768", {"buckets": layout().buckets[:-1]}),
        ("bucket 1 starts at byte 600", {"buckets": layout().buckets[::2]}),
        ("bucket 0 starts at byte 300", {"buckets": layout().buckets[1:]}),
        ("cover 1068 bytes", {"buckets": [*layout().buckets, BucketMeta(offset=768, nbytes=300)]}),
        ("c is tied to z, which is not sent", {"tied": {"c": "z"}}),
        ("b is sent and is tied", {"tied": {"b": "a"}}),
    ],
)
def test_a_received_layout_that_does_not_hold_together_is_refused(text, changes):
    with pytest.raises(ManifestError, match=text):
        check(layout(**changes))


def test_buckets_of_no_bytes_are_refused():
    with pytest.raises(ManifestError, match="buckets of 0 bytes"):
        plan(layout().slots[0].meta and [layout().slots[0].meta], {}, 0, "none")


def test_tied_parameters_are_packed_once_under_the_name_that_is_sent():
    model = nn.Module()
    model.embed, model.head = nn.Embedding(4, 2), nn.Linear(2, 4, bias=False)
    model.head.weight = model.embed.weight
    source = WeightSource(model, "float32")
    manifest = plan(source.metas, source.tied, 64, "none")
    buffer = torch.zeros(manifest.total_bytes, dtype=torch.uint8)
    Packer(manifest, buffer).pack(source)
    assert list(unpack(manifest, buffer)) == ["embed.weight"]
    assert manifest.tied == {"head.weight": "embed.weight"}
    assert checksums(manifest, buffer) == []
    assert verify(manifest, buffer, []) == content_digest([])


def test_packing_writes_in_place_and_views_share_the_buffer():
    model = nn.Linear(8, 8)
    source = WeightSource(model, "bfloat16")
    manifest = plan(source.metas, {}, 64, "none")
    buffer = torch.zeros(manifest.total_bytes, dtype=torch.uint8)
    views = unpack(manifest, buffer)
    Packer(manifest, buffer).pack(source)
    assert torch.equal(views["weight"], model.weight.detach().bfloat16())
    with torch.no_grad():
        model.weight.add_(1)
    Packer(manifest, buffer).pack(source)
    assert torch.equal(views["weight"], model.weight.detach().bfloat16())


def test_small_parameters_packed_together_are_those_packed_one_by_one(monkeypatch):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 64).bfloat16(), nn.LayerNorm(64))
    source = WeightSource(model, "bfloat16")
    manifest = plan(source.metas, {}, 64, "none")
    alone, together = (torch.zeros(manifest.total_bytes, dtype=torch.uint8) for _ in range(2))
    Packer(manifest, alone).pack(source)
    monkeypatch.setattr("inflight.weights.pack.SMALL_BYTES", 200)  # weights are larger, biases and norms are not
    packer = Packer(manifest, together)
    packer._grouped = True  # as on CUDA
    packer.pack(source)
    assert torch.equal(alone, together)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    packer.pack(source)
    assert not torch.equal(alone, together)
    Packer(manifest, alone).pack(source)
    assert torch.equal(alone, together)


@pytest.mark.parametrize("grouped", [False, True])
def test_what_is_marked_is_in_the_buffer_and_marks_are_not_closer_than_a_part(monkeypatch, grouped):
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(5)])
    source = WeightSource(model, "float32")
    manifest = plan(source.metas, {}, 64, "none")
    buffer, whole = (torch.zeros(manifest.total_bytes, dtype=torch.uint8) for _ in range(2))
    Packer(manifest, whole).pack(source)
    monkeypatch.setattr("inflight.weights.pack.SMALL_BYTES", 200)  # weights are larger, biases are not
    monkeypatch.setattr("inflight.weights.pack.PART_BYTES", 600)
    packer, ends = Packer(manifest, buffer), []
    packer._grouped = grouped  # as on CUDA

    def mark(end):
        ends.append(end)
        assert torch.equal(buffer[:end], whole[:end])

    together, copies = [], torch._foreach_copy_
    monkeypatch.setattr(torch, "_foreach_copy_", lambda to, fro: (together.append(len(to)), copies(to, fro)))
    packer.pack(source, mark)
    assert ends == [768, 1792, manifest.total_bytes]
    assert sum(together) == (5 if grouped else 0), "each bias once"
    assert torch.equal(buffer, whole)


def test_changed_bytes_are_found_and_the_bucket_named():
    manifest = layout()
    buffer = torch.zeros(manifest.total_bytes, dtype=torch.uint8)
    sums = checksums(manifest, buffer)
    buffer[450] ^= 1
    with pytest.raises(ChecksumError, match=r"buckets \[1\] of 3"):
        verify(manifest, buffer, sums)
    with pytest.raises(ChecksumError, match="2 checksums came for 3 buckets"):
        verify(manifest, buffer, sums[:2])


def test_a_buffer_that_does_not_fit_is_refused():
    manifest = layout()
    for buffer in (
        torch.zeros(manifest.total_bytes + 1, dtype=torch.uint8),
        torch.zeros(manifest.total_bytes, dtype=torch.int8),
        torch.zeros(2 * manifest.total_bytes, dtype=torch.uint8)[::2],
    ):
        with pytest.raises(PackError, match="contiguous uint8 buffer of 768 bytes"):
            unpack(manifest, buffer)


def test_another_source_than_the_planned_one_is_refused():
    source, other = WeightSource(nn.Linear(4, 4), "float32"), WeightSource(nn.Linear(4, 3), "float32")
    manifest = plan(source.metas, {}, 64, "none")
    buffer = torch.zeros(manifest.total_bytes, dtype=torch.uint8)
    with pytest.raises(PackError, match=r"expects weight \(4, 4\), got weight \(3, 4\)"):
        Packer(manifest, buffer).pack(other)
    with pytest.raises(PackError, match="1 parameters, the manifest 2"):
        Packer(manifest, buffer).pack(WeightSource(nn.Linear(4, 4, bias=False), "float32"))
