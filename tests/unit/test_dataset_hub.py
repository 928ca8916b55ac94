"""Data sets of the hub: through the real clients, from a server that speaks the hub's protocol."""

from __future__ import annotations

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hub_server import Repository, commit_of, serving
from huggingface_hub import constants
from test_dataset import sums

from inflight.config import ConfigError, TaskConfig
from inflight.tasks import make

FIRST, SECOND = commit_of("first"), commit_of("second")
NAME = "owner/sums"


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub with a data set of two commits, `main` at the first, and clients with empty caches."""
    with serving() as server:
        folders = {}
        for commit, count in ((FIRST, 5), (SECOND, 7)):
            folders[commit] = tmp_path / "hub" / commit
            (folders[commit] / "data").mkdir(parents=True)
            for split, rows in (("train", sums(count)), ("test", [{"prompt": "9+9=", "answer": "18", "level": 0}])):
                pq.write_table(pa.Table.from_pylist(rows), folders[commit] / "data" / f"{split}-00000-of-00001.parquet")
        server.repositories[f"datasets/{NAME}"] = Repository(folders, {"main": FIRST})
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, server.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub_cache"))
        monkeypatch.setattr(datasets.config, "HF_ENDPOINT", server.url)
        url = server.url + "/datasets/{repo_id}/resolve/{revision}/{path}"
        monkeypatch.setattr(datasets.config, "HUB_DATASETS_URL", url)
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
        set_offline(monkeypatch, False)
        yield server


def set_offline(monkeypatch, value):
    """What HF_HUB_OFFLINE sets; the clients have read it when they were imported."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", value)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", value)


def dataset(**options):
    return make(TaskConfig("dataset", {"path": NAME, "prompt": "prompt", "shuffle": False} | options), 0)


def test_a_data_set_is_read_at_a_commit_which_a_run_keeps(hub, monkeypatch):
    task = dataset(held_out_split="test")
    assert [task.item(index).prompt for index in range(len(task))] == [row["prompt"] for row in sums(5)]
    assert [task.held_out_item(index).prompt for index in range(task.held_out_size())] == ["9+9="]
    assert task.item(1).columns == {"answer": "2", "level": 1}
    assert task.settled() == {"revision": FIRST}
    assert task.contents() == {"task.options.path": f"{NAME} at {FIRST}"}

    hub.repositories[f"datasets/{NAME}"].branches["main"] = SECOND
    assert (len(dataset()), dataset().settled()) == (7, {"revision": SECOND})
    kept = dataset(revision=FIRST)
    assert (len(kept), kept.settled()) == (5, {"revision": FIRST})

    set_offline(monkeypatch, True)  # as in the processes of a run
    hub.asked.clear()
    for revision, rows in ((FIRST, 5), (SECOND, 7)):
        offline = dataset(revision=revision)
        assert (len(offline), offline.settled()) == (rows, {"revision": revision})
    with pytest.raises(ConfigError, match=f"revision='{commit_of('third')}' can't be had: .*HF_HUB_OFFLINE is set"):
        len(dataset(revision=commit_of("third")))
    assert not hub.asked


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"path": "owner/none"}, "path='owner/none', split='train' can't be had: DatasetNotFoundError: .*doesn't"),
        ({"revision": "v9"}, "revision='v9' can't be had: .*'v9' doesn't exist"),
        ({"split": "dev"}, "split='dev' can't be had: .*dev.*train"),
        ({"subset": "hard"}, "can't be had: .*'hard' not found"),
    ],
)
def test_what_is_not_there_is_one_line(hub, options, says):
    with pytest.raises(ConfigError, match=says) as caught:
        len(dataset(**options))
    assert "\n" not in str(caught.value)


def test_without_a_network_the_line_says_so(hub, monkeypatch):
    set_offline(monkeypatch, True)
    with pytest.raises(ConfigError, match=r"can't be had: .*HF_HUB_OFFLINE is set"):
        len(dataset())
