"""Hosts on this machine: network namespaces with one address each, behind one bridge, that share no memory and no run
folder; a real sshd in each but the first."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[2]
SWITCH = "inflightsw"
LIMIT_S = 30.0


def missing() -> str:
    """What keeps this machine from having such hosts; empty: nothing."""
    if os.geteuid() != 0:
        return "needs root"
    tools = ("ip", "tc", "nsenter", "unshare", "sshd", "ssh", "ssh-keygen")
    if absent := [name for name in tools if shutil.which(name) is None]:
        return f"needs {', '.join(absent)}"
    made = subprocess.run(["ip", "netns", "add", f"{SWITCH}probe"], capture_output=True, text=True, check=False)
    if made.returncode:
        return f"network namespaces are not allowed here: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", f"{SWITCH}probe"], check=False)
    return ""


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


class Hosts:
    """`count` of them, number n with the address 10.77.0.n+1. Only number 0 sees the run folder."""

    def __init__(self, count: int, folder: Path) -> None:
        self.folder, self.count = folder, count
        self.names = [f"inflighth{number}" for number in range(count)]
        self._holders: list[subprocess.Popen[bytes]] = []

    def address(self, number: int) -> str:
        return f"10.77.0.{number + 1}"

    def __enter__(self) -> Hosts:
        self._remove()
        ip("netns", "add", SWITCH)
        ip("-n", SWITCH, "link", "add", "br0", "type", "bridge")
        ip("-n", SWITCH, "link", "set", "br0", "up")
        for number, name in enumerate(self.names):
            ip("netns", "add", name)
            ip("-n", SWITCH, "link", "add", f"port{number}", "type", "veth", "peer", "name", "eth0", "netns", name)
            ip("-n", SWITCH, "link", "set", f"port{number}", "master", "br0", "up")
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "addr", "add", f"{self.address(number)}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
        self._make_keys()
        for number in range(self.count):
            self._holders.append(self._hold(number))
        for number in range(1, self.count):
            self._await_sshd(number)
        return self

    def __exit__(self, *_: object) -> None:
        for number, holder in enumerate(self._holders):
            self.end_processes(number)
            holder.kill()
            holder.wait(LIMIT_S)
        self._remove()

    def end_processes(self, number: int) -> None:
        """Kills all that runs on a host, as when it loses power."""
        for pid in self._pids(number):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def processes(self, number: int) -> list[str]:
        """Command lines of all that runs on a host."""
        lines = []
        for pid in self._pids(number):
            with contextlib.suppress(psutil.Error):
                lines.append(" ".join(psutil.Process(pid).cmdline()))
        return lines

    def boot(self, number: int) -> None:
        """Starts a host again whose processes were ended."""
        self._holders[number].wait(LIMIT_S)
        self._holders[number] = self._hold(number)
        self._await_sshd(number)

    def cut(self, number: int) -> None:
        ip("-n", SWITCH, "link", "set", f"port{number}", "down")

    def heal(self, number: int) -> None:
        ip("-n", SWITCH, "link", "set", f"port{number}", "up")

    def slow(self, number: int, rate: str) -> None:
        """Limits what is sent to a host, such as `20mbit`."""
        shape = ["tbf", "rate", rate, "burst", "64kb", "latency", "200ms"]
        command = ["tc", "-n", SWITCH, "qdisc", "add", "dev", f"port{number}", "root", *shape]
        subprocess.run(command, check=True, capture_output=True)

    def within(self, number: int, *argv: str, **options: object) -> subprocess.Popen[str]:
        """Starts a command on a host."""
        inside = ["nsenter", "-t", str(self._holders[number].pid), "-m", "-n", "-i", "--", *argv]
        return subprocess.Popen(inside, text=True, **options)  # type: ignore[call-overload]

    def listening(self, number: int) -> set[tuple[str, int]]:
        """Addresses and ports of TCP on which something listens there, but sshd."""
        asked = self.within(number, "ss", "-Hltn", stdout=subprocess.PIPE)
        places = [line.split()[3].rpartition(":") for line in asked.communicate(timeout=LIMIT_S)[0].splitlines()]
        return {(address.strip("[]"), int(port)) for address, _, port in places if port != "22"}

    @property
    def ssh(self) -> list[str]:
        """Arguments of ssh with which the first host reaches the others."""
        key = str(self.folder / "key")
        options = ("StrictHostKeyChecking=no", "UserKnownHostsFile=/dev/null", "IdentitiesOnly=yes", "LogLevel=ERROR")
        return ["-i", key, *(part for option in options for part in ("-o", option))]

    @property
    def python(self) -> str:
        """The command of Python there: this tree, and a cache of models of each host's own."""
        settings = {
            "PYTHONPATH": str(ROOT),
            "INFLIGHT_CACHE": "/dev/shm/models",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        return " ".join(["env", *(f"{name}={value}" for name, value in settings.items()), sys.executable])

    def _pids(self, number: int) -> list[int]:
        ask = ["ip", "netns", "pids", self.names[number]]
        listed = subprocess.run(ask, capture_output=True, text=True, check=False)
        return [int(pid) for pid in listed.stdout.split()]

    def _make_keys(self) -> None:
        for name in ("key", "host"):
            (self.folder / name).unlink(missing_ok=True)
            made = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / name)]
            subprocess.run(made, check=True)
        Path("/run/sshd").mkdir(exist_ok=True)
        self._settings = [
            f"HostKey={self.folder}/host",
            f"AuthorizedKeysFile={self.folder}/key.pub",
            "PermitRootLogin=yes",
            "StrictModes=no",
            "UsePAM=no",
            "PidFile=none",
            "ClientAliveInterval=5",
            "ClientAliveCountMax=3",
            "MaxStartups=100",
        ]

    def _hold(self, number: int) -> subprocess.Popen[bytes]:
        """A process that has the host's namespaces: sshd or, on the first one, `sleep`."""
        run = self.folder / "run"
        run.mkdir(exist_ok=True)
        prepare = "mount -t tmpfs none /dev/shm && mkdir /dev/shm/models"
        if number:
            prepare += f" && mount -t tmpfs none {run}"
            settings = " ".join(f"-o {each}" for each in [*self._settings, f"ListenAddress={self.address(number)}"])
            stay = f"{shutil.which('sshd')} -D -e -f /dev/null {settings}"
        else:
            stay = "sleep infinity"
        log = (self.folder / f"host{number}.log").open("ab")
        with log:
            return subprocess.Popen(
                [
                    "ip",
                    "netns",
                    "exec",
                    self.names[number],
                    "unshare",
                    "-m",
                    "-i",
                    "sh",
                    "-c",
                    f"{prepare} && exec {stay}",
                ],
                stdout=log,
                stderr=log,
            )

    def _await_sshd(self, number: int) -> None:
        deadline = time.monotonic() + LIMIT_S
        while True:
            asked = ["ip", "netns", "exec", self.names[0], "bash", "-c", f"exec 3<>/dev/tcp/{self.address(number)}/22"]
            if subprocess.run(asked, capture_output=True, check=False, timeout=LIMIT_S).returncode == 0:
                return
            if time.monotonic() > deadline:
                raise TimeoutError((self.folder / f"host{number}.log").read_text())
            time.sleep(0.1)

    def _remove(self) -> None:
        for name in [*self.names, SWITCH]:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
