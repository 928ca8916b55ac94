"""Slots of adapters: what is asked of vLLM's own parts, without an engine."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from inflight.generator.shadow.slots import AdapterUnfit, names_of_adapters


@pytest.mark.parametrize("method", ["get_rename_mapper", "get_unstacked_mapper"])
def test_adapters_are_renamed_but_not_stacked_in_every_supported_vllm(method: str) -> None:
    assert names_of_adapters(SimpleNamespace(**{method: lambda: "renames"})) == "renames"


def test_a_model_without_renamings_has_none() -> None:
    assert names_of_adapters(None) is None


def test_a_mapper_of_another_vllm_is_refused_by_name() -> None:
    with pytest.raises(AdapterUnfit, match="maps names by SimpleNamespace"):
        names_of_adapters(SimpleNamespace())
