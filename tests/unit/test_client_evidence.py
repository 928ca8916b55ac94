"""What an answer tells beside its tokens: kept sets and routed experts."""

from __future__ import annotations

import base64
import io
import json

import msgspec
import numpy as np
import pytest
from openai_server import choice
from packed_samples import packed
from rollout_samples import make_rollout

from inflight.arrays import to_msgpack
from inflight.completions import RetryableFailure, parse_turn, sampling
from inflight.config import RolloutConfig
from inflight.messages import GroupDone, decode, encode
from inflight.rollout.stream import Reader, Writer
from inflight.types import RolloutGroup, StepReward


def turn(asked=0, **changes):
    return parse_turn(json.dumps({"choices": [choice("07", **changes)]}).encode(), "g0", asked)


def npy(array):
    file = io.BytesIO()
    np.save(file, array)
    return base64.b64encode(file.getvalue()).decode()


def test_the_kept_set_is_what_was_possible():
    assert turn(3, packed_logprobs=packed([5, 7], others=[{5: -0.1, 3: -2.0}, {}])).kept == [[5, 3], [7]]


def test_a_set_as_large_as_what_was_asked_for_may_be_larger():
    assert turn(2, packed_logprobs=packed([5, 5], others=[{3: -2.0}, {}])).kept == [[], [5]]
    assert turn(2, packed_logprobs=packed([4, 5], others=[{3: -2.0, 5: -3.0}, {}])).kept == [[], [5]]


def test_nothing_is_recorded_unless_tokens_are_cut_off():
    assert turn().kept is None
    assert sampling(RolloutConfig(), 17)["logprobs"] == 0
    assert sampling(RolloutConfig(top_p=0.9), 17)["logprobs"] == 17
    assert sampling(RolloutConfig(top_p=0.9), 50_000)["logprobs"] == 20
    assert sampling(RolloutConfig(top_k=4, kept_tokens=8), 50_000)["logprobs"] == 9
    assert sampling(RolloutConfig(top_k=4, kept_tokens=0), 50_000)["logprobs"] == 0


@pytest.mark.parametrize("largest, size", [(7, 1), (300, 2)])
def test_routed_experts_go_from_the_answer_to_the_file(tmp_path, largest, size):
    array = np.arange(12).reshape(3, 2, 2).astype(np.int32)
    array[0, 0, 0] = largest
    got = turn(routed_experts=npy(array))
    assert got.routed_experts.shape == (3, 2, 2)
    assert got.routed_experts.bytes_each == size
    assert np.array_equal(np.frombuffer(got.routed_experts.data, f"<u{size}").reshape(3, 2, 2), array)
    scored = {"step_rewards": [StepReward(1, 0.5)], "teacher_logprobs": [-1.0, -2.0]}
    rollout = msgspec.structs.replace(make_rollout(), turn=got, **scored)
    group = RolloutGroup(group_id="g", prompt_key="k", rollouts=[rollout])
    assert decode(encode(GroupDone(group=group))).group == group
    with Writer(tmp_path / "r") as writer:
        writer.append(group)
    assert list(Reader(tmp_path / "r")) == [group]


def pickled():
    file = io.BytesIO()
    np.save(file, np.array([[[object()]]]), allow_pickle=True)
    return base64.b64encode(file.getvalue()).decode()


@pytest.mark.parametrize(
    "text",
    [
        "?",
        base64.b64encode(b"\\x93NUMPY").decode(),
        npy(np.zeros(3)),
        npy(np.full((1, 1, 1), -1)),
        npy(np.full((1, 1, 1), 65536)),
        npy(np.zeros((1, 1, 1))),
        pickled(),
    ],
)
def test_damaged_routing_is_refused(text):
    with pytest.raises(RetryableFailure, match="routed_experts"):
        turn(routed_experts=text)


def test_records_without_evidence_stay_as_small_as_they_were():
    assert b"kept" not in msgspec.msgpack.encode(turn(), enc_hook=to_msgpack)
