"""A rank of the trainer other than 0: carries out the orders of rank 0 (trainer/coordinator.py) until Finish."""

from __future__ import annotations

import signal
import time
from contextlib import AbstractContextManager
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import set_seed

from inflight.bus import Link
from inflight.config import RunConfig, Sampling
from inflight.error_line import one_line
from inflight.messages import AnyMessage, Finish
from inflight.messages.ranks import Done, Learn, Learned, Meet, Order, Piece, RankFailed, Scored, Took, TrainerHello
from inflight.models import prepare
from inflight.prometheus.endpoint import MetricsEndpoint
from inflight.trainer.checkpoint.io import load_optimizer
from inflight.trainer.checkpoint.snapshot import model_tensors, optimizer_tensors
from inflight.trainer.collective_timeout import bounded
from inflight.trainer.exported import RankMetrics
from inflight.trainer.learner import Learner
from inflight.trainer.pieces import Assembly
from inflight.trainer.policy import reference
from inflight.trainer.run_policy import policy_of
from inflight.trainer.sharding import form_group
from inflight.trainer.start_comparison import batch_of
from inflight.trainer.wire import tensor_to_wire, to_wire
from inflight.weights.publish.comparison import Sampled
from inflight.weights.publish.read_fence import ReadFence
from inflight.weights.source import WeightSource
from inflight.weights.transport.rendezvous import KeyValueStore

_POLL_S = 0.2
REASON_CHARACTERS = 1000


class FollowError(RuntimeError):
    """Rank 0 sent an order that a rank can't carry out, or nothing in time."""


def follow(config: RunConfig, rank: int) -> None:
    """Takes part until rank 0 sends Finish. Raises PeerLost when rank 0 is lost, and any error of a step."""
    torch.set_num_threads(config.trainer.threads)
    with Link(config.endpoint("ranks"), config.rank_names()[rank], config.bus) as link:
        try:
            _take_part(config, rank, link)
        except Exception as error:
            link.send(RankFailed(reason=one_line(error, REASON_CHARACTERS)))
            raise


def _take_part(config: RunConfig, rank: int, link: Link) -> None:
    link.send(TrainerHello(rank=rank))
    rendezvous = _rendezvous(link, config.publish.join_timeout_s)
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    settings = config.trainer
    bound_s = settings.rank_timeout_s

    def in_time() -> AbstractContextManager[None]:
        return bounded(bound_s, lambda: f"rank {rank}: not done within {bound_s:g} s together with the others")

    store = KeyValueStore(rendezvous, bound_s)
    with in_time():
        form_group(store.tcp, rank, settings.processes, accelerator.device, bound_s)
    set_seed(config.seed)
    follower = Follower(config, accelerator)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # rank 0 gets one too, and sends Finish
    metrics = RankMetrics()
    with MetricsEndpoint(config, config.rank_names()[rank], metrics.registry):
        while not isinstance(message := link.receive(_POLL_S), Finish):
            if message is not None:
                began = time.monotonic()
                with in_time():
                    link.send(follower.do(message))
                metrics.obeyed(_named(message), time.monotonic() - began)
    with in_time():
        dist.destroy_process_group()


def _named(message: AnyMessage) -> str:
    """What is ordered, in a word."""
    match message:
        case Learn(purpose=purpose):
            return purpose
        case Order(what=what):
            return what
    return "receive"


def _rendezvous(link: Link, timeout_s: float) -> str:
    deadline = time.monotonic() + timeout_s
    while True:
        match link.receive(_POLL_S):
            case Meet(rendezvous=rendezvous):
                return rendezvous
            case Finish(reason=reason):
                raise FollowError(f"over before it began: {reason}")
        if time.monotonic() > deadline:
            raise FollowError(f"the trainer's other ranks are not there after {timeout_s:g} s")


class Follower:
    """The model's shards on this rank, and the operations on them."""

    def __init__(self, config: RunConfig, accelerator: Accelerator) -> None:
        """Loads and shards the model, together with the other ranks."""
        device = accelerator.device
        revision = config.model.revision
        policy = policy_of(config, prepare(config.start_model, revision=revision), device)
        start = reference(config, prepare(config.model.name, revision=revision), device)
        self._learner = Learner(policy, config, accelerator, start, step=config.start_version)
        if config.checkpoint:
            load_optimizer(Path(config.checkpoint), policy.master, self._learner.optimizer)
        self._pieces = Assembly()
        self._source = WeightSource(policy.master, config.model.dtype)
        self._fence = ReadFence(self._source.device)
        self._fence.hold(self._learner.optimizer.optimizer)

    def do(self, message: AnyMessage) -> Done | Learned | Scored | Took:
        """Carries out an order beside rank 0 and returns the answer. Raises FollowError for any other message."""
        match message:
            case Piece(number=number):
                return Took(number=number, nbytes=self._pieces.add(message))
            case Learn(number=number, purpose="score"):
                return Scored(number=number, logprobs=tensor_to_wire(self._learner.score(self._pieces.take(number))))
            case Learn(number=number):
                loss, stats = self._learner.learn(self._pieces.take(number))
                return Learned(number=number, loss=loss, stats=to_wire(stats))
            case Order(number=number, what=what):
                self._obey(what)
                return Done(number=number)
        raise FollowError(f"rank 0 sent {type(message).__name__}")

    def _obey(self, what: str) -> None:
        master = self._learner.policy.master
        match what:
            case "step" | "update":
                self._learner.step(last=what == "step")
            case "compare":
                self._learner.logprobs(batch_of([Sampled([0], [0])]), Sampling())
            case "drop":
                self._learner.policy.drop_gradients()
            case "gather":
                with self._fence.reading():
                    for _ in self._source:
                        pass
                self._fence.settle()
            case "checkpoint":
                model_tensors(master)
                optimizer_tensors(master, self._learner.optimizer)
