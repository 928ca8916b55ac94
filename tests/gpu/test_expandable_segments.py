"""Memory of torch's expandable segments can't be exported over CUDA IPC: the transport follows from that."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.gpu

CODE = """
import sys
import torch
from inflight.weights.transport import resolve
from inflight.weights.transport.base import TransportError
device = torch.device("cuda", 0)
torch.empty(1 << 30, dtype=torch.uint8, device=device)  # a trainer has allocated before
try:
    print(resolve(sys.argv[1], device))
except TransportError as error:
    print(error)
"""


@pytest.mark.parametrize("variable", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
@pytest.mark.parametrize(("asked", "says"), [("auto", "nccl"), ("ipc", "publish.transport=ipc: the send buffer can't")])
def test_expandable_segments_take_nccl_or_are_refused(variable: str, asked: str, says: str) -> None:
    if variable == "PYTORCH_ALLOC_CONF" and not understands(variable):
        pytest.skip("this torch does not know the variable")
    assert says in resolved(asked, {variable: "expandable_segments:True"})


@pytest.mark.parametrize("asked", ["auto", "ipc"])
def test_plain_memory_takes_ipc(asked: str) -> None:
    assert resolved(asked, {}) == "ipc"


def resolved(asked: str, environment: dict[str, str]) -> str:
    """The last line of a process that has these settings of torch's allocator alone."""
    own = {name: value for name, value in os.environ.items() if not name.endswith("ALLOC_CONF")} | environment
    command = [sys.executable, "-c", CODE, asked]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True, env=own)
    return done.stdout.splitlines()[-1]


def understands(variable: str) -> bool:
    """Whether this torch takes expandable segments from the variable."""
    code = "import torch; torch.empty(1, device='cuda'); s = torch.cuda.memory._snapshot()['allocator_settings']; "
    code += "print(s['expandable_segments'])"
    own = {name: value for name, value in os.environ.items() if not name.endswith("ALLOC_CONF")}
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
        env=own | {variable: "expandable_segments:True"},
    )
    return done.stdout.splitlines()[-1] == "True"
