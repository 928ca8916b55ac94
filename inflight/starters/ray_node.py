"""Ray's starter on a node of the cluster: the class of the Ray actor that runs `inflight.hosted` as its child.

Imports no Ray: `starters/ray.py` makes the actor of it. The child gets its parcel and the
renewals of its lease through its standard input, as it does from ssh. When the object's process ends, for whatever
reason, so does the input, and with it the lease: the child ends what it runs.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import sys
import threading
from typing import IO

from inflight.starters.parcel import MODULE, RENEWAL

OUTPUT_AT_MOST = 1 << 20
"""Bytes of output that are kept until the launcher takes them."""
OUTPUT_ENDS_WITHIN_S = 1.0
"""Seconds for which the output of a child that has ended is read on: a descendant may hold the pipe open."""
OWN = "RAY_"
"""Prefix of variables that Ray sets for its own processes; the child is none of them."""


class RayNodeProcess:
    """One process of a run, on this node."""

    def __init__(self, parcel: bytes, python: str) -> None:
        """`parcel` is as packed for a pipe; `python` is the command of Python here, split as a shell does it; empty:
        that of this process. Raises OSError when the child can't be started."""
        self._child = subprocess.Popen(
            [*(shlex.split(python) or [sys.executable]), "-m", MODULE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={name: value for name, value in os.environ.items() if not name.startswith(OWN)},
            start_new_session=True,
        )
        self._output = bytearray()
        self._dropped = 0
        self._lock = threading.Lock()
        """Over the two above, and over the input."""
        self._reader = threading.Thread(target=self._read, name="output", daemon=True)
        self._reader.start()
        self._writer = threading.Thread(target=self._hand_over, args=(parcel,), name="parcel", daemon=True)
        self._writer.start()

    def exchange(self) -> tuple[bytes, int | None]:
        """Renews the lease. Returns the output since the last call, and the exit code of the child; None while it
        runs."""
        code = self._child.poll()
        if code is None:
            self._renew()
        else:
            self._reader.join(OUTPUT_ENDS_WITHIN_S)
        with self._lock:
            output, self._output = bytes(self._output), bytearray()
            if self._dropped:
                output += f"\n({self._dropped} further bytes of output are lost)\n".encode()
                self._dropped = 0
        return output, code

    def stop(self) -> None:
        """Ends the lease: the process gets SIGTERM, and SIGKILL after its grace."""
        self._writer.join(OUTPUT_ENDS_WITHIN_S)
        if self._writer.is_alive():  # the child does not read: it can't see that the input ends
            self._child.terminate()
            return
        with contextlib.suppress(OSError), self._lock:
            self._input().close()

    def _hand_over(self, parcel: bytes) -> None:
        """In a thread of its own: a parcel may be larger than the pipe."""
        with contextlib.suppress(OSError):  # the child has ended
            self._input().write(parcel)
            self._input().flush()
            os.set_blocking(self._input().fileno(), False)

    def _renew(self) -> None:
        """A child that does not read its input gets nothing more, and its lease ends."""
        with contextlib.suppress(OSError, ValueError), self._lock:  # ValueError: closed by `stop`
            if not self._writer.is_alive():
                os.write(self._input().fileno(), RENEWAL)

    def _read(self) -> None:
        assert self._child.stdout is not None
        while more := os.read(self._child.stdout.fileno(), 1 << 16):
            with self._lock:
                room = OUTPUT_AT_MOST - len(self._output)
                self._output += more[:room]
                self._dropped += len(more[room:])

    def _input(self) -> IO[bytes]:
        assert self._child.stdin is not None
        return self._child.stdin
