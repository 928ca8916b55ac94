"""The ranks and the engine of one generator: which are present, of which start, and which version each holds."""

from __future__ import annotations

from inflight.messages import EngineHello, Place, RankHello

Hello = RankHello | EngineHello


class Members:
    """The members of one start of a generator (an incarnation) are present or gone together."""

    def __init__(self, generator: str, world_size: int) -> None:
        self.generator = generator
        self.world_size = world_size
        self.ranks = [f"{generator}.r{rank}" for rank in range(world_size)]
        """Identities of the worker ranks."""
        self.engine = f"{generator}.engine"
        self.all = [*self.ranks, self.engine]
        self.incarnation: str | None = None
        """Incarnation of the current members. None before the first hello."""
        self.url = ""
        """The engine's HTTP address."""
        self.held: dict[str, int | None] = {}
        """Peer → the version of this publisher that it holds, None: it holds none. Only members that said hello and are
        not lost."""
        self._places: dict[str, Place | None] = {}
        self._replaced: set[str] = set()
        """Incarnations whose messages are ignored because another start has replaced them."""

    @property
    def missing(self) -> list[str]:
        """Members that have not said hello or were lost."""
        return [peer for peer in self.all if peer not in self.held]

    @property
    def places(self) -> dict[str, Place | None]:
        """Where each rank runs, in the order of the ranks."""
        return {rank: self._places.get(rank) for rank in self.ranks}

    @property
    def vllm(self) -> str:
        """The release of vLLM of the ranks that are present; empty when none is, or none says."""
        places = (place for rank, place in self._places.items() if rank in self.held and place is not None)
        return next((place.vllm for place in places if place.vllm), "")

    @property
    def version(self) -> int | None:
        """The version that the engine stamps from the next step on; all members hold it."""
        return self.held[self.engine]

    def objection(self, peer: str, hello: Hello) -> str:
        """Why a hello is not accepted as a member's; empty when it is."""
        member = f"r{hello.rank}" if isinstance(hello, RankHello) else "engine"
        if peer != f"{self.generator}.{member}":
            return f"{peer} can't speak for {self.generator}.{member}"
        return "another process has taken its place" if hello.incarnation in self._replaced else ""

    def mismatch(self, hello: Hello, newest: int) -> str:
        """Why the generator can't join a publisher whose newest version is `newest`; empty when it can."""
        if hello.world_size != self.world_size:
            return f"world_size is {hello.world_size}, this run expects {self.world_size}"
        if isinstance(hello, RankHello) and hello.rank >= self.world_size:
            return f"rank {hello.rank} of {self.world_size}"
        if hello.version is not None and hello.version > newest:
            remedy = "restart the generator, or begin at that version"
            return f"it holds version {hello.version}, the trainer is at {newest}: {remedy}"
        return ""

    def replace(self, incarnation: str) -> None:
        """Switches to the members of another start."""
        if self.incarnation is not None:
            self._replaced.add(self.incarnation)
        self.incarnation = incarnation

    def note(self, peer: str, hello: Hello, held: int | None) -> None:
        """Records a member that is present."""
        self.held[peer] = held
        if isinstance(hello, EngineHello):
            self.url = hello.url
        else:
            self._places[peer] = hello.place

    def commit(self, version: int) -> None:
        """Records that all members hold `version`."""
        self.held = dict.fromkeys(self.held, version)

    def forget(self) -> None:
        """Clears all claims: all members have to say hello again."""
        self.held.clear()
