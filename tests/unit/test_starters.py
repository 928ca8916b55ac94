"""Starting processes on other hosts: what they are given, how they end with their launcher, and what is restarted."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import shutil
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import msgspec
import psutil
import pytest
from fake_generator import eventually
from run_folders import API_KEY, written_run

from inflight import __version__
from inflight import config as configuration
from inflight.config import ConfigError, RunConfig
from inflight.config.hosts import HostsConfig
from inflight.config.network import NetworkConfig, is_address
from inflight.exits import BAD_INPUT, STOPPED
from inflight.hosted import folder as folders
from inflight.hosted import running
from inflight.hosted.folder import Predecessors, unpacked_folder
from inflight.hosted.running import _gpus
from inflight.launcher import devices
from inflight.launcher import launch as launching
from inflight.launcher.commands import usual_commands
from inflight.launcher.compose import compose
from inflight.launcher.reachable import require_reachable
from inflight.launcher.restarts import RETRY_AT_MOST_S, Restarts
from inflight.models import ModelError
from inflight.processes import Ended, Processes
from inflight.starters import parcel as parcels
from inflight.starters.base import UNREACHABLE, Command, Handle
from inflight.starters.parcel import MAX_BYTES, Lease, Parcel, ParcelError, packed, parcel_of, received
from inflight.starters.ssh import SshStarter

LIMIT_S = 30.0
until = functools.partial(eventually, timeout_s=LIMIT_S)


@functools.cache
def composed() -> RunConfig:
    options = ["network.bind=127.0.0.1", "hosts.starter=ssh", "hosts.names=[h1,me@h2]", "generator.count=2"]
    return compose("tiny", ["run_dir=/nowhere", *options])


@pytest.fixture
def run(tmp_path: Path) -> RunConfig:
    """The folder of a run with generators on two hosts."""
    return written_run(composed(), tmp_path / "run")


def command(name: str = "g0", kind: str = "generator", **changes: object) -> Command:
    return replace(Command(name, kind, ["true"], None, {"OMP_NUM_THREADS": "2"}, host="h1"), **changes)


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """What a process reads its parcel from, and what its launcher writes to."""
    ends = os.pipe()
    yield ends
    for end in ends:
        with contextlib.suppress(OSError):
            os.close(end)


def test_a_parcel_holds_what_one_process_needs_and_no_other_secret(run: RunConfig, pipe: tuple[int, int]) -> None:
    os.write(pipe[1], packed(parcel_of(run, command())))
    parcel = received(pipe[0], LIMIT_S)
    assert (parcel.name, parcel.kind, parcel.slot, parcel.trainer) == ("g0", "generator", 0, "127.0.0.1")
    assert parcel.api_key == API_KEY
    keys = Path(run.bus.keys)
    assert parcel.keys == {name: (keys / name).read_text() for name in ("listener.key", "g0.key_secret")}
    secret = (keys / "listener.key_secret").read_text().split("secret-key")[1].split('"')[1]
    assert secret not in packed(parcel).decode()


def test_what_must_be_with_the_trainer_goes_nowhere(run: RunConfig) -> None:
    with pytest.raises(ConfigError, match="trainer can't run on another host: only generator and actor can"):
        parcel_of(run, command("trainer", "trainer"))


BAD = {
    "nothing": (b"", "the input ended before the parcel did, after 0 of 8 bytes"),
    "a shell's greeting": (b"Welcome to host h1!\n", "it begins with b'Welcome '"),
    "too large": (f"{MAX_BYTES + 1:08x}".encode(), "at most"),
    "none": (b"00000000", "a parcel of 0 bytes"),
    "half": (b"00000010{", "after 1 of 16 bytes"),
    "another text": (b"00000002[]", "no parcel of a launcher"),
    "no text": (b"00000002\xff\xff", "no parcel of a launcher"),
}


@pytest.mark.parametrize("what", BAD)
def test_what_is_no_parcel_is_refused(pipe: tuple[int, int], what: str) -> None:
    data, said = BAD[what]
    os.write(pipe[1], data)
    os.close(pipe[1])
    with pytest.raises(ParcelError) as caught:
        received(pipe[0], LIMIT_S)
    assert said in str(caught.value)


def test_a_parcel_that_does_not_come_is_not_waited_for(pipe: tuple[int, int]) -> None:
    os.write(pipe[1], b"0000")
    with pytest.raises(ParcelError, match="no parcel came in time, 4 of 8 bytes did"):
        received(pipe[0], 0.05)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"inflight": "0.0.1"}, rf"this host has inflight {__version__}, the launcher's 0\.0\.1"),
        ({"name": "../g0"}, "no parcel of a launcher"),
        ({"kind": "trainer"}, "no parcel of a launcher"),
        ({"keys": {"../../.ssh/id": "x"}}, "no parcel of a launcher"),
        ({"unknown": 1}, "unknown field"),
    ],
)
def test_a_parcel_of_another_release_or_with_other_fields_is_refused(
    run: RunConfig, changes: dict[str, object], said: str
) -> None:
    body = msgspec.json.encode(msgspec.to_builtins(parcel_of(run, command())) | changes)
    with pytest.raises(ParcelError, match=said):
        parcels.unpacked(body)


def test_a_lease_ends_with_the_input_or_with_silence(pipe: tuple[int, int]) -> None:
    lease = Lease(pipe[0], LIMIT_S)
    os.write(pipe[1], b"..")
    assert lease.wait(LIMIT_S)
    os.close(pipe[1])
    assert not lease.wait(LIMIT_S)
    assert lease.ended == "the launcher has ended it"
    silent = os.pipe()
    short = Lease(silent[0], 0.05)
    while short.wait(0.01):
        pass
    assert short.ended == "no sign of the launcher for 0.05 s (hosts.lease_s)"
    for end in silent:
        os.close(end)


def test_the_folder_there_is_the_owners_alone_and_gone_afterwards(run: RunConfig) -> None:
    parcel = parcel_of(run, command("a0", "actor"))
    with unpacked_folder(parcel) as there:
        folder = there.path
        assert folder != run.path
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        found = {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()}
        assert found == {"process.lock", "config.yaml", "bus/api.key", "keys/listener.key", "keys/a0.key_secret"}
        assert all(not stat.S_IMODE(file.stat().st_mode) & 0o077 for file in folder.rglob("*"))
        again = configuration.load(folder)
        assert again.api_key() == API_KEY
        assert again.endpoint("rollouts") == run.endpoint("rollouts") == "tcp://127.0.0.1:5701"
        assert (again.bus.keys, again.network.bind) == (str(folder / "keys"), "127.0.0.1")
        assert (again.checkpoint, again.resume, again.seed) == ("", False, run.seed)
    assert not folder.exists()


def test_the_folder_of_a_process_that_was_killed_is_removed_by_the_next_and_no_other_is(
    run: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folders, "IN_MEMORY", tmp_path / "shm")
    (tmp_path / "shm" / "inflight-foreign").mkdir(parents=True)
    parcel = parcel_of(run, command("a0", "actor"))
    with unpacked_folder(parcel) as living:
        killed = tmp_path / "shm" / "inflight-killed"
        shutil.copytree(living.path, killed)
        assert (killed / "keys" / "a0.key_secret").exists()
        with unpacked_folder(parcel) as later:
            found = {each.name for each in (tmp_path / "shm").iterdir()}
            assert found == {"inflight-foreign", living.path.name, later.path.name}
            assert living.api_key() == API_KEY
    assert {each.name for each in (tmp_path / "shm").iterdir()} == {"inflight-foreign"}


class LeaseOf:
    """A lease that says of itself what its test wants, after each of `at_least` waits."""

    ended = "the test has ended it"

    def __init__(self, then: Callable[[], bool], at_least: int = 5) -> None:
        self._then = then
        self._left = at_least

    def wait(self, timeout_s: float) -> bool:
        self._left -= 1
        time.sleep(0.01)
        return self._left > 0 or self._then()


@pytest.fixture
def shm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where folders of processes are."""
    monkeypatch.setattr(folders, "IN_MEMORY", tmp_path / "shm")
    (tmp_path / "shm").mkdir()
    return tmp_path / "shm"


def test_a_lease_that_ends_during_a_download_ends_the_process_there(
    run: RunConfig, shm: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arrives = threading.Event()
    monkeypatch.setattr(folders.models, "fetch", lambda *_, **__: arrives.wait(LIMIT_S))
    monkeypatch.setattr(running, "Processes", None)  # none may be started
    lease = LeaseOf(lambda: False)
    assert running.run(parcel_of(run, command()), lambda _: lease) == STOPPED
    assert not arrives.is_set()
    assert "g0 ends: the test has ended it" in capsys.readouterr().err
    assert list(shm.iterdir()) == []
    arrives.set()
    until(lambda: not [each for each in threading.enumerate() if each.name == "preparing"])
    assert list(shm.iterdir()) == [], "what arrives later is written nowhere"


def test_a_model_that_is_not_to_be_had_is_named(run: RunConfig, shm: Path) -> None:
    configuration.save(replace(run, model=replace(run.model, name="/no/such")))
    parcel = parcel_of(run, command())
    with pytest.raises(ModelError, match="'/no/such' is neither one of"):
        running.run(parcel, lambda _: LeaseOf(lambda: True))
    assert list(shm.iterdir()) == []


def test_a_generator_is_started_when_its_predecessor_has_ended(
    run: RunConfig, shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher has lost it, and it has its GPUs until its lease ends."""
    parcel = parcel_of(run, command())
    folder = contextlib.ExitStack()
    lock = folder.enter_context(unpacked_folder(parcel)).path / "process.lock"
    held: list[bool] = []

    class Watched(Processes):
        def start(self, command: Command) -> None:
            held.append(lock.exists())
            super().start(command)

    monkeypatch.setattr(running, "Processes", Watched)
    monkeypatch.setitem(running.MODULES, "generator", "this")
    lease = LeaseOf(lambda: folder.close() or True, at_least=20)
    assert running.run(parcel, lambda _: lease) == 0
    assert held == [False]
    assert list(shm.iterdir()) == []


def test_the_exit_code_is_that_of_the_process_as_a_shell_has_it(run: RunConfig) -> None:
    for code, ends in (("raise SystemExit(3)", 3), ("import os; os.kill(os.getpid(), 9)", 128 + 9)):
        process = command(argv=[sys.executable, "-S", "-c", code], host="")
        assert running._run_leased(LeaseOf(lambda: True), run, process) == ends


def test_only_a_generator_of_the_same_name_and_run_is_a_predecessor(
    run: RunConfig, shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    g0, a0 = parcel_of(run, command()), parcel_of(run, command("a0", "actor"))
    other = msgspec.structs.replace(g0, run="/another/run")
    with unpacked_folder(g0), unpacked_folder(a0):
        assert not Predecessors(g0).ended(0)
        for parcel in (other, msgspec.structs.replace(g0, name="g1"), a0):
            assert Predecessors(parcel).ended(0)
        with monkeypatch.context() as changed:
            changed.setattr(folders, "source_of", lambda _: "10.0.0.9")  # another container with this folder
            assert Predecessors(g0).ended(0)
        before = Predecessors(g0)
    with unpacked_folder(g0):
        assert before.ended(0), "those that come later wait for this one, not it for them"
    assert Predecessors(g0).ended(0)


LEAVES = """
import sys, time
from concurrent.futures import ThreadPoolExecutor
from inflight.processes import leave_with
ThreadPoolExecutor().submit(time.sleep, 600)
leave_with(lambda: {})
"""


@pytest.mark.parametrize(("main", "code"), [("3", 3), ("sys.exit(143)", 143), ("sys.exit()", 0), ("sys.exit('x')", 1)])
def test_a_download_that_goes_on_does_not_keep_the_process(main: str, code: int) -> None:
    """As huggingface_hub's threads would, for which the interpreter waits."""
    done = subprocess.run([sys.executable, "-c", LEAVES.format(main)], timeout=LIMIT_S, check=False)
    assert done.returncode == code


def test_a_generator_there_has_the_gpus_of_its_slot(run: RunConfig) -> None:
    two = replace(run, generator=replace(run.generator, tensor_parallel_size=2))
    parcel = parcel_of(run, command(slot=1))
    assert _gpus(two, parcel, ["0", "1", "2", "3"]) == {"CUDA_VISIBLE_DEVICES": "2,3"}
    assert _gpus(two, parcel, []) == {}
    assert _gpus(two, parcel_of(run, command("a0", "actor")), ["0"]) == {}
    with pytest.raises(ConfigError, match="g0 is generator 2 of this host and takes 2 GPUs, of 3 here"):
        _gpus(two, parcel, ["0", "1", "2"])


# --- ssh ---

SSH = """#!/bin/sh
printf '%s\\n' "$@" > {said}
while [ "$1" != -- ]; do shift; done
[ "$2" = gone ] && exit 255
exec sh -c "$3"
"""
THERE = """
import sys
from inflight.starters.parcel import Lease, received
parcel = received(0)
print(parcel.name, flush=True)
lease = Lease(0, 30)
while lease.wait(1):
    if parcel.slot == 7:
        sys.exit(7)
print(lease.ended, flush=True)
sys.exit(5)
"""


@pytest.fixture
def ssh(tmp_path: Path, run: RunConfig, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    """In place of ssh, a shell of this host, and in place of a generator, a process that has its parcel and lease."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "there.py").write_text(THERE)
    program = tmp_path / "bin" / "ssh"
    program.write_text(SSH.format(said=tmp_path / "said"))
    program.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    python = f"{sys.executable} '{tmp_path / 'there.py'}'"
    return replace(run, hosts=replace(run.hosts, python=python, ssh="-p 2222", lease_s=4.0))


def test_ssh_gets_the_parcel_and_the_lease_and_passes_output_and_exit_code_on(ssh: RunConfig, tmp_path: Path) -> None:
    log = tmp_path / "logs" / "g0.log"
    with Processes(20.0, elsewhere=SshStarter(ssh)) as processes:
        processes.start(command(log=log))
        until(lambda: log.exists() and "g0" in log.read_text())
        arguments = (tmp_path / "said").read_text().splitlines()
        assert {"BatchMode=yes", "ServerAliveInterval=5"} <= set(arguments)
        python = f"{sys.executable} {tmp_path / 'there.py'}"
        assert arguments[-5:] == ["-p", "2222", "--", "h1", f"exec {python} -m inflight.hosted"]
        assert API_KEY not in "".join(arguments)
        processes.start(command("g1", slot=7, log=log))
        ended: list[Ended] = []
        until(lambda: ended.extend(processes.ended()) or ended)
        assert [(each.command.name, each.code) for each in ended] == [("g1", 7)]
        processes.start(command("g1", host="gone", log=log))
        ended.clear()
        until(lambda: ended.extend(processes.ended()) or ended)
        assert ended[0].code == UNREACHABLE
        assert processes.running() == ["g0"]
        assert processes.stop() == []
    assert "the launcher has ended it" in log.read_text()


def test_only_a_starter_of_other_hosts_starts_there() -> None:
    with Processes(5.0) as processes, pytest.raises(ValueError, match="g0 is to run on h1, where nothing starts it"):
        processes.start(command())


class Fake:
    """A starter without processes."""

    def __init__(self) -> None:
        self.done: list[str] = []

    def start(self, command: Command) -> Handle:
        self.done.append(f"start {command.name}")
        code: list[int] = []

        def stop() -> None:
            self.done.append(f"stop {command.name}")
            code.append(STOPPED)

        return SimpleNamespace(
            pid=None, address=command.host, poll=lambda: code[0] if code else None, stop=stop, kill=lambda: None
        )

    def close(self) -> None:
        self.done.append("close")


def test_the_launcher_needs_no_more_than_the_protocol() -> None:
    there = Fake()
    with Processes(5.0, elsewhere=there) as processes:
        processes.start(command())
        processes.kill_orphans()
        assert processes.ended() == []
    assert there.done == ["start g0", "stop g0", "close"]


def test_a_host_that_is_gone_is_tried_again_and_counts_as_no_failure(run: RunConfig) -> None:
    restarts = Restarts(replace(run, launch=replace(run.launch, restart_delay_s=1.0, restarts=2)))
    gone = Ended(command(), UNREACHABLE)
    restarts.heard("g0", {"phase": "serving"})
    said = [str(restarts.failed(gone)) for _ in range(8)]
    assert [line.split(" in ")[1].split(" s;")[0] for line in said[:3]] == ["1", "2", "4"]
    assert f"in {RETRY_AT_MOST_S:g} s" in said[-1]
    assert "h1 can't be reached" in said[0]
    restarts.heard("g0", {"phase": "serving"})
    assert " in 1 s" in str(restarts.failed(gone)), "it was there meanwhile"
    assert restarts.failed(Ended(command(), 1)) is not None
    here = Ended(command(host=""), UNREACHABLE)
    assert "(2 of 2)" in str(restarts.failed(here)), "on this host 255 is an exit code like others"
    assert restarts.failed(here) is None


def test_a_host_that_was_never_reached_is_tried_a_few_times(run: RunConfig) -> None:
    """Its name is wrong, or the key; or its sshd has dropped one of many connections that came at once."""
    restarts = Restarts(replace(run, launch=replace(run.launch, restarts=2)))
    gone = Ended(command(), UNREACHABLE)
    assert "(1 of 2)" in str(restarts.failed(gone))
    assert "(2 of 2)" in str(restarts.failed(gone))
    assert restarts.failed(gone) is None
    assert restarts.failed(Ended(command("g1"), 1)) is None, "it was reached, and would fail again"


# --- what is started where ---


def test_generators_go_to_the_hosts_in_turn_and_the_rest_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "available", lambda: ["0"])
    options = ["network.bind=10.0.0.1", "hosts.starter=ssh", "hosts.names=[h1,h2,h1]", "generator.count=4"]
    config = compose("tiny", [f"run_dir={tmp_path}/run", *options, "hosts.actors=[h2]"])
    found = {each.name: (each.host, each.slot) for each in usual_commands(config)}
    assert found == {
        "trainer": ("", 0),
        "g0": ("h1", 0),
        "g1": ("h2", 0),
        "g2": ("h1", 1),
        "g3": ("h1", 2),
        "a0": ("h2", 0),
    }
    environments = {each.name: each.environment.get("CUDA_VISIBLE_DEVICES") for each in usual_commands(config)}
    assert environments == {"trainer": "0"} | dict.fromkeys(["g0", "g1", "g2", "g3", "a0"])


def test_a_run_may_have_generators_here_and_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "available", lambda: ["0", "1", "2"])
    options = ["network.bind=10.0.0.1", "hosts.starter=ssh", "hosts.names=[local,h1]", "generator.count=4"]
    commands = usual_commands(compose("tiny", [f"run_dir={tmp_path}/run", *options]))
    found = {
        each.name: (each.host, each.environment.get("CUDA_VISIBLE_DEVICES"))
        for each in commands
        if each.kind == "generator"
    }
    assert found == {"g0": ("", "1,0"), "g1": ("h1", None), "g2": ("", "2,0"), "g3": ("h1", None)}
    assert [each.slot for each in commands if each.host] == [0, 1]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["hosts.starter=ssh", "hosts.names=[h1]"], "hosts.starter='ssh' is not allowed: local, or with network.bind"),
        (["hosts.starter=ssh", "network.bind=10.0.0.1"], "together with hosts.names or hosts.actors"),
        (['hosts.ssh="-i \'key"'], "with its quotes closed"),
        (["hosts.starter=telnet"], "hosts.starter='telnet' is not allowed: local, ssh"),
        (["hosts.starter=ssh", "hosts.names=['-oProxyCommand=x']"], "hosts.names='-oProxyCommand=x' is not allowed"),
    ],
)
def test_hosts_that_can_not_be_used_are_refused(tmp_path: Path, options: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose("tiny", [f"run_dir={tmp_path}/run", *options])
    assert said in str(caught.value)


ELSEWHERE = "network.bind=127.0.0.1 is not allowed with hosts.names={}: no other host reaches a loopback address"


@pytest.mark.parametrize("host", ["192.0.2.7", "me@192.0.2.7", "'[2001:db8::7]'"])
def test_hosts_that_can_not_reach_loopback_are_refused_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], host: str
) -> None:
    options = ["network.bind=127.0.0.1", "hosts.starter=ssh", f"hosts.names=[local,{host}]", "generator.count=2"]
    assert launching.main(["--config-name", "tiny", f"run_dir={tmp_path}/run", *options]) == BAD_INPUT
    error = capsys.readouterr().err
    assert error.startswith(f"inflight launch: {ELSEWHERE.format(host.strip(chr(39)))}")
    assert error.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_hosts_that_may_reach_the_trainer_are_not_refused() -> None:
    def check(bind: str, names: str, count: int = 2, starter: str = "ssh") -> None:
        run = composed()
        hosts = replace(run.hosts, starter=starter, names=names.split(","))
        generator = replace(run.generator, count=count)
        require_reachable(replace(run, network=NetworkConfig(bind=bind), hosts=hosts, generator=generator))

    addresses = [each.address for each in itertools.chain(*psutil.net_if_addrs().values())]
    own = [each for each in addresses if is_address(each) and "." in each]
    for names in ("127.0.0.1,me@127.0.0.2", "h1,local", "[::1]", own[-1]):
        check("127.0.0.1", names)
        check("::1", names)
    check("127.0.0.1", "local,192.0.2.7", count=1)  # takes no generator
    check("10.0.0.1", "192.0.2.7")
    for starter in ("ssh", "ray"):
        with pytest.raises(ConfigError, match=r"hosts\.names=192\.0\.2\.7"):
            check("127.0.0.2", "local,192.0.2.7", starter=starter)
    require_reachable(replace(composed(), network=NetworkConfig(), hosts=HostsConfig()))


def test_a_parcel_is_checked_like_any_message() -> None:
    assert Parcel.__struct_config__.forbid_unknown_fields
