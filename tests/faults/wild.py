"""A task whose questions misbehave, each in its way, named in a run's configuration (not a test file)."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from dataclasses import dataclass, replace

from inflight.tasks.addition import Addition

REASONS = {
    1: "task error: KeyError",
    2: "task error: item",
    3: "task error: UnicodeEncodeError",
    4: "task error: UnicodeEncodeError",
    5: "task timeout",
    6: "task crash: code 139",
    8: "reward timeout",
    9: "reward timeout",
    10: "reward timeout",
    11: "reward timeout",
    12: "reward crash: code 139",
    13: "reward crash: SIGKILL",
    14: "reward error: MemoryError",
    15: "reward error: no number",
    16: "reward error: ValueError",
    17: "reward error: not finite",
    18: "reward error: SystemExit",
}
"""By question; all others are sound."""


def block():
    time.sleep(3600)


@dataclass(frozen=True)
class Wild(Addition):
    """Additions, some of which are not."""

    def item(self, index):
        match index:
            case 1:
                raise KeyError(index)
            case 2:
                return None
            case 5:
                time.sleep(3600)
            case 6:
                os._exit(139)
        item = replace(super().item(index), key=f"wild:{index}")
        if index == 3:
            return replace(item, key="wild:\ud835")
        return replace(item, prompt="1+\ud835") if index == 4 else item

    async def score(self, item, completion):
        match int(item.key.partition(":")[2]):
            case 8:
                re.match(r"(a+)+$", "a" * 40 + "!")  # holds the GIL for hours
            case 9:
                block()
            case 10:
                await asyncio.to_thread(time.sleep, 9999)
            case 11:
                await asyncio.sleep(9999)
            case 12:
                os._exit(139)
            case 13:
                os.kill(os.getpid(), signal.SIGKILL)
            case 14:
                return float(len(bytearray(30 << 30)))
            case 15:
                return None
            case 16:
                raise ValueError(item.key)
            case 17:
                return float("nan")
            case 18:
                raise SystemExit(1)
        return await super().score(item, completion)
