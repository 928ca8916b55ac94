"""Why a hello is not taken: it speaks for another, or the generator is of no use to this publisher."""

from __future__ import annotations

from inflight.messages import EngineHello, RankHello
from inflight.weights.publish.delivery import Delivery, State


def stranger(peer: str, hello: RankHello | EngineHello, delivery: Delivery) -> str:
    """Why a hello does not speak for the generator; empty when it does."""
    member = f"r{hello.rank}" if isinstance(hello, RankHello) else "engine"
    if peer != f"{delivery.generator}.{member}":
        return f"{peer} can't speak for {delivery.generator}.{member}"
    if hello.incarnation in delivery.replaced:
        return "another process has taken its place"
    if delivery.state is State.POISONED and hello.incarnation == delivery.incarnation:
        return f"it may hold a torn version ({delivery.why}): it must be restarted"
    return ""


def mismatch(hello: RankHello | EngineHello, delivery: Delivery, newest: int) -> str:
    """Why the generator can't be sent what this publisher has; empty when it can."""
    if hello.world_size != delivery.world_size:
        return f"world_size is {hello.world_size}, this run expects {delivery.world_size}"
    if isinstance(hello, RankHello) and hello.rank >= delivery.world_size:
        return f"rank {hello.rank} of {delivery.world_size}"
    if hello.version is not None and hello.version > newest:
        return (
            f"it holds version {hello.version}, the trainer is at {newest}: "
            "restart the generator, or begin at that version"
        )
    return ""
