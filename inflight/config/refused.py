"""Options that users of vLLM look for and that inflight does not have, with the reason."""

from __future__ import annotations

_DIFFERS = (
    "the log-probabilities that vLLM records are of the distribution after that, and the trainer and the audit would"
    " compute others"
)
REFUSED = {
    "rollout.min_tokens": f"vLLM excludes the end tokens before so many tokens; {_DIFFERS}. Use the reward `length`",
    "rollout.bad_words": f"vLLM excludes tokens that would complete such a word; {_DIFFERS}. Use the reward `regex`"
    " with a negative weight",
    "rollout.logit_bias": f"vLLM adds the bias to the logits; {_DIFFERS}",
    "rollout.allowed_token_ids": f"vLLM excludes all other tokens; {_DIFFERS}",
}
"""By dotted name."""
