"""Foreign code in this process, for tests in which something else matters (not a test file)."""

import asyncio

from inflight.actor import calls
from inflight.actor.foreign import Foreign
from inflight.actor.pending import CallFailed
from inflight.actor.scoring import Rewarded, Rewards
from inflight.actor.services import RewardsService, TaskService, TextService
from inflight.actor.worker import answered
from inflight.rewards import make_all
from inflight.tasks.course import Course


class InProcess:
    """Answers calls as a child does, without one."""

    def __init__(self, service, limit_s):
        self.ready, self._service, self._limit_s = service.ready(), service, limit_s

    async def call(self, ask):
        reader = asyncio.StreamReader()
        reader.feed_data(await answered(self._service, ask(0), self._limit_s))
        message = await calls.read_from_child(reader)
        if isinstance(message, calls.Raised):
            raise CallFailed(message.kind, message.text, trace=message.trace, late=message.late)
        return message


def in_process(task, tokens, limit_s=30.0, *, epochs=1, rewards=()):
    """A Foreign whose task, tokenizer and rewards run here; what blocks, blocks."""
    service = TaskService(task, Course(task, epochs))
    callers = InProcess(service, limit_s), InProcess(service, limit_s), InProcess(TextService(tokens), limit_s)
    if not rewards:
        return Foreign(*callers, limit_s)
    crew = InProcess(RewardsService(make_all(rewards)), limit_s)
    own = next((each for each in rewards if each.is_task), None)
    others = [Rewarded(each, crew, which) for which, each in enumerate(each for each in rewards if not each.is_task)]
    return Foreign(*callers, limit_s, Rewards(others, own, limit_s))
