"""Fixtures that all tests share."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

# Before torch or vLLM is imported: tests share few cores, and nothing may reach for the network.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # by a shell in whose background the tests run; runs inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def tiny_model() -> Path:
    """Directory of the random model with tied embeddings, as every run finds it."""
    from inflight.models import prepare

    return prepare("tiny")


@pytest.fixture(scope="session")
def tiny_untied_model() -> Path:
    """Directory of the random model with an `lm_head` of its own."""
    from inflight.models import prepare

    return prepare("tiny-untied")


@pytest.fixture
def bus_endpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An address for a Listener; its path is short enough for a socket."""
    folder = tmp_path_factory.mktemp("bus")
    return f"ipc://{folder}/s"
