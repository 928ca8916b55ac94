"""Nothing of a generator outlives it: not when it was started by a script, nor when it hangs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

# As vLLM does it: a server that starts an engine core, which starts a worker; both hang and hold the GIL. Each
# loads the plugin when it has started; a forked one has it of its parent.
SERVER = """
import ctypes, multiprocessing, os, sys, time
from inflight.generator import plugin

PR_GET_PDEATHSIG = 2

def come_up():
    if multiprocessing.get_start_method() == "spawn":
        plugin.register()
    signal = ctypes.c_int()
    ctypes.CDLL(None).prctl(PR_GET_PDEATHSIG, ctypes.byref(signal), 0, 0, 0)
    print(os.getpid(), signal.value, flush=True)

def worker():
    come_up()
    ctypes.PyDLL(None).sleep(600)

def core():
    come_up()
    multiprocessing.Process(target=worker).start()
    ctypes.PyDLL(None).sleep(600)

if __name__ == "__main__":
    multiprocessing.set_start_method(sys.argv[1])
    if sys.argv[2] == "of a run":
        os.environ[plugin.INCARNATION] = "cafe"
    plugin.register()
    multiprocessing.Process(target=core).start()
    time.sleep(600)
"""


def family(tmp_path: Path, how: str, whose: str) -> tuple[subprocess.Popen[str], dict[psutil.Process, int]]:
    """The server, in the group of this process as a script's child is, and its engine core and worker, with the signal
    that each gets when its parent ends."""
    (tmp_path / "server.py").write_text(SERVER)
    command = [sys.executable, str(tmp_path / "server.py"), how, whose]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    lines = [server.stdout.readline().split() for _ in range(2)]
    return server, {psutil.Process(int(pid)): int(signal) for pid, signal in lines}


@pytest.mark.parametrize("how", ["spawn", "fork"])
def test_a_killed_generator_leaves_no_engine_behind(tmp_path, how):
    server, children = family(tmp_path, how, "of a run")
    server.kill()
    _, left = psutil.wait_procs(children, timeout=20)
    for each in left:
        each.kill()
    server.wait(10)
    assert left == []


def test_an_engine_that_is_no_generators_is_left_alone(tmp_path):
    """The plugin is loaded into every vLLM process of the machine."""
    server, children = family(tmp_path, "fork", "of nobody")
    server.kill()
    server.wait(10)
    for each in children:
        each.kill()
    assert list(children.values()) == [0, 0]


# As vLLM 0.33 starts workers: each from a thread of a pool that ends, here when the worker has loaded the plugin.
POOL = """
import multiprocessing, os, pathlib, threading, time
from inflight.generator import plugin

def worker(up):
    plugin.register()
    up.set()
    time.sleep(600)

def start(workers, up):
    workers.append(multiprocessing.Process(target=worker, args=(up,)))
    workers[0].start()
    up.wait()

if __name__ == "__main__":
    multiprocessing.set_start_method("spawn")
    os.environ[plugin.INCARNATION] = "cafe"
    workers, up = [], multiprocessing.Event()
    thread = threading.Thread(target=start, args=(workers, up))
    thread.start()
    thread.join()
    children = pathlib.Path(f"/proc/self/task/{os.getpid()}/children")
    while workers[0].is_alive() and str(workers[0].pid) not in children.read_text().split():
        time.sleep(0.01)
    print(workers[0].pid, workers[0].is_alive(), flush=True)
    time.sleep(600)
"""


def test_a_worker_outlives_the_thread_that_has_started_it_but_not_its_process(tmp_path):
    (tmp_path / "pool.py").write_text(POOL)
    command = [sys.executable, str(tmp_path / "pool.py")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        pid, alive = server.stdout.readline().split()
        worker = psutil.Process(int(pid))
        server.kill()
        _, left = psutil.wait_procs([worker], timeout=20)
        for each in left:
            each.kill()
    assert alive == "True"
    assert left == []


ORPHAN = """
import os, sys
from inflight.lifeline import end_with
end_with(int(sys.argv[1]))
print("lives on")
"""


def test_a_process_whose_parent_is_gone_already_ends_at_once():
    done = subprocess.run([sys.executable, "-c", ORPHAN, "1"], capture_output=True, text=True, timeout=180, check=False)
    assert (done.returncode, done.stdout) == (1, "")
