"""The optimizer does not write what is still being read. (Streams themselves: tests/gpu/test_fsdp.py.)"""

from __future__ import annotations

import torch

from inflight.weights.publish.read_fence import ReadFence


class Event:
    """Stands for a CUDA event: notes what the parameter was at each wait for it."""

    def __init__(self, parameter):
        self.parameter, self.seen = parameter, []

    def synchronize(self):
        self.seen.append(self.parameter.item())


def optimizer_of_one():
    parameter = torch.nn.Parameter(torch.tensor(1.0))
    parameter.grad = torch.tensor(1.0)
    return parameter, torch.optim.SGD([parameter], lr=0.5)


def test_a_step_waits_before_it_writes():
    parameter, optimizer = optimizer_of_one()
    fence = ReadFence(torch.device("cpu"))
    fence.hold(optimizer)
    fence._read = event = Event(parameter)
    optimizer.step()
    assert event.seen == [1.0]
    assert parameter.item() == 0.5
    assert fence.take_waited_s() > 0
    assert fence.take_waited_s() == 0


def test_reads_are_waited_for_while_no_optimizer_is_held():
    parameter, optimizer = optimizer_of_one()
    fence = ReadFence(torch.device("cpu"))
    fence._read = event = Event(parameter)
    fence.settle()
    assert event.seen == [1.0]
    fence.hold(optimizer)
    fence.settle()
    assert event.seen == [1.0], "its next step waits"


def test_on_a_cpu_nothing_waits():
    parameter, optimizer = optimizer_of_one()
    fence = ReadFence(torch.device("cpu"))
    fence.hold(optimizer)
    with fence.reading():
        packed = parameter.detach().clone()
    fence.settle()
    assert fence._read is None
    optimizer.step()
    assert packed.item() == 1.0
