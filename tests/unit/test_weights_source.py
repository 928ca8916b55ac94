"""What a module publishes: order, ties, refusals."""

import pytest
import torch
from torch import nn

from inflight.types import ParamMeta
from inflight.weights.source import SourceError, WeightSource


class Model(nn.Module):
    """A tied head, a frozen parameter, one persistent and one derived buffer."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.block = nn.Linear(4, 4, bias=False)
        self.norm = nn.Parameter(torch.ones(4), requires_grad=False)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("router_bias", torch.arange(3, dtype=torch.float32))
        self.register_buffer("inv_freq", torch.ones(2), persistent=False)


def test_metas_are_in_state_order_and_ties_are_sent_once():
    source = WeightSource(Model(), "bfloat16")
    assert source.metas == [
        ParamMeta(name="norm", shape=(4,), dtype="bfloat16"),
        ParamMeta(name="embed.weight", shape=(5, 4), dtype="bfloat16"),
        ParamMeta(name="block.weight", shape=(4, 4), dtype="bfloat16"),
        ParamMeta(name="router_bias", shape=(3,), dtype="float32"),
    ]
    assert source.tied == {"head.weight": "embed.weight"}
    assert [name for name, _ in source] == [meta.name for meta in source.metas]


def test_the_wire_dtype_may_be_given_as_a_torch_dtype():
    assert WeightSource(Model(), torch.float16).metas[0].dtype == "float16"
    with pytest.raises(SourceError, match="float64"):
        WeightSource(Model(), torch.float64)


def test_ties_are_found_by_memory_not_by_object():
    model = Model()
    model.head.weight = nn.Parameter(model.embed.weight.data)
    assert WeightSource(model, "bfloat16").tied == {"head.weight": "embed.weight"}


def test_different_views_of_one_storage_are_sent_separately():
    model = nn.Module()
    flat = torch.zeros(8)
    model.a, model.b = nn.Parameter(flat[:4]), nn.Parameter(flat[4:])
    model.transposed = nn.Parameter(flat.view(2, 4).t())
    source = WeightSource(model, "float32")
    assert source.tied == {}
    assert len(source.metas) == 3


def test_iteration_reads_current_values_without_gradient():
    model = Model()
    source = WeightSource(model, "bfloat16")
    with torch.no_grad():
        model.norm.fill_(7)
    model.block.weight.data = torch.full((4, 4), 3.0)
    tensors = dict(source)
    assert tensors["norm"].eq(7).all()
    assert tensors["block.weight"].eq(3).all()
    assert not tensors["embed.weight"].requires_grad


def test_what_took_the_place_of_a_module_or_a_parameter_is_read():
    model = Model()
    model.register_buffer("scale", torch.ones(3))
    source = WeightSource(model, "bfloat16")
    model.block = nn.Linear(4, 4, bias=model.block.bias is not None)
    model.norm = nn.Parameter(torch.full((4,), 5.0))
    model.scale = torch.full((3,), 6.0)
    nn.utils.parametrize.register_parametrization(model.block, "weight", Doubled())
    tensors = dict(source)
    assert torch.equal(tensors["block.weight"], 2 * model.block.parametrizations.weight.original)
    assert tensors["norm"].eq(5).all()
    assert tensors["scale"].eq(6).all()


class Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight


@pytest.mark.parametrize(
    ("name", "parameter"),
    [
        ("meta device", nn.Parameter(torch.empty(2, device="meta"))),
        ("int8", nn.Parameter(torch.zeros(2, dtype=torch.int8), requires_grad=False)),
        ("float64", nn.Parameter(torch.zeros(2, dtype=torch.float64))),
    ],
)
def test_a_parameter_that_can_not_be_sent_is_named(name, parameter):
    model = Model()
    model.block.odd = parameter
    with pytest.raises(SourceError, match=rf"block\.odd is .*{name}"):
        WeightSource(model, "bfloat16")


def test_an_integer_buffer_is_named():
    with pytest.raises(SourceError, match="num_batches_tracked is int64"):
        WeightSource(nn.BatchNorm1d(3), "bfloat16")


def test_a_module_without_parameters_is_refused():
    with pytest.raises(SourceError, match="ReLU has no parameters"):
        WeightSource(nn.ReLU(), "bfloat16")


def test_a_module_that_changed_since_is_refused_at_the_next_round():
    model = Model()
    source = WeightSource(model, "bfloat16")
    model.head.weight = nn.Parameter(model.embed.weight.detach().clone())
    with pytest.raises(SourceError, match=r"head\.weight no longer shares its storage with embed\.weight"):
        list(source)
    model.head.weight = model.embed.weight
    model.norm.data = torch.ones(9)
    with pytest.raises(SourceError, match=r"norm has changed its shape from \(4,\) to \(9,\)"):
        list(source)
    del model.norm
    with pytest.raises(SourceError, match="norm is missing"):
        list(source)


def test_a_sharded_parameter_is_gathered_one_at_a_time_in_order():
    gathered = []

    class Shard:
        """Stands for an FSDP2 DTensor: the global shape, and `full_tensor` as a collective."""

        is_meta, dtype, shape = False, torch.float32, torch.Size((2, 2))

        def __init__(self, name):
            self.name = name

        def numel(self):
            return 4

        def detach(self):
            return self

        def full_tensor(self):
            gathered.append(self.name)
            return torch.zeros(2, 2)

    class Sharded(nn.Module):
        shards = {"a": Shard("a"), "b": Shard("b")}  # noqa: RUF012

        def named_parameters(self, *_, **__):
            return iter(self.shards.items())

    source = WeightSource(Sharded(), "bfloat16")
    source._read = Sharded.shards.__getitem__
    assert gathered == []
    rounds = iter(source)
    next(rounds)
    assert gathered == ["a"]
    next(rounds)
    assert gathered == ["a", "b"]
