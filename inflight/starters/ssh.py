"""Starts processes on other hosts, one connection of the user's own ssh for each.

The connection carries the parcel and the renewals of the lease in (starters/parcel.py), and the process's output out,
into its log here. ssh takes keys, agents, jump hosts and aliases from the user's configuration; it never asks for a
password. When the connection is lost, ssh ends here, and the process there by its lease.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import sys
import threading

from inflight.config import RunConfig
from inflight.starters.base import Command
from inflight.starters.local import LocalHandle, spawned
from inflight.starters.parcel import MODULE, RENEWAL, packed, parcel_of
from inflight.surroundings import inherited

OPTIONS = {
    "BatchMode": "yes",
    "ConnectTimeout": "10",
    "ServerAliveInterval": "5",
    "ServerAliveCountMax": "3",
    "ControlMaster": "no",  # a shared connection would outlive this one
    "ControlPath": "none",
}
RENEWALS = 4
"""How often a lease is renewed within its time."""


class SshHandle(LocalHandle):
    """The ssh that stands for a process there. `poll` is ssh's own exit code: that of the process, or UNREACHABLE."""

    def __init__(self, child: subprocess.Popen[bytes], host: str, parcel: bytes, every_s: float) -> None:
        super().__init__(child)
        self.address = host
        self._pipe = child.stdin
        self._parcel = parcel
        self._every_s = every_s
        self._stopped = threading.Event()
        threading.Thread(target=self._renew, name=f"lease {host}", daemon=True).start()

    def stop(self) -> None:
        """Ends the lease: the process there gets SIGTERM."""
        self._stopped.set()

    def _renew(self) -> None:
        """The only user of the pipe, since writing to it may block."""
        assert self._pipe is not None
        with contextlib.suppress(OSError):  # ssh has ended
            os.set_blocking(self._pipe.fileno(), True)
            self._pipe.write(self._parcel)
            self._pipe.flush()
            while not self._stopped.wait(self._every_s) and self.poll() is None:
                self._pipe.write(RENEWAL)
                self._pipe.flush()
        with contextlib.suppress(OSError):
            self._pipe.close()


class SshStarter:
    """For the processes of one run."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config

    def start(self, command: Command) -> SshHandle:
        """See Starter. Raises OSError when ssh is not installed."""
        hosts = self._config.hosts
        python = shlex.split(hosts.python) or [sys.executable]
        options = [text for name, value in OPTIONS.items() for text in ("-o", f"{name}={value}")]
        there = shlex.join([*python, "-m", MODULE])
        argv = ["ssh", "-T", *options, *shlex.split(hosts.ssh), "--", command.host, f"exec {there}"]
        parcel = packed(parcel_of(self._config, command))
        child = spawned(command, argv, inherited(os.environ, command.kind), subprocess.PIPE)
        return SshHandle(child, command.host, parcel, hosts.lease_s / RENEWALS)

    def close(self) -> None:
        """See Starter."""
