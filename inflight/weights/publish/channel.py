"""The sending thread of one generator, so that no transfer keeps the publisher from hearing the other ranks."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from inflight.weights.transport.base import Sender, TransportError

Job = Callable[[Sender], None]


class Channel:
    """Owns a Sender and the one thread that uses it. Jobs run in order; the first that fails ends the channel.

    A channel that is closed while a job is in the transport is simply left behind: its thread ends with the job, within
    the transport's timeout, and until then only reads the send buffer.
    """

    def __init__(self, name: str, sender: Sender, failed: Callable[[Channel, TransportError], None]) -> None:
        """`failed` is called in the channel's thread, once, unless the channel was closed before."""
        self.rendezvous = sender.rendezvous
        self._sender = sender
        self._failed = failed
        self._jobs: queue.Queue[Job | None] = queue.Queue()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"channel {name}", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Queues a job; on a closed channel it never runs."""
        self._jobs.put(job)

    def close(self) -> None:
        """Frees the sender as soon as nothing is in it; waits for nobody, but for NCCL up to its bound."""
        self._closed.set()
        self._jobs.put(None)
        self._sender.close()

    def join(self, timeout_s: float) -> bool:
        """Waits for the thread of a closed channel. False when a transfer still holds it."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None and not self._closed.is_set():
            try:
                job(self._sender)
            except Exception as error:  # noqa: BLE001 - whatever a transport raises ends this channel, not the trainer
                if not isinstance(error, TransportError):
                    error = TransportError(f"send: {type(error).__name__}: {error}")
                if not self._closed.is_set():
                    self._failed(self, error)
                break
        self._sender.close()
