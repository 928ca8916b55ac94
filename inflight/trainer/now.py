"""How publishing and the buffer stand between two steps, for the trainer's status."""

from __future__ import annotations

from inflight.rollout.buffer import Buffer
from inflight.types import Value
from inflight.weights.publish.publisher import Publisher


def now(publisher: Publisher, buffer: Buffer) -> dict[str, Value]:
    """Name of a figure → value (launcher's view: view/progress.py)."""
    counts = buffer.counts()
    by_reason = {"dropped": counts.dropped, "rollouts": counts.rollouts_dropped, "failed": counts.failed}
    ages = sorted(buffer.ages(publisher.version).items())
    return {
        **{f"committed_{name}": version for name, version in publisher.committed.items()},
        **{f"behind_{name}": count for name, count in publisher.behind.items()},
        **{f"state_{name}": state.name for name, (state, _) in publisher.states.items()},
        "buffer": counts.buffered,
        "in_flight": counts.in_flight,
        "buffer_ages": ", ".join(f"{groups} of age {age}" for age, groups in ages),
        **{f"{kind}/{reason}": count for kind, each in by_reason.items() for reason, count in each.items()},
    }
