"""Foreign code in this process, for tests in which something else matters (not a test file)."""

import asyncio

from inflight.actor import calls
from inflight.actor.foreign import Foreign
from inflight.actor.hosts import TaskHost, TextHost
from inflight.actor.pending import CallFailed
from inflight.actor.worker import answered
from inflight.tasks.course import Course


class _Caller:
    """Answers calls as a child does, without one."""

    def __init__(self, host, limit_s):
        self.ready, self._host, self._limit_s = host.ready(), host, limit_s

    async def call(self, ask):
        reader = asyncio.StreamReader()
        reader.feed_data(await answered(self._host, ask(0), self._limit_s))
        message = await calls.read_from_child(reader)
        if isinstance(message, calls.Raised):
            raise CallFailed(message.kind, message.text, late=message.late)
        return message


def in_process(task, tokens, limit_s=30.0, *, epochs=1):
    """A Foreign whose task and tokenizer run here; what blocks, blocks."""
    host = TaskHost(task, Course(task, epochs))
    return Foreign(_Caller(host, limit_s), _Caller(host, limit_s), _Caller(TextHost(tokens), limit_s), limit_s)
