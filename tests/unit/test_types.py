"""Records: spans, sizes and what decoding refuses."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inflight.types import ParamMeta, RolloutGroup, VersionSpan, versions_of_tokens


def spans(*pairs):
    return [VersionSpan(start, version) for start, version in pairs]


def test_spans_expand_to_a_version_for_each_token():
    assert versions_of_tokens(spans((0, 3), (2, 4)), 5) == [3, 3, 4, 4, 4]
    assert versions_of_tokens([], 0) == []


@pytest.mark.parametrize(
    "bad, length",
    [([], 3), (spans((1, 3)), 3), (spans((0, 3), (0, 4)), 3), (spans((0, 3), (5, 4)), 3), (spans((0, 3), (3, 4)), 3)],
)
def test_spans_that_do_not_fit_the_tokens_are_refused(bad, length):
    with pytest.raises(ValueError, match="version span"):
        versions_of_tokens(bad, length)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=60))
def test_spans_and_token_versions_are_the_same_thing(versions):
    cut = [i for i, v in enumerate(versions) if i == 0 or versions[i - 1] != v]
    assert versions_of_tokens(spans(*[(i, versions[i]) for i in cut]), len(versions)) == versions


@pytest.mark.parametrize("shape, dtype, nbytes", [((3, 5), "float32", 60), ((), "bfloat16", 2), ((7, 0), "float16", 0)])
def test_parameter_sizes(shape, dtype, nbytes):
    assert ParamMeta(name="w", shape=shape, dtype=dtype).nbytes == nbytes


@pytest.mark.parametrize(
    "frame",
    [
        {"name": "w", "shape": [2], "dtype": "int8"},
        {"name": "", "shape": [2], "dtype": "float32"},
        {"name": "w", "shape": [-1], "dtype": "float32"},
        {"name": "w", "shape": [2], "dtype": "float32", "more": 1},
        {"name": "w", "shape": [2]},
    ],
)
def test_decoding_refuses_what_is_not_a_parameter(frame):
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(frame), type=ParamMeta)


def test_a_group_needs_a_rollout():
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(
            msgspec.msgpack.encode({"group_id": "g", "prompt_key": "k", "rollouts": []}), type=RolloutGroup
        )
