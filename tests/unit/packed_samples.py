"""`packed_logprobs` as the patched server writes it, from plain numbers (not a test file)."""

import base64
import struct


def packed(token_ids, logprobs=None, others=None):
    """Base64 of the field: each token with its log-probability (-0.5 by default), and after it the possible ones among
    the most probable, a dict from id to log-probability a token."""
    logprobs = [-0.5] * len(token_ids) if logprobs is None else logprobs
    rows = [
        [(token, logprob), *((other, value) for other, value in also.items() if other != token)]
        for token, logprob, also in zip(token_ids, logprobs, others or [{}] * len(token_ids), strict=True)
    ]
    return framed([len(row) for row in rows], [entry for row in rows for entry in row])


def framed(counts, entries, length=None):
    """The field of these counts and (id, log-probability) pairs, whether they fit or not."""
    ids, logprobs = [token for token, _ in entries], [value for _, value in entries]
    data = struct.pack(f"<i{len(counts)}i", len(counts) if length is None else length, *counts)
    return base64.b64encode(data + struct.pack(f"<{len(ids)}i{len(ids)}f", *ids, *logprobs)).decode()
