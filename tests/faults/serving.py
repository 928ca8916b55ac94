"""Generators of a real vLLM, a trainer that can be killed, clients that watch their tokens come (not a test file)."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import select
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

import msgspec
import psutil

from inflight import config as configuration
from inflight.bus import Listener
from inflight.config import RunConfig
from inflight.types import Routes

PUBLISHING = str(Path(__file__).parent / "publishing.py")
DECODING = str(Path(__file__).parent / "decoding.py")
START_S = 300.0
ANSWER_S = 300.0
LAST_LINES = 3
"""Of a log: a traceback ends with the exception."""
PROMPTS = [[3, 4, 5, 13], [6, 6], [7, 8, 9, 13, 10, 11, 14], [12]]


def until(condition: Callable[[], Any], what: str, timeout_s: float = ANSWER_S) -> Any:
    """What `condition` gives, as soon as it is true; a bound against hanging."""
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline, f"{what}: not within {timeout_s} s"
        time.sleep(0.02)
    return found


class TrainerProcess:
    """publishing.py, by orders and answers."""

    def __init__(
        self,
        config: RunConfig,
        version: int,
        transport: str,
        environment: dict[str, str],
        ended: Callable[[], str] = str,
    ) -> None:
        """`ended`: a line on each generator that has ended and should not have; there it makes no sense to wait."""
        self._ended = ended
        command = [sys.executable, PUBLISHING, config.run_dir, str(version), transport]
        self._log = (config.path / "trainer.log").open("a")
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True, env=environment
        )
        self._answers: queue.Queue[dict[str, Any]] = queue.Queue()
        self.halted: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        assert "ready" in self._answer(START_S)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if not line.startswith("{"):
                continue
            answer = json.loads(line)
            if "halted" in answer:
                self.halted.put(answer["halted"])
            else:
                self._answers.put(answer)
        self._answers.put({"ended": True})

    def _answer(self, timeout_s: float) -> dict[str, Any]:
        answer = self._answers.get(timeout=timeout_s)
        assert "ended" not in answer, Path(self._log.name).read_text()[-3000:]
        return answer

    def order(self, do: str, **values: Any) -> None:
        """Without waiting for the answer: of a trainer that is to die, none may come."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **values}) + "\n")
        self.process.stdin.flush()

    def ask(self, do: str, **values: Any) -> dict[str, Any]:
        """An order and its answer."""
        self.order(do, **values)
        return self.answered(do)

    def answered(self, do: str) -> dict[str, Any]:
        """The answer to an order that was given before."""
        answer = self._answer(ANSWER_S)
        assert answer["did"] == do
        return answer

    def committed(self, **versions: int) -> dict[str, Any]:
        """Waits until generators have committed these versions; the publisher's state then. Fails at once when a
        generator has ended by itself."""

        def there() -> dict[str, Any] | None:
            assert not (ended := self._ended()), ended
            state = self.ask("state")
            return state if versions.items() <= state["committed"].items() else None

        found: dict[str, Any] = until(there, f"{versions} committed: {self.ask('state')}")
        return found

    def lost(self, name: str, timeout_s: float) -> None:
        """Waits until the publisher counts that generator as gone."""
        until(lambda: name not in self.ask("state")["committed"], f"the loss of {name}", timeout_s)

    def publish(self, version: int, **halt: int) -> None:
        self.ask("publish", version=version, halt=halt)

    def kill(self) -> float:
        """SIGKILL; when."""
        self.process.kill()
        at = time.monotonic()
        self.process.wait(20)
        return at

    @property
    def runs(self) -> bool:
        """Neither ended nor stopped."""
        return self.process.poll() is None and psutil.Process(self.process.pid).status() != psutil.STATUS_STOPPED

    def stop(self) -> float:
        """SIGSTOP, until `resume`; when."""
        self.process.send_signal(signal.SIGSTOP)
        until(lambda: not self.runs, "the stop of the trainer")
        return time.monotonic()

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)


class Serving:
    """A run folder whose launcher is this process. Entering it starts the run's generators, leaving it ends all.

    `variables`: process name → what it finds in its environment beside this process's own.
    """

    def __init__(
        self, config: RunConfig, variables: dict[str, dict[str, str]] | None = None, generator: Iterable[str] = ()
    ) -> None:
        """`generator`: what starts one, in the place of timed_generator.py."""
        self.config, self._variables = config, variables or {}
        self._generator = list(generator) or [str(Path(__file__).parent / "timed_generator.py")]
        configuration.save(config)
        (config.path / "bus").mkdir()
        self._status = Listener(config.endpoint("status"), config.bus)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._killed: set[str] = set()
        """Generators that are to have ended."""
        self.trainers: list[TrainerProcess] = []

    def __enter__(self) -> Self:
        for name in self.config.generator_names():
            self.start(name)
        return self

    def __exit__(self, *_: object) -> None:
        for trainer in self.trainers:
            trainer.process.kill()
        for process in self.processes.values():
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(20)
        self._status.close()

    def start(self, name: str) -> None:
        """Starts a generator; it joins by itself."""
        self._killed.discard(name)
        command = [sys.executable, *self._generator, "--run-dir", self.config.run_dir, "--name", name]
        with (self.config.path / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                command, stdout=log, stderr=log, start_new_session=True, env=self._environment(name)
            )

    def trainer(self, version: int, transport: str) -> TrainerProcess:
        """A new trainer that holds `version`."""
        environment = self._environment("trainer")
        self.trainers.append(TrainerProcess(self.config, version, transport, environment, self.ended))
        return self.trainers[-1]

    def ended(self) -> str:
        """A line on each generator that has ended and was not killed, with the end of its log; empty: there is none."""
        return "\n".join(filter(None, map(self._end_of, sorted(self.processes.keys() - self._killed))))

    def _end_of(self, name: str) -> str:
        if (code := self.processes[name].poll()) is None:
            return ""
        said = (self.config.path / f"{name}.log").read_text(errors="replace").splitlines()
        return f"{name} has ended with code {code}: {' | '.join(said[-LAST_LINES:])}"

    def _environment(self, name: str) -> dict[str, str]:
        environment = {key: value for key, value in os.environ.items() if key != "VLLM_ENABLE_V1_MULTIPROCESSING"}
        mine = {"CUDA_VISIBLE_DEVICES": "", "INFLIGHT_RUN_FILE": str(self.config.path / name)}
        return {**environment, **mine, **self._variables.get(name, {})}

    def url(self, name: str) -> str:
        """Where a generator that may be asked serves."""

        def listed() -> str:
            assert not (ended := self.ended()), ended
            with contextlib.suppress(OSError, KeyError):
                routes = msgspec.json.decode(self.config.routes_file.read_bytes(), type=Routes)
                return routes.generators[name].url
            return ""

        found: str = until(listed, f"{name} in the routes")
        return found

    def told(self, name: str, text: str) -> Callable[[], str]:
        """Whether a line with `text` came in the log of `name` since now; the line."""
        log = self.config.path / f"{name}.log"
        seen = log.stat().st_size

        def found() -> str:
            lines = log.read_bytes()[seen:].decode(errors="replace").splitlines()
            return next((line for line in lines if text in line), "")

        return found

    def steps(self, name: str, begin: float, end: float) -> dict[str, Any]:
        """Milliseconds between the moments at which a generator's engine had tokens, within a window; how many seconds
        after `begin` the longest of them ended, and how many sequences had tokens at its two ends: where they all
        ended together, the engine had nothing to do until their clients sent the next ones."""
        lines = [line.split() for line in (self.config.path / f"{name}.steps").read_text().splitlines()]
        moments = [(float(at), int(sequences)) for at, sequences in lines]
        steps = [(b - a, b, [m, n]) for (a, m), (b, n) in pairwise(moments) if begin <= b <= end]
        if not steps:
            return spread([])
        _, ended, sequences = max(steps)
        return spread([step[0] for step in steps]) | {
            "longest_ended_s": round(ended - begin, 3),
            "longest_sequences": sequences,
        }

    def says(self, url: str) -> list[Any]:
        """Greedy tokens and log-probabilities, one prompt at a time: equal when all bytes of the weights are."""
        return [self._ask(url, prompt) for prompt in PROMPTS]

    @staticmethod
    def _ask(url: str, prompt: list[int]) -> list[Any]:
        body = {"prompt": prompt, "max_tokens": 24, "temperature": 0, "logprobs": 0, "ignore_eos": True}
        request = urllib.request.Request(
            f"{url}/v1/completions",
            json.dumps({**body, "return_token_ids": True}).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=ANSWER_S) as reply:
            choice = json.load(reply)["choices"][0]
        return [choice["token_ids"], choice["logprobs"]["token_logprobs"], choice["token_versions"]]

    def kill(self, name: str) -> float:
        """SIGKILL to a generator and all its processes; when."""
        self._killed.add(name)
        os.killpg(self.processes[name].pid, signal.SIGKILL)
        at = time.monotonic()
        self.processes[name].wait(20)
        return at


class Streams:
    """Sequences that decode all the time, in a process of their own (decoding.py); once stopped, what it saw."""

    def __init__(self, url: str, many: int, tokens: int) -> None:
        self.gaps: list[tuple[float, float]] = []
        """(when, seconds since the token before) of each token."""
        self.late: list[tuple[float, float]] = []
        """(when, seconds that the clients' process woke too late), a hundred times a second."""
        self.errors: list[str] = []
        self.finished: list[str] = []
        self._process = subprocess.Popen(
            [sys.executable, DECODING, url, str(many), str(tokens)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        begun = select.select([self._process.stdout], [], [], ANSWER_S)[0] and self._process.stdout.readline()
        if begun != "decoding\n":
            self._process.kill()
            self._process.wait(20)
            raise AssertionError(f"not all {many} sequences of {url} began within {ANSWER_S} s")

    def stop(self) -> None:
        """Raises subprocess.TimeoutExpired when a sequence hears nothing."""
        try:
            said, _ = self._process.communicate(timeout=30)
        finally:
            self._process.kill()
            self._process.wait(20)
        assert self._process.returncode == 0, said
        seen = json.loads(said)
        self.gaps, self.late = seen["gaps"], seen["late"]
        self.errors, self.finished = seen["errors"], seen["finished"]

    def end_well(self) -> None:
        """Stops them; none was aborted or failed."""
        self.stop()
        assert self.gaps, "tokens came"
        assert self.errors == []
        assert set(self.finished) <= {"length"}

    def during(self, begin: float, end: float) -> dict[str, float]:
        """Milliseconds between tokens of a sequence that came within a window; how late their clients woke at most."""
        latest = max((late for at, late in self.late if at >= begin and at - late <= end), default=0.0)
        gaps = [gap for at, gap in self.gaps if begin <= at <= end]
        return spread(gaps) | {"client_late": round(1e3 * latest, 2)}


def spread(seconds: list[float]) -> dict[str, float]:
    """How many, and median, 99th percentile and longest in milliseconds."""
    found = sorted(1e3 * each for each in seconds)
    shares = {"p50": 0.5, "p99": 0.99, "longest": 1.0} if found else {}
    at = {name: round(found[min(len(found) - 1, int(share * len(found)))], 2) for name, share in shares.items()}
    return {"many": len(found), **at}
