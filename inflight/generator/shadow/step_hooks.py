"""Hooks at the two points where a step of vLLM's model runner begins and ends its use of the weights."""

from __future__ import annotations

from typing import Any


def hook_forward(runner: Any, before: Any) -> bool:
    """Calls `before()` right before each forward pass is launched. Returns False when this runner can't be hooked.

    The V2 runner calls `kv_connector.pre_forward` there in every mode (full graph, piecewise, eager); the V1 runner
    calls `_model_forward`.
    """
    if hasattr(runner, "kv_connector") and hasattr(runner.kv_connector, "pre_forward"):
        runner.kv_connector = _BeforeForward(runner.kv_connector, before)
        return True
    if hasattr(runner, "_model_forward"):
        forward = runner._model_forward

        def hooked(*args: Any, **kwargs: Any) -> Any:
            before()
            return forward(*args, **kwargs)

        runner._model_forward = hooked
        return True
    return False


def hook_logits(model: Any, after: Any) -> None:
    """Calls `after()` when a step's logits are queued: both runners call `model.compute_logits`, and nothing later in a
    step (sampling, copies, the next step's inputs) reads weights. Without this hook every step uses the weights to its
    end."""
    compute = getattr(model, "compute_logits", None)
    if compute is None:
        return

    def hooked(*args: Any, **kwargs: Any) -> Any:
        logits = compute(*args, **kwargs)
        after()
        return logits

    model.compute_logits = hooked


class _BeforeForward:
    """Wraps a KV connector: adds a call before `pre_forward`."""

    def __init__(self, connector: Any, before: Any) -> None:
        self._connector = connector
        self._before = before

    def pre_forward(self, *args: Any, **kwargs: Any) -> None:
        """From vLLM 0.32 on there are more arguments than the scheduler's output."""
        self._before()
        self._connector.pre_forward(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connector, name)
