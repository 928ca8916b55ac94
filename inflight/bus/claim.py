"""Ensures one listener per address. zmq itself takes over the file of a Unix socket on which another process still
listens, without an error on either side: the first listener gets no more new connections."""

from __future__ import annotations

import contextlib
import fcntl
import os
import weakref

SCHEME = "ipc://"
_held: weakref.WeakSet[AddressClaim] = weakref.WeakSet()


class ClaimError(RuntimeError):
    """The address is in use; the text names the process."""


class AddressClaim:
    """An flock on `FILE.lock` beside a Unix socket's file; it is released at the latest when the process ends.

    TCP addresses need none: the kernel refuses a second listener there.
    """

    def __init__(self, endpoint: str) -> None:
        """Raises ClaimError when a listener has the address, in another process or in this one, and OSError when the
        lock's file can't be written."""
        self._lock: int | None = None
        path = endpoint.removeprefix(SCHEME)
        if path == endpoint or path.startswith(("@", "*")):
            return
        lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(lock, 20, 0).decode("ascii", "replace").strip()
            os.close(lock)
            raise ClaimError(f"process {holder or 'unknown'} already listens there; one listener per address") from None
        os.ftruncate(lock, 0)
        os.pwrite(lock, str(os.getpid()).encode(), 0)
        self._lock = lock
        _held.add(self)

    def release(self) -> None:
        """Releases the address for another listener. A second call does nothing."""
        if self._lock is not None:
            lock, self._lock = self._lock, None
            with contextlib.suppress(OSError):
                os.close(lock)


def _forget() -> None:
    """In a forked child: it shares the lock, and would keep the address locked after its parent's death."""
    for claim in list(_held):
        claim.release()


os.register_at_fork(after_in_child=_forget)
