"""A real generator process, a real publisher in this one: versions go live beneath running HTTP requests."""

from __future__ import annotations

import copy
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import torch

from inflight import config as configuration
from inflight.bus import Listener, Received
from inflight.config import BusConfig, GeneratorConfig, ModelConfig, PublishConfig, RolloutConfig, RunConfig, TaskConfig
from inflight.messages import AnyMessage, RankSwapped, Status
from inflight.models import prepare
from inflight.types import Route, Routes
from inflight.weights.publish.protocol import PublishProtocol
from inflight.weights.publish.publisher import Publisher, PublishError
from inflight.weights.source import WeightSource

sys.path.insert(0, str(Path(__file__).parent.parent / "faults"))

from serving import until

pytestmark = pytest.mark.vllm

START_S = 300
KEY = "0123456789abcdef" * 2
LENGTH = 200
PROMPTS = [[3, 4, 5, 13], [6, 6], [7, 8, 9, 13, 10, 11, 14], [12]]


class Run:
    """A run folder whose trainer and launcher are this process."""

    key = KEY
    """What the generator asks for; empty: nothing."""

    def __init__(
        self,
        folder: Path,
        model: str,
        rollout: RolloutConfig | None = None,
        join_timeout_s: float = START_S,
        *,
        own_group: bool = True,
        server: dict[str, Any] | None = None,
    ) -> None:
        from transformers import AutoModelForCausalLM

        self.config = RunConfig(
            model=ModelConfig(str(prepare(model)), dtype="float32", served_name=model),  # as the launcher hands it on
            task=TaskConfig("addition"),
            run_dir=str(folder),
            rollout=rollout or RolloutConfig(),
            generator=GeneratorConfig(kv_cache_gib=0.0625, max_num_seqs=8, server=server or {}),
            bus=BusConfig(heartbeat_s=0.5, dead_after_s=15),
            publish=PublishConfig(bucket_bytes=1 << 20, join_timeout_s=join_timeout_s),
        )
        configuration.save(self.config)
        (self.config.path / "bus").mkdir()
        if self.key:
            self.config.api_key_file.write_text(self.key)
        self.policy = AutoModelForCausalLM.from_pretrained(prepare(model), dtype=torch.float32)
        self.swaps_before = 0
        """Of the trainers that were replaced."""
        self.move(0)  # what the trainer calls version 0 is not what the generator loads
        self.listener = Listener(self.config.endpoint("weights"), self.config.bus)
        self.status = Listener(self.config.endpoint("status"), self.config.bus)
        self.publisher = self.publisher_of(self.policy, 0)
        self.log = self.config.path / "g0.log"
        command = [sys.executable, "-m", "inflight.generator", "--run-dir", str(folder), "--name", "g0"]
        # A proxy that is not there: nothing on loopback may go through one.
        environment = {**os.environ, "http_proxy": "http://127.0.0.1:9", "no_proxy": ""}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, start_new_session=own_group, env=environment
            )
        try:
            self.publisher.wait_joined(START_S)
            until(lambda: "g0" in self.routes(), "g0 in the routes", 30)  # the file is written a moment later
        except BaseException:
            self.close()
            print(self.log.read_text()[-4000:])
            raise

    def routes(self) -> dict[str, Route]:
        """Who may be asked, as an actor reads it."""
        return msgspec.json.decode(self.config.routes_file.read_bytes(), type=Routes).generators

    def publisher_of(self, module: torch.nn.Module, version: int) -> Publisher:
        """A trainer of this run, as a process that starts makes one."""
        source, routes = WeightSource(module, "float32"), self.config.routes_file
        return Publisher(
            source, self.listener, self.config.publish, version=version, ranks={"g0": 1}, routes_file=routes
        )

    def replace_trainer(self, module: torch.nn.Module, version: int) -> None:
        """The trainer dies, and another one takes its place."""
        self.publisher.close()
        self.swaps_before += self.publisher.stats()["swaps"]
        self.listener.close()
        self.listener = Listener(self.config.endpoint("weights"), self.config.bus)
        self.publisher = self.publisher_of(module, version)

    def move(self, seed: int) -> None:
        """Moves every weight a little."""
        noise = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for param in self.policy.parameters():
                param.add_(0.02 * torch.randn(param.shape, generator=noise))

    def publish(self, version: int) -> None:
        """Moves every weight a little and publishes."""
        self.move(version)
        self.publisher.publish(version)
        self.publisher.flush(60)

    def ask(self, prompt: list[int], length: int = LENGTH) -> dict[str, Any]:
        """The only choice of a greedy completion."""
        body = {"prompt": prompt, "max_tokens": length, "temperature": 0, "logprobs": 0, "ignore_eos": True}
        request = urllib.request.Request(
            f"{self.routes()['g0'].url}/v1/completions",
            json.dumps({**body, "return_token_ids": True}).encode(),
            {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"},
        )
        with urllib.request.urlopen(request, timeout=120) as reply:
            return json.load(reply)["choices"][0]

    def get(self, path: str) -> str:
        """What the server answers to a GET request."""
        request = urllib.request.Request(self.routes()["g0"].url + path, headers={"Authorization": f"Bearer {KEY}"})
        with urllib.request.urlopen(request, timeout=120) as reply:
            return reply.read().decode()

    def descendants(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def wait(self, timeout_s: float) -> int:
        return self.process.wait(timeout_s)

    @staticmethod
    def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
        """Which of them still run. Python's resource tracker ends by itself, just after the generator."""
        deadline = time.monotonic() + 5
        while left := [process for process in processes if _runs(process)]:
            if time.monotonic() > deadline:
                break
            time.sleep(0.05)
        return left

    def close(self) -> None:
        self.publisher.close()
        self.listener.close()
        self.status.close()
        if self.process.poll() is None:
            for each in [*self.descendants(), psutil.Process(self.process.pid)]:
                each.kill()
            self.process.wait(10)


def _runs(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    run = Run(tmp_path_factory.mktemp("r"), "tiny")
    yield run
    run.close()


def reference(policy: Any, prompt: list[int], tokens: list[int]) -> torch.Tensor:
    """[T] the policy's own log-probabilities."""
    with torch.no_grad():
        logprobs = policy(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    return logprobs.gather(1, torch.tensor(tokens)[:, None])[:, 0]


def test_it_has_answered_requests_before_it_takes_traffic(run: Run) -> None:
    """First of this module."""
    (line,) = [line for line in run.get("/metrics").splitlines() if line.startswith("vllm:generation_tokens_total{")]
    assert float(line.split()[1]) > 0


def test_the_model_has_the_name_that_it_was_given(run: Run) -> None:
    assert [model["id"] for model in json.loads(run.get("/v1/models"))["data"]] == ["tiny"]


def require_answers(run: Run, version: int) -> None:
    """All that is sampled now is of `version` and of the trainer's weights."""
    for prompt in PROMPTS:
        choice = run.ask(prompt, 16)
        assert choice["token_versions"] == [[0, version]]
        assert choice["prefill_versions"] == [[0, 0, version]]
        expected = reference(run.policy, prompt, choice["token_ids"])
        torch.testing.assert_close(torch.tensor(choice["logprobs"]["token_logprobs"]), expected, atol=1e-5, rtol=0)


def test_the_version_that_the_trainer_starts_with_is_its_own_weights(run: Run) -> None:
    require_answers(run, 0)


def test_published_weights_are_what_answers(run: Run) -> None:
    run.publish(1)
    require_answers(run, 1)


@pytest.mark.parametrize("ahead", [0, 3])
def test_a_trainer_that_comes_back_sends_what_it_has_under_a_number_that_is_held_too(run: Run, ahead: int) -> None:
    """With requests running: their further tokens are of the new weights, by their tags."""
    version = run.publisher.version + ahead
    run.move(100 + ahead)
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        asked = [pool.submit(run.ask, prompt) for prompt in PROMPTS]
        run.replace_trainer(run.policy, version)
        run.publisher.wait_joined(60)
        assert all(len(each.result()["token_ids"]) == LENGTH for each in asked)
    require_answers(run, version)
    run.publish(version + 1)
    require_answers(run, version + 1)


class Wrapped(torch.nn.Module):
    """A module whose parameters have other names, as torch.compile and PEFT make one."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self._orig_mod = module


def another_shape(policy: Any) -> None:
    policy.model.norm.weight = torch.nn.Parameter(torch.ones(policy.model.norm.weight.numel() + 1))


def another_layer(policy: Any) -> None:
    policy.model.layers.append(copy.deepcopy(policy.model.layers[-1]))


def another_buffer(policy: Any) -> None:
    policy.model.register_buffer("scale", torch.ones(3))


def without_norm(policy: Any) -> None:
    del policy.model.norm


LAYER = r"model\.layers\.\d+\.\S+ .* does not fit the engine: \S.*"
MISFITS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "prefix": (
        Wrapped,
        r"_orig_mod\.model\.embed_tokens\.weight .* does not fit the engine: "
        r"There is no module or parameter named '_orig_mod' in \w+",
    ),
    "shape": (another_shape, r"model\.norm\.weight \[\d+\] (does not fit the engine: \S.*|is larger than .*)"),
    "layer": (another_layer, LAYER),
    "buffer": (another_buffer, r"model\.scale \[3\] does not fit the engine: There is no module or parameter .*"),
    "missing": (without_norm, r"the manifest does not cover model\.norm\.weight of the engine"),
}


@pytest.mark.parametrize("misfit", MISFITS)
def test_a_trainer_whose_model_does_not_fit_is_reported_in_one_line_and_may_return(run: Run, misfit: str) -> None:
    change, says = MISFITS[misfit]
    version, wrong = run.publisher.version, copy.deepcopy(run.policy)
    run.replace_trainer(change(wrong) or wrong, version + 1)
    with pytest.raises(PublishError) as told:
        run.publisher.wait_joined(START_S)
    assert re.fullmatch(rf"what is published can't be taken by g0: g0\.r0: CoverageError: {says}", str(told.value))
    assert len(str(told.value)) < 400
    with pytest.raises(PublishError, match="can't be taken by g0"):
        run.publisher.publish(version + 2)
    run.replace_trainer(run.policy, version + 1)
    run.publisher.wait_joined(60)
    require_answers(run, version + 1)


def test_running_requests_continue_across_versions(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    reported = list[int]()

    def hear(protocol: PublishProtocol, peer: str, message: AnyMessage, before: Any = PublishProtocol.hear) -> None:
        if isinstance(message, RankSwapped):
            reported.append(message.version)
        before(protocol, peer, message)

    monkeypatch.setattr(PublishProtocol, "hear", hear)
    first, ignored = run.publisher.version + 1, run.publisher.stats()["ignored"]
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        asked = [pool.submit(run.ask, prompt) for prompt in PROMPTS]
        version = run.publisher.version
        while not all(each.done() for each in asked):
            version += 1
            run.publish(version)
        choices = [each.result() for each in asked]
    swaps = run.publisher.stats()
    assert swaps["failures"] == 0
    assert swaps["swaps_with_running"] > 0
    until(lambda: reported == [*range(first, version + 1)], "the rank's report of each swap", 30)
    assert swaps["ignored"] == ignored
    for choice in choices:
        assert len(choice["token_ids"]) == LENGTH
        seen = [v for _, v in choice["token_versions"]]
        assert seen == sorted(set(seen))
    assert any(len(choice["token_versions"]) > 1 for choice in choices)


@pytest.mark.parametrize("key", ["", "Bearer", f"Bearer {KEY}x", f"Basic {KEY}"])
@pytest.mark.parametrize("path", ["/v1/completions", "/invocations", "/tokenize", "/version", "/docs", "/health/x"])
def test_nothing_but_health_and_metrics_is_there_without_the_key(run: Run, path: str, key: str) -> None:
    url, headers = run.routes()["g0"].url, {"Authorization": key} if key else {}
    with pytest.raises(urllib.error.HTTPError, match="401"):
        # Without a body, which urllib sends apart: the server may have answered and closed by then.
        urllib.request.urlopen(urllib.request.Request(url + path, b"", headers), timeout=60)
    for open_path in ("/health", "/metrics"):
        assert urllib.request.urlopen(url + open_path, timeout=60).status == 200


def test_status_tells_version_and_gap(run: Run) -> None:
    version = run.publisher.version + 1
    run.publish(version)
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        got = run.status.receive(5)
        if (
            isinstance(got, Received)
            and isinstance(got.message, Status)
            and got.message.values.get("version") == version
        ):
            break
    else:
        pytest.fail(f"no status with version {version}")
    values = got.message.values
    assert got.message.source == "g0"
    assert 0 < values["gap_ms"] <= values["max_gap_ms"]
    assert values["swaps"] == run.swaps_before + run.publisher.stats()["swaps"]
    assert {"running", "tokens_per_s"} <= values.keys()


def test_a_terminated_generator_leaves_nothing_behind(run: Run) -> None:
    """Last of this module: it ends the generator, with a request running."""
    children = run.descendants()
    assert set(run.routes()) == {"g0"}
    assert len(children) >= 2
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(run.ask, PROMPTS[0], 240)
        run.process.send_signal(signal.SIGTERM)
        assert run.wait(60) == 128 + signal.SIGTERM
        asked.exception(timeout=60)  # answered or cut off, but not left hanging
    assert run.alive(children) == []
    until(lambda: not run.routes(), "its leaving: it has said goodbye", 5)  # of 15 until it would be presumed dead


@pytest.mark.slow
def test_a_killed_generator_of_a_script_leaves_nothing_behind(tmp_path: Path) -> None:
    """One that leads no group, which could be killed whole; with a request running."""
    run = Run(tmp_path, "tiny", own_group=False)
    try:
        children = run.descendants()
        assert len(children) >= 2
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(run.ask, PROMPTS[0], 240)
            run.process.kill()
            run.wait(10)
            asked.exception(timeout=10)
        left = run.alive(children)
        for each in left:
            each.kill()
        assert left == []
    finally:
        run.close()


@pytest.mark.slow
def test_a_generator_ends_when_its_trainer_is_gone(tmp_path: Path) -> None:
    run = Run(tmp_path, "tiny-untied", join_timeout_s=15)
    try:
        run.publish(1)
        assert run.ask(PROMPTS[0], 4)["token_versions"] == [[0, 1]]
        children = run.descendants()
        run.publisher.close()
        run.listener.close()
        assert run.wait(15 + 15 + 30) == 1
        assert run.log.read_text().splitlines()[-1].startswith("inflight generator g0: the trainer is gone: ")
        assert run.alive(children) == []
    finally:
        run.close()


@pytest.mark.slow
def test_a_generator_ends_when_the_run_is_over(tmp_path: Path) -> None:
    run = Run(tmp_path, "tiny")
    try:
        run.publisher.finish("all steps done")
        assert run.wait(30) == 0
    finally:
        run.close()


@pytest.mark.slow
def test_a_model_that_can_not_be_swapped_is_refused_in_one_line(tmp_path: Path) -> None:
    config = RunConfig(
        model=ModelConfig("tiny", dtype="float32"),
        task=TaskConfig("addition"),
        run_dir=str(tmp_path),
        generator=GeneratorConfig(kv_cache_gib=0.0625),
    )
    config = replace(config, generator=replace(config.generator, extra={"enforce_eager": False}))
    configuration.save(config)
    command = [sys.executable, "-m", "inflight.generator", "--run-dir", str(tmp_path), "--name", "g0"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=START_S, check=False)
    assert ended.returncode == 2
    last = ended.stderr.splitlines()[-1]
    assert last.startswith("inflight generator g0: swapping weights on CPU does not support torch.compile")
