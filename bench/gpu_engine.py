"""The engine under test and its client: vLLM's LLMEngine, with the engine core in a process of its own.

One thread steps the client and notes when tokens arrive; another answers the publisher, as the server's agent does.
The engine core has one input socket, which both use: sends are serialised.
"""

from __future__ import annotations

import gc
import threading
import time
from typing import Any

from bench.gpu_gaps import Timeline
from bench.gpu_soak import Tags
from inflight.bus import Link, PeerLost
from inflight.config import BusConfig
from inflight.generator.engine_args import CPU_WORKER
from inflight.generator.plugin import hand_over_often
from inflight.generator.settings import Settings
from inflight.messages import Commit, Committed, EngineHello, Failed

POLL_S = 0.05


def start_engine(model: str, options: dict[str, Any], settings: Settings, worker: str) -> Any:
    """vLLM's engine with random weights and our worker, its processes set up as a generator's are."""
    if worker != CPU_WORKER:
        hand_over_often()  # before vLLM is imported
    from vllm import EngineArgs
    from vllm.utils.gc_utils import freeze_gc_heap
    from vllm.v1.engine.llm_engine import LLMEngine

    arguments = EngineArgs(
        model=model,
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        disable_log_stats=True,
        worker_cls=worker,
        additional_config=settings.as_additional_config(),
        **{"enable_prefix_caching": False, **options},
    )
    engine = LLMEngine.from_engine_args(arguments)
    freeze_gc_heap()  # as vLLM's server does
    return engine


class Client:
    """Sequences that decode without end, and the times at which their owner gets tokens."""

    def __init__(self, engine: Any, tokens: int, *, cuda: bool, prompt_tokens: int = 4, lora: Any = None) -> None:
        self.engine = engine
        self.lora = lora
        """The adapter that sequences ask for, vLLM's LoRARequest."""
        self._prompt = list(range(1, prompt_tokens + 1))
        self._cuda = cuda
        self.core = engine.engine_core
        self.timeline = Timeline()
        self.tags: Tags | None = None
        self._tokens = tokens
        self._sending = threading.Lock()
        self._last: dict[str, float] = {}
        self._made: dict[str, list[int]] = {}
        self._generation: dict[str, int] = {}
        self._resubmit = False
        self.aborted = self.recomputed = 0
        send = self.core._send_input

        def serialised(*args: Any) -> Any:
            with self._sending:
                return send(*args)

        self.core._send_input = serialised
        self._made_at = 0.0
        get_output = self.core.get_output

        def timed() -> Any:
            outputs = get_output()
            self._made_at = outputs.timestamp
            return outputs

        self.core.get_output = timed
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def call(self, method: str, *args: Any) -> Any:
        """An engine core utility; waits for its answer."""
        return self.core.call_utility(method, *args)

    def rpc(self, method: str, *args: Any) -> list[Any]:
        """A call on every rank; waits."""
        return self.call("collective_rpc", method, None, args)

    def swap_by(self, way: str | None) -> None:
        """How the CUDA worker swaps from now on; None: as configured."""
        if self._cuda:
            self.rpc("swap_by", way)
        self.take_swaps()

    def watch(self, on: bool) -> None:
        """Checks version tags from now on, or no more."""
        self.tags = Tags(self.call("weight_version")) if on else None

    def take_swaps(self) -> list[tuple[float, ...]]:
        """(wait, unmap, map, access) of each swap since the last call, the slowest rank's of each."""
        if not self._cuda:
            return []
        ranks = self.rpc("take_swaps")
        return [tuple(max(values) for values in zip(*swap, strict=True)) for swap in zip(*ranks, strict=True)]

    def start(self, batch: int, *, resubmit: bool = False) -> None:
        """Begins a round: `batch` fresh sequences, and the thread that reads their tokens."""
        gc.collect()
        gc.disable()  # a collection in the client would look like a late token
        self._stop.clear()
        self._resubmit = resubmit
        self._last.clear()
        self._made.clear()
        for i in range(batch):
            self._submit(f"s{i}", [*self._prompt[:-1], 4 + i % 64])
        self._thread = threading.Thread(target=self._read, name="client", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the round: what still runs is aborted, and its last outputs are read."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        gc.enable()
        requests = list(self.engine.output_processor.request_states)
        self.engine.abort_request(requests, internal=True)
        while self.engine.output_processor.request_states:
            self.engine.step()
        time.sleep(0.05)
        self._drop_outputs()

    def _drop_outputs(self) -> None:
        while not self.core.outputs_queue.empty():
            self.core.outputs_queue.get_nowait()

    def wait_all_after(self, moment: float, timeout_s: float) -> float:
        """When every sequence had a token after `moment`. Raises TimeoutError."""
        deadline = time.perf_counter() + timeout_s
        while time.perf_counter() < deadline:
            last = list(self._last.values())
            if last and min(last) > moment:
                return time.perf_counter()
            time.sleep(0.005)
        raise TimeoutError(f"not every sequence had a token within {timeout_s:g} s")

    @property
    def running(self) -> int:
        """Unfinished sequences."""
        return len(self.engine.output_processor.request_states)

    def _submit(self, name: str, prompt: list[int]) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        number = self._generation[name] = self._generation.get(name, -1) + 1
        left = max(1, self._tokens - len(self._made.setdefault(name, [])))
        parameters = SamplingParams(
            max_tokens=left, ignore_eos=True, temperature=0.0, detokenize=False, output_kind=RequestOutputKind.DELTA
        )
        request = f"{name}#{number}"
        self.engine.add_request(request, {"prompt_token_ids": prompt}, parameters, lora_request=self.lora)

    def _read(self) -> None:
        while not self._stop.is_set():
            if not self.running:
                return
            outputs = self.engine.step()
            self._note(outputs, time.perf_counter())

    def _note(self, outputs: list[Any], now: float) -> None:
        if self.tags is not None:
            self.tags.step(outputs)
        longest = 0.0
        tokens = 0
        for output in outputs:
            name = output.request_id.partition("#")[0]
            made = output.outputs[0].token_ids
            if made:
                longest = max(longest, now - self._last.get(name, now))
                self._last[name] = now
                tokens += len(made)
                if self._resubmit:
                    self._made[name].extend(made)
            if output.finished:
                self._ended(name, output.outputs[0].finish_reason)
        if tokens:
            self.timeline.add(now, tokens, longest, self._made_at)

    def _ended(self, name: str, reason: str | None) -> None:
        if reason != "abort":
            self._last.pop(name, None)
            self._made[name] = []
            if self._resubmit and not self._stop.is_set():
                self._submit(name, self._prompt)
            return
        self.aborted += 1
        if self._resubmit and not self._stop.is_set():
            prompt = [*self._prompt, *self._made[name]]
            self.recomputed += len(prompt)
            self._submit(name, prompt)


class Agent:
    """Answers the publisher's commits, as `inflight.generator.agent` does in the server."""

    def __init__(self, client: Client, endpoint: str, ranks: int, *, patched: bool, adapter: int = 0) -> None:
        """`patched`: vLLM queues the commit with the steps; else it is a blocking RPC, as without our patch. `adapter`
        is the id of the one whose versions are published; 0: all weights are."""
        self._which = (adapter,) if adapter else ()
        self._client = client
        self._patched = patched
        self._link = Link(endpoint, "g0.engine", BusConfig())
        self._link.send(EngineHello(generator="g0", world_size=ranks, url="http://127.0.0.1"))
        self.commits: dict[int, tuple[float, float, float]] = {}
        """version → (when the engine got the order, when it was done, gap that the ranks report)."""
        self.error: str | None = None
        self._changed = threading.Condition()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="agent", daemon=True)
        self._thread.start()

    def wait(self, version: int, timeout_s: float) -> tuple[float, float, float]:
        """When a version was committed. Raises TimeoutError, or RuntimeError when a commit failed."""
        with self._changed:
            done = self._changed.wait_for(lambda: version in self.commits or self.error is not None, timeout_s)
        if self.error is not None:
            raise RuntimeError(self.error)
        if not done:
            raise TimeoutError(f"version {version} was not committed within {timeout_s:g} s")
        return self.commits[version]

    def close(self) -> None:
        """Ends the thread."""
        self._stop.set()
        self._thread.join()
        self._link.close()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                message = self._link.receive(POLL_S)
                if isinstance(message, Commit):
                    self._commit(message)
            except PeerLost as error:
                self._fail(f"the trainer is gone: {error}")
                return

    def _commit(self, message: Commit) -> None:
        version = message.version
        told = time.perf_counter()
        if (tags := self._client.tags) is not None:
            tags.told(version)
        try:
            commit = self._client.call if self._patched else self._client.rpc
            ranks = commit("commit_weights", version, *self._which)
            if refused := [rank["error"] for rank in ranks if "error" in rank]:
                raise RuntimeError(refused[0])
        except Exception as error:  # noqa: BLE001 - whatever the engine core says
            failed = Failed(
                version=version,
                attempt=message.attempt,
                phase="commit",
                reason=str(error)[:1000],
                poisoned=True,
            )
            self._link.send(failed)
            self._fail(f"commit of version {version}: {error}")
            return
        gap = max(rank["gap_s"] for rank in ranks)
        if tags is not None:
            tags.answered(version)
        running = self._client.running
        answer = Committed(
            version=version, attempt=message.attempt, gap_s=gap, running=running, publisher=message.publisher
        )
        self._link.send(answer)
        with self._changed:
            self.commits[version] = (told, time.perf_counter(), gap)
            self._changed.notify_all()

    def _fail(self, reason: str) -> None:
        with self._changed:
            self.error = reason
            self._changed.notify_all()
