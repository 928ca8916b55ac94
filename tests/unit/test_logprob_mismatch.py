"""Tokens of lag 0 are watched: which of them count, and what is said when their numbers are not the trainer's."""

import dataclasses
import logging

import msgspec
import pytest
import torch
from rollout_samples import make_config, make_rollout

from inflight.config import GateConfig, ModelConfig
from inflight.named import find
from inflight.rollout.gate import gate_group
from inflight.trainer.advantage import ADVANTAGES
from inflight.trainer.batch import collate
from inflight.trainer.logprob_mismatch import PROMPTS_AT_ONCE, LogprobMismatch, coarser
from inflight.types import PrefillSpan, RolloutGroup
from inflight.weights.publish.comparison import NumbersDiffer

LENGTH = 6


def watched(tmp_path, mode="warn", dtype="float32", **rollout):
    config = make_config(tmp_path, **rollout)
    trainer = dataclasses.replace(config.trainer, compare_lag_0=mode, autocast=dtype == "bfloat16")
    config = dataclasses.replace(config, trainer=trainer, model=ModelConfig("tiny", dtype="float32"))
    return LogprobMismatch(config, torch.device("cpu"))


def batch_of(first, count=PROMPTS_AT_ONCE, spans=((0, 4),), **turn):
    """Sequences of a prompt of their own each, with recorded log-probabilities that differ, judged at version 4."""
    source = torch.Generator().manual_seed(first)
    members = [
        msgspec.structs.replace(
            make_rollout(
                "g",
                index,
                spans,
                LENGTH,
                logprobs=(-4 * torch.rand(LENGTH, generator=source) - 0.05).tolist(),
                **turn,
            ),
            prompt_ids=[5, 6, first + index],
        )
        for index in range(count)
    ]
    group = RolloutGroup(group_id="g", prompt_key="k", rollouts=members)
    gated = gate_group(group, 4, GateConfig())
    return collate([gated], advantage=find("group_mean", ADVANTAGES, "a"), normalise="token", max_tokens=8)


def computed(batch, by=0.0):
    """What the trainer finds: off by so much, up and down."""
    signs = 1 - 2 * (torch.arange(batch.input_ids.shape[1]) % 2)
    return batch.behaviour_logprobs + by * signs * batch.completion_mask


def test_equal_numbers_agree_once_there_are_enough_prompts(tmp_path, caplog):
    mismatch = watched(tmp_path)
    for first in (0, 10):
        part = batch_of(first, count=10)
        mismatch.add(computed(part, 1e-6), part)
        if not first:
            assert mismatch.judge() == {}, "ten prompts are too few"
    told = mismatch.judge()["lag_0"]
    assert (told["tokens"], told["agrees"]) == (20 * LENGTH, True)
    assert told["largest"] == pytest.approx(1e-6, rel=0.5)
    assert mismatch.judge() == {}
    mismatch.require()
    assert not caplog.records


@pytest.mark.parametrize(("dtype", "by"), [("float32", 1e-3), ("bfloat16", 0.5)])
def test_other_numbers_are_warned_of_once(tmp_path, caplog, dtype, by):
    mismatch = watched(tmp_path, dtype=dtype)
    for first in (0, 100):
        mismatch.add(computed(part := batch_of(first), by), part)
        assert not mismatch.judge()["lag_0"]["agrees"]
        mismatch.require()
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert f"roundings of {dtype}" in record.message
    assert "the usual suspects: rope scaling" in record.message


def test_a_run_may_end_by_them(tmp_path):
    mismatch = watched(tmp_path, "stop")
    mismatch.add(computed(part := batch_of(0), 0.1), part)
    mismatch.judge()
    with pytest.raises(NumbersDiffer, match=r"tokens of lag 0 have other log-probabilities .* \(96 tokens\)"):
        mismatch.require()


def test_off_looks_at_nothing(tmp_path):
    mismatch = watched(tmp_path, "off")
    mismatch.add(computed(part := batch_of(0), 0.1), part)
    assert mismatch.judge() == {}


@pytest.mark.parametrize(
    "turn",
    [
        {"spans": ((0, 3), (2, 4))},
        {"prefill_versions": [PrefillSpan(0, 0, 3)]},
        {"prefill_versions": [PrefillSpan(0, 0, -1), PrefillSpan(0, 2, 4)]},
    ],
)
def test_sequences_of_several_versions_do_not_count(tmp_path, turn):
    """Of lag 0 though their last tokens are, their KV is older: the trainer computes what no generator has."""
    mismatch = watched(tmp_path)
    part = batch_of(0, **turn)
    assert (part.lags == 0).any()
    mismatch.add(computed(part, 0.5), part)
    assert mismatch.judge() == {}


def test_older_tokens_and_repeated_sequences_do_not_count(tmp_path):
    mismatch = watched(tmp_path)
    older = batch_of(0)
    mismatch.add(computed(older, 0.5), dataclasses.replace(older, lags=older.lags + 1))
    mismatch.add(computed(older, 0.5), dataclasses.replace(older, scales=torch.zeros_like(older.scales)))
    assert mismatch.judge() == {}


def test_later_updates_are_judged_by_what_was_before_the_first(tmp_path):
    mismatch = watched(tmp_path)
    part = batch_of(0)
    mismatch.add(computed(part, 0.5), dataclasses.replace(part, proximal_logprobs=computed(part)))
    assert mismatch.judge()["lag_0"]["agrees"]


def test_float32_on_cuda_rounds_as_tf32(tmp_path):
    config = make_config(tmp_path)
    trainer = dataclasses.replace(config.trainer, autocast=False)
    config = dataclasses.replace(config, trainer=trainer, model=ModelConfig("tiny", dtype="float32"))
    assert coarser(config, torch.device("cuda")) == "tf32"
    assert coarser(config, torch.device("cpu")) == "float32"
    with_autocast = dataclasses.replace(config, trainer=dataclasses.replace(trainer, autocast=True))
    assert coarser(with_autocast, torch.device("cuda")) == "bfloat16"
