"""Refuses a run whose generators on other hosts can't reach the trainer, as far as that is certain before any of them
is started: else each of them would search for it for minutes."""

from __future__ import annotations

import ipaddress

from inflight.config import ConfigError, RunConfig
from inflight.listening import interface_of


def require_reachable(config: RunConfig) -> None:
    """Raises ConfigError when this host listens on loopback, and a generator is to be on a host with another address
    that is none of this host's. A tunnel does not help: weights come over ports that the kernel chooses."""
    bind = config.network.address
    if not ipaddress.ip_address(bind).is_loopback:
        return
    for number in range(config.generator.count):
        name = config.hosts.of("generator", number)
        if _is_of_another_host(name.rpartition("@")[2].strip("[]")):
            raise ConfigError(
                f"network.bind={bind} is not allowed with hosts.names={name}: no other host reaches a loopback address;"
                f" an address of this host that {name} reaches is"
            )


def _is_of_another_host(destination: str) -> bool:
    """Whether it is certain: a name may be an alias of ssh's for any host."""
    try:
        address = ipaddress.ip_address(destination)
    except ValueError:
        return False
    return not (address.is_loopback or interface_of(str(address).partition("%")[0]))
