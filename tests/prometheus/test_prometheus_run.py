"""A real Prometheus scrapes a real run, and every query of the dashboard has an answer: with a real vLLM all of them,
with generators that stand in for it those on the other processes."""

from __future__ import annotations

import contextlib
import json
import math
import re
import shutil
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from run import BOUND_S, Run

pytestmark = pytest.mark.prometheus
DOCS = Path(__file__).parents[2] / "docs"
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def configured(folder: Path, run: Path) -> Path:
    """The scrape configuration of docs/metrics.md, for this run and once a second."""
    block = re.search(r"```yaml\n(scrape_configs:.*?)```", (DOCS / "metrics.md").read_text(), re.DOTALL)
    assert block is not None
    text = block[1].replace("/data/runs/mine", str(run))
    path = folder / "prometheus.yml"
    path.write_text(f"global: {{scrape_interval: 1s, evaluation_interval: 1s}}\n{text}")
    return path


@contextlib.contextmanager
def prometheus(folder: Path, run: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """The URL of a Prometheus that scrapes a run, and its process."""
    program = shutil.which("prometheus")
    assert program is not None, "there is no prometheus: `make test-prometheus` installs it"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    command = [program, f"--config.file={configured(folder, run)}", f"--storage.tsdb.path={folder / 'tsdb'}"]
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen([*command, f"--web.listen-address={address}"], stdout=log, stderr=log)
        try:
            yield f"http://{address}", process
        finally:
            process.terminate()
            process.wait(timeout=30)


def asked(url: str, query: str) -> list[dict[str, Any]]:
    """What Prometheus answers; nothing while it starts."""
    with contextlib.suppress(OSError):
        with DIRECT.open(f"{url}/api/v1/query?query={urllib.parse.quote(query)}", timeout=20) as reply:
            return json.loads(reply.read())["data"]["result"]
    return []


def queries() -> set[str]:
    board = json.loads((DOCS / "grafana.json").read_text())
    return {target["expr"].replace("$run", "run") for panel in board["panels"] for target in panel["targets"]}


MORE = ("eval.every=3", "task.options.held_out=4", "trainer.processes=2")
"""An evaluator, and a further rank of the trainer."""


@pytest.mark.parametrize("vllm", [False, True], ids=["stand-in", "vllm"])
def test_every_query_of_the_dashboard_has_data(tmp_path, vllm):
    patient = ["publish.join_timeout_s=400", "generator.start_timeout_s=400"]  # a loaded machine
    run = Run(
        tmp_path / "run",
        "trainer.steps=100000",
        "trainer.checkpoint_every=0",
        "rollout.max_tokens=32",
        *patient,
        *([] if vllm else MORE),
        vllm=vllm,
    ).start()
    try:
        with prometheus(tmp_path, tmp_path / "run") as (url, server):
            missing = {query for query in queries() if vllm or not re.search("vllm:|inflight_generator", query)}
            assert len(missing) > 20

            def answered() -> bool:
                for query in sorted(missing):
                    values = [float(each["value"][1]) for each in asked(url, query)]
                    if any(math.isfinite(value) for value in values):
                        missing.discard(query)
                return not missing

            deadline = time.monotonic() + 2 * BOUND_S
            while not answered() and time.monotonic() < deadline:
                assert not run.ended(), run.logs()
                assert server.poll() is None, (tmp_path / "prometheus.log").read_text()
                time.sleep(1)
            for query in ("inflight_evaluator_answers_wanted", "inflight_trainer_rank_orders_total"):
                assert vllm or asked(url, query), query
            up = {each["metric"]["process"]: each["value"][1] for each in asked(url, "up")}
            slowest = max(float(each["value"][1]) for each in asked(url, "scrape_duration_seconds"))
        assert not missing, f"no data for {sorted(missing)}\n{run.logs()}"
        further = ["g0"] if vllm else ["evaluator", "trainer.1"]
        assert up == dict.fromkeys(("trainer", "launcher", "a0", *further), "1")
        print(f"slowest last scrape {slowest * 1e3:.1f} ms")
    finally:
        run.end()
    assert not (tmp_path / "run" / "bus").exists()
