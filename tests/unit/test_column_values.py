from __future__ import annotations

import asyncio
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal

import datasets
import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import reward_samples
from in_process import InProcess

from inflight.actor import calls
from inflight.actor.services import RewardsService, TaskService
from inflight.config import RewardConfig
from inflight.rewards import make_all
from inflight.tasks.column_values import NotCarried, from_wire, to_wire
from inflight.tasks.course import Course
from inflight.tasks.dataset import Dataset

MOMENT = datetime(2026, 3, 1, 12, 30, 15, 250)
EAST = timezone(timedelta(hours=2))
VALUES = {
    "naive": MOMENT,
    "zoned": datetime(2026, 7, 1, 12, tzinfo=EAST),
    "day": date(2026, 3, 1),
    "clock": time(12, 30, 15, 250),
    "lasts": timedelta(days=-1, seconds=5, microseconds=7),
    "price": Decimal("12.50"),
    "raw": b"\x00\xff",
    "nested": [{"day": date(2026, 3, 2), "prices": [Decimal("0.10")]}],
    "plain": {"whole": 3, "real": 0.5, "text": "x", "right": True},
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))


def as_rewards_get(task, **options):
    """The columns of the first question as a reward gets them, over the messages of the child processes."""

    async def main():
        item = await InProcess(TaskService(task, Course(task, 1)), 30.0).call(lambda call: calls.AskItem(call, 0))
        frame = calls.encode(calls.AskReward(0, 0, item.question, ["x"], [[1]], ["stop"]))
        reader = asyncio.StreamReader()
        reader.feed_data(frame)
        ask = await calls.read_to_child(reader)
        reward = RewardConfig("reward_samples:keep", options=options)
        await InProcess(RewardsService(make_all([reward])), 30.0).call(lambda call: ask)
        return reward_samples.KEPT.pop()

    return asyncio.run(main())


@pytest.mark.parametrize("streaming", [False, True])
def test_a_reward_gets_the_values_that_a_parquet_file_holds(tmp_path, streaming):
    zoned = pa.array([VALUES["zoned"]], pa.timestamp("us", "Europe/Berlin"))
    columns = {name: [value] for name, value in VALUES.items()} | {"zoned": zoned, "prompt": ["1+1="]}
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    task = Dataset(seed=0, path=str(tmp_path / "a.parquet"), prompt="prompt", shuffle=False, streaming=streaming)
    found = as_rewards_get(task)
    found = {name: found[name][0] for name in VALUES}
    assert found == VALUES
    assert {name: type(value) for name, value in found.items()} == {name: type(each) for name, each in VALUES.items()}
    assert found["zoned"].utcoffset() == timedelta(hours=2)
    assert type(found["nested"][0]["day"]) is date


def test_json_lines_give_the_same_where_json_can_express_it(tmp_path):
    plain = {"plain": VALUES["plain"], "many": [1, 2], "none": None, "answer": "7"}
    (tmp_path / "a.jsonl").write_bytes(msgspec.json.encode({"prompt": "1+1="} | plain))
    pq.write_table(pa.Table.from_pylist([{"prompt": "1+1="} | plain]), tmp_path / "a.parquet")
    lines, table = (
        as_rewards_get(Dataset(seed=0, path=str(tmp_path / f"a.{kind}"), prompt="prompt", shuffle=False))
        for kind in ("jsonl", "parquet")
    )
    assert lines == table
    assert {name: lines[name][0] for name in plain} == plain


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (1 << 64, "a whole number of more than 64 bits; write it as text"),
        ([{"deep": -(1 << 63) - 1}], "a whole number of more than 64 bits"),
        (object(), "type object is unsupported"),
        (np.float64(0.5), "type numpy.float64 is unsupported"),
        ([np.str_("text")], "type numpy.str_ is unsupported"),
        (pa.scalar(1, pa.timestamp("ns")).as_py(), "1970-01-01 00:00:00.000000001 has nanoseconds"),
        (pa.scalar(1, pa.duration("ns")).as_py(), "0 days 00:00:00.000000001 has nanoseconds"),
        ({date(2026, 3, 1): 1}, "it has a dict with a key of the type date; write it as text"),
        ([{"deep": {Decimal("1.5"): 1}}], "a key of the type Decimal"),
        ({("a", timedelta(1)): 1}, "a key of the type timedelta"),
        ({frozenset(): 1}, "a key of the type frozenset"),
        ({object(): 1}, "a key of the type object"),
        ({np.str_("text"): 1}, "type numpy.str_ is unsupported"),
        ({1 << 64: 1}, "a whole number of more than 64 bits; write it as text"),
    ],
)
def test_what_can_not_be_sent_is_refused_by_its_column(value, says):
    with pytest.raises(NotCarried, match=f"^column 'odd' can't be given to rewards: .*{says}"):
        to_wire({"fine": 1, "odd": value})


@pytest.mark.parametrize("value", [datetime.min, datetime.max.replace(tzinfo=UTC), Decimal("NaN"), Decimal("1E+400")])
def test_values_at_the_ends_are_carried(value):
    frame = msgspec.msgpack.encode(to_wire({"value": value}))
    found = from_wire(msgspec.msgpack.decode(frame))["value"]
    assert repr(found) == repr(value)


def test_keys_that_msgpack_has_are_carried():
    """Whole numbers, say, as a task of one's own may have them."""
    value = {"text": 1, 2: {-1.5: "x"}, True: 2, None: 3, b"raw": 4, ("a", (5, "b")): 5}
    frame = msgspec.msgpack.encode(to_wire({"value": value}))
    assert repr(from_wire(msgspec.msgpack.decode(frame))["value"]) == repr(value)


def test_a_column_whose_name_is_no_text_is_refused():
    with pytest.raises(NotCarried, match=r"^column 5 can't be given to rewards: a column's name is text$"):
        to_wire({"fine": 1, 5: 1})


def test_an_unknown_extension_is_refused():
    with pytest.raises(ValueError, match="extension 9 of msgpack is no value"):
        from_wire({"x": [msgspec.msgpack.Ext(9, b"1")]})
