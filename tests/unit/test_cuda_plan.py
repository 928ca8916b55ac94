"""The plan must say exactly what a loader would do; the loaders here do what vLLM's do, on CPU tensors."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inflight.generator.shadow.cuda_plan import Plan, PlanError, Region, make_plan, redirected
from inflight.messages import BucketMeta, Manifest, Slot
from inflight.types import ParamMeta
from inflight.weights.transport.scatter import CopyRegion, by_bucket, clip, split

CPU = torch.device("cpu")
HIDDEN, HEADS, KV, HEAD, INNER, VOCAB, PADDED = 24, 4, 2, 6, 20, 30, 32


class Engine:
    """A flat live buffer and the parameters of one tensor-parallel rank in it, with vLLM's way of loading."""

    def __init__(self, rank: int, ranks: int, dtype: torch.dtype = torch.bfloat16) -> None:
        self.rank, self.ranks = rank, ranks
        self.q = HEADS // ranks * HEAD
        self.kv = max(1, KV // ranks) * HEAD
        self.replicas = max(1, ranks // KV)
        shapes = {
            "embed": (PADDED // ranks, HIDDEN),
            "qkv": (self.q + 2 * self.kv, HIDDEN),
            "o": (HIDDEN, self.q),
            "gate_up": (2 * INNER // ranks, HIDDEN),
            "down": (HIDDEN, INNER // ranks),
            "norm": (HIDDEN,),
        }
        self.regions, at = [], 0
        for name, shape in shapes.items():
            nbytes = torch.empty(shape, dtype=dtype, device="meta").nbytes
            self.regions.append(Region(name, at, at + nbytes))
            at += -(-nbytes // 64) * 64
        self.flat = torch.zeros(at, dtype=torch.uint8)
        self.parameters = {
            region.name: torch.nn.Parameter(
                self.flat[region.start : region.stop].view(dtype).view(shapes[region.name]), requires_grad=False
            )
            for region in self.regions
        }

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            getattr(self, f"_load_{name}")(tensor)

    def _shard(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        size = tensor.shape[dim] // self.ranks
        return tensor.narrow(dim, self.rank * size, size)

    def _load_embed(self, tensor: torch.Tensor) -> None:
        rows = PADDED // self.ranks
        first = self.rank * rows
        tensor = tensor.narrow(0, first, min(rows, VOCAB - first))
        self.parameters["embed"][: tensor.shape[0]].data.copy_(tensor)
        self.parameters["embed"][tensor.shape[0] :].data.fill_(0)

    def _load_q(self, tensor: torch.Tensor) -> None:
        self.parameters["qkv"].data.narrow(0, 0, self.q).copy_(self._shard(tensor, 0))

    def _load_k(self, tensor: torch.Tensor) -> None:
        part = tensor.narrow(0, self.rank // self.replicas * self.kv, self.kv)
        self.parameters["qkv"].data.narrow(0, self.q, self.kv).copy_(part)

    def _load_v(self, tensor: torch.Tensor) -> None:
        part = tensor.narrow(0, self.rank // self.replicas * self.kv, self.kv)
        self.parameters["qkv"].data.narrow(0, self.q + self.kv, self.kv).copy_(part)

    def _load_o(self, tensor: torch.Tensor) -> None:
        self.parameters["o"].data.copy_(self._shard(tensor, 1))

    def _load_gate(self, tensor: torch.Tensor) -> None:
        self.parameters["gate_up"].data.narrow(0, 0, INNER // self.ranks).copy_(self._shard(tensor, 0))

    def _load_up(self, tensor: torch.Tensor) -> None:
        size = INNER // self.ranks
        self.parameters["gate_up"].data.narrow(0, size, size).copy_(self._shard(tensor, 0))

    def _load_down(self, tensor: torch.Tensor) -> None:
        self.parameters["down"].data.copy_(self._shard(tensor, 1))

    def _load_norm(self, tensor: torch.Tensor) -> None:
        self.parameters["norm"].data.copy_(tensor)

    def plan(self, manifest: Manifest) -> Plan:
        return make_plan(manifest, self.load_weights, self.regions, self.flat.data_ptr(), CPU)


SHAPES = {
    "embed": (VOCAB, HIDDEN),
    "q": (HEADS * HEAD, HIDDEN),
    "k": (KV * HEAD, HIDDEN),
    "v": (KV * HEAD, HIDDEN),
    "o": (HIDDEN, HEADS * HEAD),
    "gate": (INNER, HIDDEN),
    "up": (INNER, HIDDEN),
    "down": (HIDDEN, INNER),
    "norm": (HIDDEN,),
}


def manifest_of(shapes: dict[str, tuple[int, ...]], bucket: int = 1000, dtype: str = "bfloat16") -> Manifest:
    slots, at = [], 0
    for name, shape in shapes.items():
        meta = ParamMeta(name=name, shape=shape, dtype=dtype)
        slots.append(Slot(meta=meta, offset=at))
        at += -(-meta.nbytes // 64) * 64
    buckets = [BucketMeta(offset=o, nbytes=min(bucket, at - o)) for o in range(0, at, bucket)]
    return Manifest(slots=slots, tied={}, buckets=buckets, total_bytes=at, alignment=64, checksum="none")


def sent(manifest: Manifest) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    buffer = torch.randint(0, 100, (manifest.total_bytes,), dtype=torch.uint8)
    views = {}
    for slot in manifest.slots:
        raw = buffer[slot.offset : slot.offset + slot.meta.nbytes]
        views[slot.meta.name] = raw.view(torch.bfloat16).view(slot.meta.shape)
    return buffer, views


def apply(strips: Iterable[CopyRegion], source: torch.Tensor, target: torch.Tensor) -> None:
    for strip in strips:
        for row in range(strip.rows):
            a, b = strip.source + row * strip.source_pitch, strip.target + row * strip.target_pitch
            target[b : b + strip.width] = source[a : a + strip.width]


@pytest.mark.parametrize(("rank", "ranks"), [(0, 1), (0, 2), (1, 2), (0, 4), (3, 4)])
def test_plan_does_what_the_loader_does(rank: int, ranks: int) -> None:
    engine, manifest = Engine(rank, ranks), manifest_of(SHAPES)
    buffer, views = sent(manifest)
    plan = engine.plan(manifest)
    assert not engine.flat.any(), "tracing must not write the live weights"
    planned = torch.zeros_like(engine.flat)
    apply(plan.all_strips, buffer, planned)
    engine.load_weights(views.items())
    assert torch.equal(planned, engine.flat)


@pytest.mark.parametrize("bucket", [64, 1000, 1 << 20])
def test_buckets_carry_every_strip(bucket: int) -> None:
    engine, manifest = Engine(1, 2), manifest_of(SHAPES, bucket)
    buffer, views = sent(manifest)
    planned = torch.zeros_like(engine.flat)
    per_bucket = by_bucket(engine.plan(manifest).all_strips, manifest.buckets)
    for meta, strips in zip(manifest.buckets, per_bucket, strict=True):
        apply(strips, buffer[meta.offset : meta.offset + meta.nbytes].clone(), planned)
    engine.load_weights(views.items())
    assert torch.equal(planned, engine.flat)


def test_loader_can_fill_a_shadow() -> None:
    engine, manifest = Engine(0, 2), manifest_of(SHAPES)
    _, views = sent(manifest)
    shadow = torch.full_like(engine.flat, 7)
    with redirected(engine.flat, shadow):
        engine.load_weights(views.items())
    assert not engine.flat.any()
    engine.load_weights(views.items())
    for region in engine.regions:
        assert torch.equal(shadow[region.start : region.stop], engine.flat[region.start : region.stop]), region.name


def test_missing_parameter_is_refused_by_name() -> None:
    shapes = {name: shape for name, shape in SHAPES.items() if name != "up"}
    with pytest.raises(PlanError, match=r"does not fill all of gate_up$"):
        Engine(0, 1).plan(manifest_of(shapes))


def test_another_dtype_is_refused() -> None:
    with pytest.raises(PlanError, match=r"embed: the payload has .*float32, the engine has .*bfloat16"):
        Engine(0, 1).plan(manifest_of(SHAPES, dtype="float32"))


def test_another_shape_is_refused_by_name() -> None:
    with pytest.raises(PlanError, match=r"^down does not fit the engine: |down: "):
        Engine(0, 2).plan(manifest_of({**SHAPES, "down": (HIDDEN, INNER + 4)}))


def test_a_loader_that_computes_is_refused() -> None:
    engine = Engine(0, 1)
    engine._load_norm = lambda tensor: engine.parameters["norm"].data.copy_(tensor + 1)  # type: ignore[method-assign]
    with pytest.raises(PlanError, match="norm: the loader computes"):
        engine.plan(manifest_of(SHAPES))


def test_a_loader_that_adds_is_refused() -> None:
    engine = Engine(0, 1)
    engine._load_norm = lambda tensor: engine.parameters["norm"].data.add_(1)  # type: ignore[method-assign]
    with pytest.raises(PlanError, match="norm: the loader changes live weights by"):
        engine.plan(manifest_of(SHAPES))


def test_a_transposing_loader_is_refused() -> None:
    engine = Engine(0, 1)
    engine._load_q = lambda tensor: engine.parameters["qkv"].data[:HIDDEN].copy_(tensor.t())  # type: ignore[method-assign]
    with pytest.raises(PlanError, match="q: the loader transposes"):
        engine.plan(manifest_of(SHAPES))


def test_the_same_bytes_twice_are_refused() -> None:
    engine = Engine(0, 1)
    engine._load_up = engine._load_gate  # type: ignore[method-assign]
    with pytest.raises(PlanError, match="gate and up are loaded into the same weights"):
        engine.plan(manifest_of(SHAPES))


def test_what_the_engine_does_not_take_is_refused_without_pipeline_stages() -> None:
    engine = Engine(0, 1)
    engine._load_rotary = lambda tensor: None  # type: ignore[attr-defined]
    manifest = manifest_of({**SHAPES, "rotary": (4,)})
    with pytest.raises(PlanError, match="no parameter for rotary"):
        engine.plan(manifest)
    make_plan(manifest, engine.load_weights, engine.regions, engine.flat.data_ptr(), CPU, whole=False)


strips = st.builds(
    lambda source, target, width, rows, gap, target_gap: CopyRegion(
        source, target, width, rows, (width + gap) * (rows > 1), (width + target_gap) * (rows > 1)
    ),
    *(st.integers(low, high) for low, high in ((0, 30), (0, 30), (1, 9), (1, 6), (0, 5), (0, 5))),
)


def bytes_of(parts: Iterable[CopyRegion]) -> list[tuple[int, int]]:
    return [
        (part.source + row * part.source_pitch + i, part.target + row * part.target_pitch + i)
        for part in parts
        for row in range(part.rows)
        for i in range(part.width)
    ]


@given(strips, st.integers(0, 120), st.integers(1, 60))
@settings(max_examples=400, deadline=None)
def test_clip_keeps_exactly_the_bytes_between(strip: CopyRegion, start: int, length: int) -> None:
    kept = bytes_of(clip(strip, start, start + length))
    assert kept == [pair for pair in bytes_of([strip]) if start <= pair[0] < start + length]


@given(strips, st.integers(1, 25))
@settings(max_examples=200, deadline=None)
def test_split_keeps_all_bytes_in_small_pieces(strip: CopyRegion, piece: int) -> None:
    pieces = list(split(strip, piece))
    assert all(part.nbytes <= piece for part in pieces)
    assert bytes_of(pieces) == bytes_of([strip])
