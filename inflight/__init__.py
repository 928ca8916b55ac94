"""inflight: update the weights of running LLM generators without stopping them."""

__version__ = "0.1.0"
