"""Slots of adapters: what is asked of vLLM's own parts, without an engine."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from inflight.generator.settings import Settings
from inflight.generator.shadow.limits import UnsupportedModel
from inflight.generator.shadow.slots import AdapterUnfit, names_of_adapters
from inflight.generator.worker.adapters import with_slots


@pytest.mark.parametrize("method", ["get_rename_mapper", "get_unstacked_mapper"])
def test_adapters_are_renamed_but_not_stacked_in_every_supported_vllm(method: str) -> None:
    assert names_of_adapters(SimpleNamespace(**{method: lambda: "renames"})) == "renames"


def test_a_model_without_renamings_has_none() -> None:
    assert names_of_adapters(None) is None


def test_a_mapper_of_another_vllm_is_refused_by_name() -> None:
    with pytest.raises(AdapterUnfit, match="maps names by SimpleNamespace"):
        names_of_adapters(SimpleNamespace())


@pytest.mark.parametrize(
    ("adapters", "admitted", "slots"),
    [
        (1, 1, 2),  # two of the adapter's
        (1, 3, 2 + 3),  # and as many of vLLM's as it admits to a step without the adapter
        (2, 3, 4 + 3),
    ],
)
def test_each_adapter_has_two_slots_and_vllm_as_many_as_it_admits_to_a_step(
    adapters: int, admitted: int, slots: int
) -> None:
    names = [f"a{number}" for number in range(adapters)]
    lora = SimpleNamespace(max_loras=admitted, max_cpu_loras=admitted + 2)
    config = SimpleNamespace(additional_config=Settings(adapters=names).as_additional_config(), lora_config=lora)
    widened = with_slots(config).lora_config
    assert (widened.max_loras, widened.max_cpu_loras) == (slots, slots + 2)
    assert with_slots(config, spare=1).lora_config.max_loras == slots + 1
    assert lora.max_loras == admitted, "the scheduler's own"
    lora.max_loras = adapters - 1
    with pytest.raises(UnsupportedModel, match=f"has no place for {adapters} adapters"):
        with_slots(config)
