"""Which actor works on which questions."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class _Account:
    """One actor's slots since its hello."""

    incarnation: str
    questions: set[int] = field(default_factory=set)
    """Those that were granted and are not settled."""


class Accounts:
    """The actors that have said hello, with the questions that each has in flight. A question is in at most one
    place."""

    def __init__(self) -> None:
        self._accounts: dict[str, _Account] = {}

    @property
    def in_flight(self) -> dict[str, int]:
        """Number of questions, by actor."""
        return {name: len(account.questions) for name, account in self._accounts.items()}

    @property
    def held(self) -> dict[str, set[int]]:
        """The questions, by actor."""
        return {name: account.questions for name, account in self._accounts.items()}

    def knows(self, actor: str, incarnation: str) -> bool:
        """Whether this start of the actor is known."""
        account = self._accounts.get(actor)
        return account is not None and account.incarnation == incarnation

    def open(self, actor: str, incarnation: str) -> None:
        """A start of an actor, with nothing in flight yet."""
        self._accounts[actor] = _Account(incarnation)

    def close(self, actor: str) -> list[int]:
        """An actor is gone; returns what it had in flight, in order. An unknown one had nothing."""
        account = self._accounts.pop(actor, None)
        return sorted(account.questions) if account else []

    def grant(self, actor: str, question: int) -> None:
        """A question that is from now on in flight."""
        self._accounts[actor].questions.add(question)

    def returned(self, actor: str, question: int) -> bool:
        """A question is no longer in flight; False when this actor did not have it."""
        account = self._accounts.get(actor)
        if account is None or question not in account.questions:
            return False
        account.questions.remove(question)
        return True

    def end(self, questions: int) -> int:
        """The task has this many: those beyond are no longer in flight. Returns how many that were."""
        removed = 0
        for account in self._accounts.values():
            beyond = {question for question in account.questions if question >= questions}
            account.questions -= beyond
            removed += len(beyond)
        return removed
