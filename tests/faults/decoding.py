"""Clients that decode all the time, until standard input ends: `python decoding.py URL MANY TOKENS` (not a test file).

A process of its own: neither the libraries that a test has loaded, which a collection of garbage walks through, nor the
test's threads delay a token's time. Prints `decoding` when each sequence has had a token, and in the end one JSON
object: `gaps` [[when (time.monotonic), seconds since the token before], …], `late` [[when, by how many seconds this
process woke too late], …], `errors` and `finished`. A gap together with such a lateness is its own: it had no core,
or more to read than it can.
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import threading
import time

import aiohttp

BEAT_S = 0.01
gaps: list[tuple[float, float]] = []
late: list[tuple[float, float]] = []
errors: list[str] = []
finished: list[str] = []
begun: set[int] = set()
stopped = threading.Event()


async def decode(session: aiohttp.ClientSession, url: str, number: int, many: int, tokens: int) -> None:
    """One sequence after another."""
    body = {
        "prompt": [3 + number % 10, 4, 5],
        "max_tokens": tokens,
        "temperature": 1.0,
        "seed": number,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    while not stopped.is_set():
        last = 0.0
        try:
            async with session.post(f"{url}/v1/completions", json=body) as reply:
                reply.raise_for_status()
                async for line in reply.content:
                    if stopped.is_set():
                        return
                    if not line.startswith(b"data: {"):
                        continue
                    choice = json.loads(line[6:])["choices"][0]
                    now = time.monotonic()
                    if last and choice.get("token_ids"):
                        gaps.append((now, now - last))
                    last = now
                    if len(begun) < many:
                        begun.add(number)
                        if len(begun) == many:
                            print("decoding", flush=True)
                    if choice["finish_reason"]:
                        finished.append(choice["finish_reason"])
        except (aiohttp.ClientError, TimeoutError) as error:
            errors.append(f"{type(error).__name__}: {error}")
            return


async def beat() -> None:
    """Notes how late this process is."""
    while not stopped.is_set():
        due = time.monotonic() + BEAT_S
        await asyncio.sleep(BEAT_S)
        late.append((now := time.monotonic(), now - due))


async def main(url: str, many: int, tokens: int) -> None:
    async with aiohttp.ClientSession() as session:
        await asyncio.gather(beat(), *(decode(session, url, number, many, tokens) for number in range(many)))


def wait_for_end() -> None:
    sys.stdin.read()
    stopped.set()


if __name__ == "__main__":
    gc.freeze()
    threading.Thread(target=wait_for_end, daemon=True).start()
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
    json.dump({"gaps": gaps, "late": late, "errors": errors, "finished": finished}, sys.stdout)
