"""Models of the hub: through the real client, from a server that speaks the hub's protocol."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace

import pytest
from hub_server import Repository, commit_of, serving
from huggingface_hub import constants
from run_folders import written_run

from inflight import config as configuration
from inflight.config import ConfigError, ModelConfig
from inflight.exits import STOPPED
from inflight.hosted.folder import IN_MEMORY, PREFIX, named
from inflight.launcher import preflight
from inflight.launcher.compose import compose
from inflight.launcher.resume import resumed_config
from inflight.launcher.run_folder import LaunchError, RunFolder
from inflight.locked_folder import locks_of
from inflight.models import ModelError, NotDownloaded, cached, fetch, prepare
from inflight.starters.base import Command
from inflight.starters.parcel import packed, parcel_of

FIRST, SECOND = commit_of("first"), commit_of("second")
BESIDE = {
    "modeling_own.py": "raise RuntimeError('never run')\n",
    "README.md": "# A model\n",
    "pytorch_model.bin": "weights once more",
    "consolidated.safetensors": "and again",
    "onnx/model.safetensors": "and again",
    "onnx/config.json": "{}",
    "additional_chat_templates/tools.jinja": "{{ messages }}",
}
MODEL = "owner/tiny"


@pytest.fixture
def hub(tmp_path, tiny_model, monkeypatch):
    """A hub with one model of two commits, `main` at the first, and a client with an empty cache."""
    with serving() as server:
        folders = {name: tmp_path / "hub" / name for name in (FIRST, SECOND)}
        for folder in folders.values():
            shutil.copytree(tiny_model, folder)
            for name, text in BESIDE.items():
                (folder / name).parent.mkdir(exist_ok=True)
                (folder / name).write_text(text)
        _edit(folders[SECOND] / "config.json", initializer_range=0.2)
        server.repositories[MODEL] = Repository(folders, {"main": FIRST})
        before = constants.ENDPOINT
        # What HF_ENDPOINT, HF_HUB_OFFLINE and HF_HOME set; the client has read them when it was imported.
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(before, server.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        yield server


def _edit(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def _another(hub, name, **changes):
    """One more model of one commit; files that are None are removed. Its folder."""
    source = hub.repositories[MODEL].commits[FIRST]
    folder = source.parent.parent / name.replace("/", "-")
    shutil.copytree(source, folder)
    for file, text in changes.items():
        (folder / file).unlink(missing_ok=True)
        if text is not None:
            (folder / file).write_text(text)
    hub.repositories[name] = Repository({FIRST: folder}, {"main": FIRST})
    return folder


def test_a_model_is_fetched_at_a_commit_and_only_what_is_loaded_of_it(hub, tiny_model):
    assert fetch(MODEL) == FIRST
    directory = prepare(MODEL, revision=FIRST)
    files = {str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()}
    assert files == {path.name for path in tiny_model.iterdir()} | {"additional_chat_templates/tools.jinja"}
    assert (directory / "model.safetensors").read_bytes() == (tiny_model / "model.safetensors").read_bytes()


def test_a_branch_that_moves_changes_no_commit_that_was_fetched(hub):
    assert fetch(MODEL) == FIRST
    hub.repositories[MODEL].branches["main"] = SECOND
    assert fetch(MODEL) == SECOND
    assert fetch(MODEL, FIRST) == FIRST
    ranges = [
        json.loads((prepare(MODEL, revision=at) / "config.json").read_text())["initializer_range"]
        for at in (FIRST, SECOND)
    ]
    assert ranges == [0.1, 0.2]


def test_a_commit_that_is_there_is_not_asked_for_again(hub):
    fetch(MODEL)
    hub.asked.clear()
    assert fetch(MODEL, FIRST) == FIRST
    assert hub.asked == []


def test_files_missing_after_an_interrupted_download_are_fetched(hub):
    fetch(MODEL)
    (prepare(MODEL, revision=FIRST) / "tokenizer.json").unlink()
    hub.asked.clear()
    assert fetch(MODEL, FIRST) == FIRST
    assert hub.downloads() in ([], ["tokenizer.json"])  # the blob itself may be there
    assert (prepare(MODEL, revision=FIRST) / "tokenizer.json").is_file()


def test_without_the_hub_the_newest_copy_in_the_cache_is_taken(hub, monkeypatch):
    fetch(MODEL)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert fetch(MODEL) == FIRST
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert fetch(MODEL) == FIRST


@pytest.mark.parametrize("offline", [True, False])
def test_neither_cached_nor_reachable_is_one_line(hub, monkeypatch, offline):
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    says = "unset that, or run `inflight model owner/tiny` where" if offline else "http://127.0.0.1:9 can't be reached"
    assert says in _line(MODEL)


def _line(name, revision="", **settings):
    with pytest.raises(ModelError) as error:
        fetch(name, revision, **settings)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_what_the_hub_does_not_give_is_one_line(hub):
    assert "'owner/nothing' is neither a directory here nor a model of http://127" in _line("owner/nothing")
    assert "has no revision 'v9' (model.revision)" in _line(MODEL, "v9")
    _another(hub, "owner/gated")
    hub.repositories["owner/gated"].gated = True
    assert f"'owner/gated' is gated: accept its terms at {hub.url}/owner/gated" in _line("owner/gated")
    assert "model.revision is set and has no effect: model 'tiny'" in _line("tiny", "v1")


def test_a_model_without_all_of_its_safetensors_is_one_line(hub):
    _another(hub, "owner/old", **{"model.safetensors": None})
    assert "'owner/old' has no safetensors (model.safetensors or" in _line("owner/old")
    index = json.dumps({"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "config.json"}})
    _another(hub, "owner/half", **{"model.safetensors": None, "model.safetensors.index.json": index})
    assert "1 of 2 files with weights are missing: model-00001-of-00002.safetensors" in _line("owner/half")
    _another(hub, "owner/none", **{"config.json": None})
    assert "'owner/none' has no config.json" in _line("owner/none")


def test_code_of_a_model_is_fetched_and_run_where_it_is_trusted_alone(hub):
    assert "model.trust_remote_code is set and has no effect" in _line(MODEL, trust_remote_code=True)
    folder = _another(hub, "owner/own")
    own = {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnModel"}
    _edit(folder / "config.json", auto_map=own)
    assert fetch("owner/own") == FIRST  # its type is one of transformers' own
    _edit(folder / "config.json", model_type="own")
    hub.repositories["owner/own"] = Repository({SECOND: folder}, {"main": SECOND})
    needs = "needs code of its own, configuration_own.OwnConfig (config.json), which is not run by default"
    assert needs in _line("owner/own")
    assert not (prepare("owner/own", revision=SECOND) / "modeling_own.py").exists()
    assert fetch("owner/own", trust_remote_code=True) == SECOND
    assert (prepare("owner/own", revision=SECOND) / "modeling_own.py").is_file()
    _edit(folder / "config.json", auto_map={"AutoConfig": "other/one--configuration_own.OwnConfig"})
    hub.repositories["owner/own"] = Repository({FIRST: folder}, {"main": FIRST})
    shutil.rmtree(os.path.join(constants.HF_HUB_CACHE, "models--owner--own"))
    assert "from another repository, of no fixed commit" in _line("owner/own", trust_remote_code=True)


def test_a_directory_comes_before_a_model_of_the_hub(hub, tmp_path, tiny_model, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tiny_model, tmp_path / MODEL)
    assert fetch(MODEL) == ""
    assert prepare(MODEL) == tmp_path / MODEL
    assert hub.asked == []


def test_a_run_and_its_resume_have_the_commit_that_it_began_with(hub, tmp_path, monkeypatch):
    monkeypatch.setattr(preflight, "_require_task", lambda config: None)
    asked = compose("tiny", [f"model.name={MODEL}", f"run_dir={tmp_path}/run"])
    config = preflight.ready_to_start(asked)
    assert (config.model.name, config.model.revision) == (MODEL, FIRST)
    configuration.save(config)
    assert prepare(config.start_model, revision=configuration.load(config.path).model.revision).name == FIRST

    hub.repositories[MODEL].branches["main"] = SECOND
    again = [f"model.name={MODEL}", f"run_dir={tmp_path}/run", "resume=true"]
    resumed = preflight.ready_to_start(resumed_config(compose("tiny", again)))
    with RunFolder(resumed) as folder:
        assert folder.config.model.revision == FIRST
    other = preflight.ready_to_start(resumed_config(compose("tiny", [*again, "model.revision=main"])))
    with pytest.raises(ConfigError, match=f"model.revision={SECOND} is not allowed: the run in .* began with {FIRST}"):
        RunFolder(other)


def test_what_is_in_the_cache_is_found_without_the_hub(hub):
    with pytest.raises(NotDownloaded, match="is not in the cache"):
        cached(MODEL)
    fetch(MODEL)
    hub.asked.clear()
    assert cached(MODEL) == cached(MODEL, "main") == prepare(MODEL, revision=FIRST)
    assert hub.asked == []
    assert cached("tiny") == prepare("tiny")


def test_a_model_that_can_not_be_had_begins_no_run(hub, tmp_path):
    asked = compose("tiny", ["model.name=owner/nothing", f"run_dir={tmp_path}/run"])
    with pytest.raises(LaunchError, match="'owner/nothing' is neither a directory here nor a model of"):
        preflight.ready_to_start(asked)
    assert not (tmp_path / "run").exists()


def test_the_tokenizer_of_a_run_is_that_of_the_commit(hub):
    from inflight.actor.foreign import _make_tokenizer

    fetch(MODEL)
    made = _make_tokenizer(ModelConfig(name=MODEL, revision=FIRST))
    assert made.model.endswith(FIRST)
    with pytest.raises(ConfigError, match=f"revision '{SECOND}', is not in the cache"):
        _make_tokenizer(ModelConfig(name=MODEL, revision=SECOND))


@pytest.mark.parametrize("revision", ["v 1", "a\nb", "x" * 256])
def test_a_revision_is_a_word(revision):
    with pytest.raises(ConfigError, match=r"model\.revision"):
        replace(ModelConfig(name=MODEL), revision=revision)


def test_the_command_prints_where_a_model_is(hub, tmp_path):
    """In a process of its own, with the environment variables that a user sets."""
    environment = os.environ | {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0"}
    command = [sys.executable, "-m", "inflight.cli", "model", MODEL, "--revision", "main"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=180, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip().endswith(f"/home/hub/models--owner--tiny/snapshots/{FIRST}")


def test_a_download_on_another_host_ends_with_the_lease_of_its_process(hub, tmp_path):
    """Not when all files have come: the launcher that would use them is gone."""
    on = ["network.bind=127.0.0.1", "hosts.starter=ssh", "hosts.names=[h1]", "hosts.lease_s=600"]
    model = [f"model.name={MODEL}", f"model.revision={FIRST}"]
    run = written_run(compose("tiny", ["run_dir=/nowhere", *on, *model]), tmp_path / "run")
    parcel = parcel_of(run, Command("g0", "generator", [], None))
    own = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0"}
    environment = os.environ | own | {"HF_HUB_DOWNLOAD_TIMEOUT": "600"}
    hub.sends.clear()
    command = [sys.executable, "-m", "inflight.hosted"]
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as there:
        there.stdin.buffer.write(packed(parcel))
        there.stdin.flush()
        deadline = time.monotonic() + 180
        while "model.safetensors" not in hub.downloads():
            assert there.poll() is None, (hub.asked, there.stderr.read())
            assert time.monotonic() < deadline
            time.sleep(0.02)
        there.stdin.close()
        try:
            assert there.wait(40) == STOPPED
            assert "g0 ends: the launcher has ended it" in there.stderr.read()
        finally:
            there.kill()
            hub.sends.set()
    assert locks_of(IN_MEMORY, PREFIX, named(parcel)) == []
