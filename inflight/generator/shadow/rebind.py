"""The shadow on CPU: a version is packed beside the live one, and a swap rebinds Python references.

vLLM packs linear weights on CPU into oneDNN (or AMX) matrices behind a closure, `layer.cpu_linear`, and drops the
parameter; a tied `lm_head` has a packed copy of its own. There is no storage to copy into, so a version becomes a
second set of parameters and closures, made by vLLM's own loaders and packing, and a swap puts that set into the modules
of the live model: a few hundred dictionary entries, no copies. vLLM's own reload of weights does not update the packed
copy of a tied `lm_head`; here every result of packing is rebound.

The set that was live stays referenced until the next `begin`, so that it is not freed in the step loop.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

from inflight.generator.shadow.coverage import check_coverage
from inflight.generator.shadow.limits import UnsupportedModel, refuse
from inflight.generator.shadow.template import like, make_template, refuse_model
from inflight.messages import Manifest

if TYPE_CHECKING:
    from vllm.config import VllmConfig

Binding = tuple[dict[str, Any], str, Any]
"""A dictionary of a live module, a key in it, and its new value."""


@dataclass(frozen=True)
class _Layer:
    """A module of the live model with its counterpart in the template."""

    name: str
    live: torch.nn.Module
    template: torch.nn.Module
    prototypes: dict[str, torch.nn.Parameter | None]
    """The template's meta parameters (None: it has no bias), restored after a build."""
    attributes: dict[str, Any] = field(repr=False)
    """The template module's plain attributes before packing; those that packing adds or changes are rebound too."""

    def derived(self) -> dict[str, Any]:
        """Attributes that packing has set, such as `cpu_linear`."""
        return {k: v for k, v in vars(self.template).items() if k not in self.attributes or self.attributes[k] is not v}

    def reset(self) -> None:
        """Restores the template: meta parameters, nothing packed."""
        for name in self.derived():
            if name in self.attributes:
                vars(self.template)[name] = self.attributes[name]
            else:
                del vars(self.template)[name]
        self.template._parameters.clear()
        self.template._parameters.update(self.prototypes)


class RebindShadow:
    """The Shadow of a model on CPU. `begin`, `build` and `discard` run in one thread, `swap` in the step loop's."""

    def __init__(self, live: torch.nn.Module, vllm_config: VllmConfig) -> None:
        """Must be called in `load_model`. Raises UnsupportedModel for an engine that rebinding does not support."""
        refuse(vllm_config, "CPU")
        refuse_model(live)
        self._tensor_parallel_size = vllm_config.parallel_config.tensor_parallel_size
        self._template = make_template(vllm_config)
        self._layers = _pair(live, self._template)
        self._checked: Manifest | None = None
        self._manifest: Manifest | None = None
        self._buffer = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._built: list[Binding] | None = None
        self._spent: list[Binding] | None = None

    def begin(self, manifest: Manifest) -> torch.Tensor:
        """The receive buffer, uint8 `[manifest.total_bytes]`, reused by every version; frees the previous live set."""
        self.discard()
        self._spent = None
        if self._buffer.numel() != manifest.total_bytes:
            self._buffer = torch.empty(manifest.total_bytes, dtype=torch.uint8, device="cpu")
        self._manifest = manifest
        return self._buffer

    def build(self) -> None:
        """Loads and packs the received bytes. Raises CoverageError when the manifest does not fit the model."""
        if self._manifest is None:
            raise RuntimeError("build without begin")
        from inflight.weights.pack import unpack

        manifest, self._manifest = self._manifest, None
        if manifest is not self._checked:
            check_coverage(self._template, manifest, self._tensor_parallel_size)
            self._checked = manifest
        try:
            with torch.no_grad():
                self._materialise()
                self._template.load_weights(unpack(manifest, self._buffer).items())  # type: ignore[operator]
                for layer in self._layers:
                    _pack_layer(layer.template)
            self._built = self._bindings()
        finally:
            for layer in self._layers:
                layer.reset()

    def swap(self) -> float:
        """Rebinds the live model's modules. Raises RuntimeError when no version is built."""
        if self._built is None:
            raise RuntimeError("swap without build")
        started = time.perf_counter()
        spent = [(where, name, where.get(name)) for where, name, _ in self._built]
        for where, name, value in self._built:
            where[name] = value
        self._built = None
        self._spent = spent
        return time.perf_counter() - started

    def discard(self) -> None:
        """Frees a version that was built and not swapped."""
        self._built = self._manifest = None

    def _materialise(self) -> None:
        """Allocates memory for the template; a parameter that two modules share (tied) stays shared."""
        made: dict[int, torch.nn.Parameter] = {}
        for layer in self._layers:
            for name, prototype in layer.prototypes.items():
                if prototype is None:
                    continue
                param = made.get(id(prototype))
                if param is None:
                    param = made[id(prototype)] = like(prototype, "cpu")
                layer.template._parameters[name] = param

    def _bindings(self) -> list[Binding]:
        found: list[Binding] = []
        for layer in self._layers:
            found += [(layer.live._parameters, name, param) for name, param in layer.template._parameters.items()]
            found += [(vars(layer.live), name, value) for name, value in layer.derived().items()]
        return found


def _pack_layer(module: torch.nn.Module) -> None:
    """vLLM's own processing of one layer after loading, as in `process_weights_after_loading`."""
    method = getattr(module, "quant_method", None)
    if isinstance(method, QuantizeMethodBase):
        method.process_weights_after_loading(module)


def _pair(live: torch.nn.Module, template: torch.nn.Module) -> list[_Layer]:
    """The modules that own parameters or are packed, live and template in pairs, in the model's order."""
    shadows = dict(template.named_modules())
    layers = []
    for name, module in live.named_modules():
        shadow = shadows.pop(name, None)
        if type(shadow) is not type(module) or shadow._parameters.keys() != module._parameters.keys():
            raise UnsupportedModel(f"swapping weights on CPU does not support {name}: vLLM builds it in two ways")
        if shadow is module:  # shared through a cache of vLLM's, like rotary embeddings: constant
            continue
        if any(param is not None for param in shadow._parameters.values()):
            layers.append(_Layer(name, module, shadow, dict(shadow._parameters), dict(vars(shadow))))
    if shadows:
        raise UnsupportedModel(
            f"swapping weights on CPU does not support {next(iter(shadows))}: the engine's model is missing it"
        )
    return layers
