"""Sockets of TCP on the address and in the port range of a process (config/network.py), and facts about interfaces."""

from __future__ import annotations

import errno
import random
import socket
from collections.abc import Mapping

import psutil

from inflight.config.network import NetworkConfig


def listen(network: NetworkConfig) -> socket.socket:
    """A socket that listens on the process's address, on a free port of its range. Raises OSError that names both when
    the address is none of this host's, or no port is free."""
    first, last = network.span
    ports = list(range(first, last + 1))
    random.shuffle(ports)  # several processes search at once
    family = socket.AF_INET6 if ":" in network.address else socket.AF_INET
    for port in ports:
        try:
            return socket.create_server((network.address, port), family=family)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                continue
            raise OSError(error.errno, f"can't listen on {network.address}: {error.strerror}") from None
    text = f"no free port on {network.address} among {network.ports} (network.ports)"
    raise OSError(errno.EADDRINUSE, text)


def source_of(host: str) -> str:
    """The own address from which this host reaches another one. Raises OSError when there is no route to it."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # of a datagram socket: nothing is sent
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str:
    """The name of the interface with this address; empty when this host has none."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address.partition("%")[0] == address for each in addresses):
            return name
    return ""


def nccl_settings(network: NetworkConfig, given: Mapping[str, str]) -> dict[str, str]:
    """Environment variables with which NCCL uses the interface of `network`; none without `bind`, or where `given` has
    settings of its own. Raises OSError when this host has no such address."""
    if not network.bind or "NCCL_SOCKET_IFNAME" in given:
        return {}
    if not (name := interface_of(network.bind)):
        raise OSError(errno.EADDRNOTAVAIL, f"no interface of this host has the address {network.bind} (network.bind)")
    return {"NCCL_SOCKET_IFNAME": f"={name}", "NCCL_SOCKET_FAMILY": "AF_INET6" if ":" in network.bind else "AF_INET"}
