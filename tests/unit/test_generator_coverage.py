"""Coverage of a model by a manifest, on a small stand-in for a vLLM model: fused, sliced and padded parameters."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from torch import nn

from inflight.generator.shadow.coverage import CoverageError, check_coverage
from inflight.messages import Manifest
from inflight.types import ParamMeta
from inflight.weights.plan import plan


class Fused(nn.Module):
    """Loads as vLLM does: q and k fused, rows sliced by rank, the vocabulary padded, `head` transposed, in parts."""

    def __init__(self, tensor_parallel_size: int = 1) -> None:
        super().__init__()
        rows = 8 // tensor_parallel_size
        with torch.device("meta"):
            self.embed_tokens = nn.Embedding(16, 4)  # 11 rows and padding
            self.qk = nn.Parameter(torch.empty(2 * rows, 4))
            self.head = nn.Parameter(torch.empty(4, 6))
            self.norm = nn.Parameter(torch.empty(4))
        self.rows = rows

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            if name == "q":
                self.qk.data[: self.rows].copy_(tensor.narrow(0, 0, self.rows))
            elif name == "k":
                self.qk.data[self.rows :].copy_(tensor.narrow(0, 0, self.rows))
            elif name == "embed":
                assert tensor.shape[0] == 11
                self.embed_tokens.weight[:11].data.copy_(tensor)
                self.embed_tokens.weight[11:].data.fill_(0)
            elif name == "head":
                columns = tensor.t().contiguous()
                self.head.data[:, :2].copy_(columns[:, :2])
                self.head.data[:, 2:].copy_(columns[:, 2:6])
            elif name == "norm":
                assert tensor.shape == self.norm.shape
                self.norm.data.copy_(tensor)
            elif not name.endswith("inv_freq"):  # as vLLM, which drops some names in silence
                raise KeyError(name)


SHAPES = {"embed": (11, 4), "q": (8, 4), "k": (8, 4), "head": (6, 4), "norm": (4,)}


def manifest(shapes: dict[str, tuple[int, ...]], dtypes: dict[str, str] | None = None) -> Manifest:
    metas = [
        ParamMeta(name=name, shape=shape, dtype=(dtypes or {}).get(name, "float32")) for name, shape in shapes.items()
    ]
    return plan(metas, {}, 1 << 20, "none")


@pytest.mark.parametrize("tensor_parallel_size", [1, 2])
def test_a_whole_manifest_passes_and_allocates_nothing(tensor_parallel_size: int) -> None:
    model = Fused(tensor_parallel_size)
    check_coverage(model, manifest(SHAPES), tensor_parallel_size)
    assert all(param.is_meta for param in model.parameters())


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"k": None}, "does not cover qk of"),
        ({"head": None, "norm": None}, "does not cover head, norm of"),
        ({"extra": (3,)}, r"extra \[3\] does not fit the engine"),
        ({"rotary.inv_freq": (3,)}, r"has no parameter for rotary.inv_freq"),
        ({"q": (16, 4)}, r"q \[16, 4\] is larger than qk"),
        ({"head": (7, 4)}, r"head \[7, 4\] is larger than head"),
        ({"q": (7, 4)}, r"q \[7, 4\] does not fit"),
        ({"norm": (5,)}, r"norm \[5\] does not fit"),
        ({"embed": (12, 4)}, r"embed \[12, 4\] does not fit"),
    ],
)
def test_what_does_not_fit_is_named(change: dict[str, tuple[int, ...] | None], says: str) -> None:
    shapes = {name: shape for name, shape in {**SHAPES, **change}.items() if shape is not None}
    with pytest.raises(CoverageError, match=says):
        check_coverage(Fused(), manifest(shapes), 1)


def test_a_loaders_list_of_all_parameters_is_left_out() -> None:
    """vLLM's own words, as its AutoWeightsLoader says them: with every name that the model has."""

    class Listing(Fused):
        def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
            name, _ = next(iter(weights))
            raise ValueError(
                f"There is no module or parameter named {name!r} in Fused. The available parameters belonging to  "
                f"(Fused) are: {dict.fromkeys(SHAPES)}"
            )

    with pytest.raises(CoverageError) as refused:
        check_coverage(Listing(), manifest({"_orig_mod.q": (8, 4)}), 1)
    says = "_orig_mod.q [8, 4] does not fit the engine: There is no module or parameter named '_orig_mod.q' in Fused"
    assert str(refused.value) == says


def test_a_tensor_longer_than_all_ranks_take_together_is_refused() -> None:
    with pytest.raises(CoverageError, match=r"q .* is larger than qk"):
        check_coverage(Fused(2), manifest({**SHAPES, "q": (12, 4)}), 2)


def test_another_dtype_is_refused() -> None:
    with pytest.raises(CoverageError, match=r"norm is torch.bfloat16, norm of the engine is torch.float32"):
        check_coverage(Fused(), manifest(SHAPES, {"norm": "bfloat16"}), 1)


def test_a_parameter_written_twice_is_refused() -> None:
    class Twice(Fused):
        def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
            kept = list(weights)
            super().load_weights(kept)
            super().load_weights([kept[-1]])

    with pytest.raises(CoverageError, match="covers norm of the engine more than once"):
        check_coverage(Twice(), manifest(SHAPES), 1)
