"""The trainer's side of evaluations: pins, orders and results over the real bus, and the best checkpoint."""

import asyncio
import dataclasses
import json
import threading

import aiohttp
import pytest
from fake_generator import BUS, eventually
from in_process import in_process
from openai_server import Server, Tokens, choice
from rollout_samples import make_config
from test_trainer_run import Died, go_on, kill_at, make_run, train  # noqa: F401 - a fixture

from inflight.bus import Link, Listener
from inflight.config import EvalConfig
from inflight.evaluation.asking import Asking
from inflight.evaluation.evaluator import Evaluator
from inflight.messages import Evaluate, Evaluated, EvaluatorHello, Finish, StopEvaluating
from inflight.metrics import EVAL_FILE, read_lines
from inflight.tasks.addition import Addition
from inflight.trainer import loop
from inflight.trainer.checkpoint import index
from inflight.trainer.checkpoint.best import Best
from inflight.trainer.checkpoint.rewind import rewind
from inflight.trainer.evaluations import GRACE_S, REPEAT_S, Evaluations
from inflight.trainer.report import Reporter
from inflight.types import Route
from inflight.weights.publish.pin import Pin

LIMIT_S = 60.0
FIGURES = {"questions": 3.0, "answers": 3.0, "mixed": 0.0, "failed": 0.0, "reward": 0.5, "pass@1": 0.25}


class Publisher:
    """Pins as the real one does, when the test says so."""

    def __init__(self):
        self.pins, self.unpinned = [], []

    def pin(self, version, timeout_s, *, routed):
        self.pins.append((Pin(version, timeout_s, routed), timeout_s))
        return self.pins[-1][0]

    def unpin(self, pin, reason):
        pin.end(reason)
        self.unpinned.append(reason)


class Scene:
    """Evaluations, and a link in place of the evaluator."""

    def __init__(self, endpoint, folder, **settings):
        self.endpoint, self.now = endpoint, 100.0
        self.listener, self.publisher = Listener(endpoint, BUS), Publisher()
        self.lines, self.warnings = [], []
        self.best = Best(folder, "reward")
        self.evaluations = Evaluations(
            EvalConfig(every=3, timeout_s=60.0, **settings),
            self.listener,
            self.publisher,
            self.best,
            written_s=200.0,
            tell=self.lines.append,
            warn=self.warnings.append,
            clock=lambda: self.now,
        )
        self.link = None

    def join(self, incarnation="0" * 16):
        self.link = self.link or Link(self.endpoint, "evaluator", BUS)
        self.link.send(EvaluatorHello(incarnation=incarnation, answers=3))

    def hear(self, kind):
        message = None

        def came():
            nonlocal message
            message = self.link.receive(0.02)
            return isinstance(message, kind)

        eventually(came, kind.__name__)
        return message

    def begin(self, step=3, *, generator=True):
        self.evaluations.begin(step, self.nominate(step))
        pin, _ = self.publisher.pins[-1]
        if generator:
            pin.begin("g0", Route(url="http://127.0.0.1:1", version=step, incarnation="1" * 16))
        return pin

    def nominate(self, step):
        folder = self.best.nominees / index.name_of(step)
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_text(str(step))
        return folder

    def answer(self, number=1, **changes):
        self.link.send(Evaluated(**{"number": number, "figures": FIGURES, "failed": {}} | changes))

    def done(self, count=1):
        eventually(lambda: len(self.lines) >= count, "the line")
        return self.lines[-1]

    def close(self):
        self.evaluations.close()
        if self.link is not None:
            self.link.close()
        self.listener.close()


@pytest.fixture
def scene(bus_endpoint, tmp_path):
    made = []

    def make(**settings):
        made.append(Scene(bus_endpoint, tmp_path, **settings))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_a_version_is_pinned_asked_for_and_released_and_its_figures_are_told(scene):
    scene = scene()
    scene.join()
    scene.begin()
    order = scene.hear(Evaluate)
    assert (order.number, order.version, order.url, order.timeout_s) == (1, 3, "http://127.0.0.1:1", 60.0)
    assert scene.evaluations.busy
    scene.now += 5
    scene.answer()
    assert scene.done() == {
        "step": 3,
        "version": 3,
        "generator": "g0",
        "eval/seconds": 5.0,
        "eval/failed_by": {},
        "eval/best": True,
        **{f"eval/{name}": value for name, value in FIGURES.items()},
    }
    assert scene.publisher.unpinned == ["its evaluation is done"]
    assert not scene.evaluations.busy
    assert scene.warnings == []
    assert scene.best.path.name == "step-000003"


@pytest.mark.parametrize(("requests", "routed"), [("continue", True), ("pause", False)])
def test_what_the_pinned_generator_does_with_training_requests_is_configured(scene, requests, routed):
    scene = scene(training_requests=requests)
    pin = scene.begin()
    assert pin.routed is routed
    assert scene.publisher.pins[0][1] == 60.0 + 2 * GRACE_S


def test_every_so_many_steps_are_due():
    def due(done=(), **settings):
        evaluations = Evaluations.__new__(Evaluations)
        evaluations._config = EvalConfig(every=3, **settings)
        evaluations._done = done
        return [step for step in range(8) if evaluations.due(step)]

    assert due() == [3, 6]
    assert due(at_start=True) == [0, 3, 6]
    assert due(at_start=True, done={0, 3}) == [6]


def test_an_order_waits_for_the_generator_and_the_evaluator(scene):
    scene = scene()
    pin = scene.begin(generator=False)
    scene.join()
    assert scene.link.receive(0.3) is None
    scene.now += 20
    pin.begin("g1", Route(url="http://127.0.0.1:2", version=3, incarnation="1" * 16))
    order = scene.hear(Evaluate)
    assert (order.url, order.timeout_s) == ("http://127.0.0.1:2", 40.0)


def test_an_order_is_repeated_and_sent_at_once_to_an_evaluator_that_was_started_again(scene):
    scene = scene()
    scene.join()
    scene.begin()
    assert scene.hear(Evaluate).number == 1
    scene.join()
    assert scene.link.receive(0.3) is None
    scene.now += REPEAT_S
    assert scene.hear(Evaluate).number == 1
    scene.join(incarnation="2" * 16)
    assert scene.hear(Evaluate).timeout_s == 55.0


def test_an_evaluation_is_bounded_and_given_up_with_its_reason(scene):
    scene = scene()
    scene.join()
    pin = scene.begin()
    scene.hear(Evaluate)
    scene.now += 60 + GRACE_S
    line = scene.done()
    reason = "not done within 60 s (eval.timeout_s) by the evaluator"
    assert (line["step"], line["eval/given_up"], line["generator"]) == (3, reason, "g0")
    assert "eval/reward" not in line
    assert pin.ended == reason
    assert scene.hear(StopEvaluating).number == 1
    assert scene.warnings == [f"the evaluation of version 3 was given up: {reason}"]
    assert scene.best.path is None
    assert not any(scene.best.nominees.glob("*"))
    scene.answer()  # late
    scene.begin(6)
    assert scene.hear(Evaluate).number == 2
    assert len(scene.lines) == 1


def test_without_an_evaluator_the_reason_says_so(scene):
    scene = scene()
    scene.begin()
    scene.now += 60 + GRACE_S
    assert scene.done()["eval/given_up"].endswith("by the evaluator, and no evaluator is there")


def test_what_came_of_an_evaluation_that_was_not_done_is_counted_and_not_averaged(scene):
    scene = scene()
    scene.join()
    scene.begin()
    scene.hear(Evaluate)
    scene.answer(problem="2 of 3 answers came within 60 s", failed={"http 500": 1})
    line = scene.done()
    assert line["eval/given_up"] == "2 of 3 answers came within 60 s"
    assert {name for name in line if name.startswith("eval/")} == {
        "eval/given_up",
        "eval/questions",
        "eval/answers",
        "eval/mixed",
        "eval/failed",
        "eval/failed_by",
        "eval/seconds",
    }
    assert scene.best.path is None


def test_an_evaluation_ends_with_its_pin(scene):
    scene = scene()
    scene.join()
    pin = scene.begin()
    scene.hear(Evaluate)
    pin.end("g0: g0.r0 was lost")
    assert scene.done()["eval/given_up"] == "g0: g0.r0 was lost"
    assert scene.hear(StopEvaluating).number == 1


def test_a_checkpoint_that_is_still_being_written_is_waited_for_and_the_generator_is_not(scene):
    scene = scene()
    scene.join()
    pin = scene.begin()
    written = scene.best.nominees / "step-000003"
    written.rename(scene.best.nominees / "writing")
    scene.hear(Evaluate)
    scene.answer()
    eventually(lambda: bool(pin.ended))
    scene.now += 100
    assert scene.lines == []
    assert scene.evaluations.busy
    (scene.best.nominees / "writing").rename(written)
    assert scene.done()["eval/best"] is True
    assert scene.lines[0]["eval/seconds"] == 0.0


def test_a_checkpoint_that_is_not_written_in_time_is_no_candidate(scene):
    scene = scene()
    scene.join()
    pin = scene.begin()
    (scene.best.nominees / "step-000003").rename(scene.best.nominees / "writing")
    scene.hear(Evaluate)
    scene.answer()
    eventually(lambda: bool(pin.ended))
    scene.now += 200
    assert "eval/best" not in scene.done()
    assert scene.warnings == ["the checkpoint of version 3 is not there and can't become the best"]


def test_a_nominee_that_is_written_after_its_rejection_is_removed(tmp_path):
    best = Best(tmp_path, "reward")
    best.reject(best.nominees / "step-000003")
    written = nominee(best, 3)
    best.sweep()
    assert not written.exists()


@pytest.mark.parametrize("figures", [{"mixed": 1.0}, {"failed": 1.0}])
def test_an_evaluation_that_lacks_an_answer_is_told_and_is_no_candidate_for_the_best(scene, figures):
    scene = scene()
    scene.join()
    scene.begin()
    scene.hear(Evaluate)
    scene.answer(figures=FIGURES | figures, failed={"why": 1})
    assert scene.done()["eval/reward"] == 0.5
    assert scene.warnings == ["the evaluation of version 3 is not whole, and no candidate for best/: why: 1"]
    assert scene.best.path is None
    assert not any(scene.best.nominees.glob("*"))


def test_an_evaluation_that_is_due_waits_for_the_one_that_is_under_way(scene):
    scene = scene()
    scene.join()
    assert scene.evaluations.wait_idle(3, lambda: True)
    scene.begin()
    scene.hear(Evaluate)
    assert not scene.evaluations.wait_idle(6, lambda: False), "a run that is to stop does not wait"
    waited: list[bool] = []
    waiting = threading.Thread(target=lambda: waited.append(scene.evaluations.wait_idle(6, lambda: True)))
    waiting.start()
    scene.answer()
    waiting.join(LIMIT_S)
    assert (waited, [line["step"] for line in scene.lines]) == ([True], [3])
    told = "training waits at step 6: its evaluation is due, and that of version 3 is still under way. "
    assert [text for text in scene.warnings if text.startswith(told)] == scene.warnings
    assert len(scene.warnings) == 1, "told once"


def test_the_end_of_a_run_waits_for_its_evaluation_unless_it_is_to_stop(scene):
    scene = scene()
    scene.join()
    scene.begin()
    scene.hear(Evaluate)
    settling = threading.Thread(target=scene.evaluations.settle, kwargs={"wait": lambda: True})
    settling.start()
    scene.answer()
    settling.join(LIMIT_S)
    assert not settling.is_alive()
    assert scene.lines[-1]["eval/reward"] == 0.5
    scene.begin(6)
    scene.evaluations.settle(wait=lambda: False)
    assert scene.lines[-1]["eval/given_up"] == "the run ends"
    scene.evaluations.finish("all steps are done")
    assert scene.hear(Finish).reason == "all steps are done"


def test_a_line_that_can_not_be_written_ends_no_run(scene, monkeypatch):
    scene = scene()

    def full(values):
        raise OSError("no space left on device")

    monkeypatch.setattr(scene.evaluations, "_tell", full)
    scene.join()
    pin = scene.begin()
    scene.hear(Evaluate)
    scene.answer()
    eventually(lambda: scene.warnings == ["an evaluation can't be kept: no space left on device"])
    assert pin.ended
    assert not scene.evaluations.busy


# --- the best checkpoint ---


def nominee(best, step, text="weights"):
    folder = best.nominees / index.name_of(step)
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_text(text)
    return folder


def names(folder):
    return sorted(path.name for path in (folder / "best").iterdir())


def test_the_best_is_kept_alone_and_a_worse_or_equal_one_is_removed(tmp_path):
    best = Best(tmp_path, "reward")
    assert best.path is None
    assert best.consider(nominee(best, 3), {"reward": 0.5})
    assert not best.consider(nominee(best, 6), {"reward": 0.5})
    assert names(tmp_path) == ["step-000003"], "an empty folder would look like an evaluation that was not completed"
    assert best.consider(nominee(best, 9), {"reward": 0.6})
    assert names(tmp_path) == ["step-000009"]
    assert json.loads((best.path / "trainer" / "evaluation.json").read_text()) == {"reward": 0.6}


def test_a_nominee_that_is_still_to_be_removed_keeps_no_other_from_being_judged(tmp_path):
    best = Best(tmp_path, "reward")
    assert best.consider(nominee(best, 3), {"reward": 0.5})
    nominee(best, 6)
    assert not best.consider(nominee(best, 9), {"reward": 0.5})
    assert names(tmp_path) == ["nominee", "step-000003"]
    assert [path.name for path in best.nominees.iterdir()] == ["step-000006"]


def test_the_best_survives_a_start_and_what_was_not_decided_does_not(tmp_path):
    best = Best(tmp_path, "reward")
    best.consider(nominee(best, 3), {"reward": 0.5, "pass@1": 0.1})
    nominee(best, 6)
    again = Best(tmp_path, "pass@1")
    assert names(tmp_path) == ["step-000003"]
    assert not again.consider(nominee(again, 9), {"reward": 0.9, "pass@1": 0.1})
    assert again.consider(nominee(again, 12), {"reward": 0.1, "pass@1": 0.2})


def test_the_same_step_of_a_run_that_was_resumed_takes_the_place_of_the_one_before(tmp_path):
    best = Best(tmp_path, "reward")
    best.consider(nominee(best, 3, "before"), {"reward": 0.5})
    best.consider(nominee(best, 3, "after"), {"reward": 0.6})
    assert names(tmp_path) == ["step-000003"]
    assert (best.path / "model.safetensors").read_text() == "after"


def test_after_a_kill_between_the_two_renames_the_better_one_counts(tmp_path):
    best = Best(tmp_path, "reward")
    best.consider(nominee(best, 3), {"reward": 0.5})
    kept = best.path.rename(tmp_path / "aside")
    best.consider(nominee(best, 6), {"reward": 0.6})
    kept.rename(tmp_path / "best" / "step-000003")
    assert Best(tmp_path, "reward").path.name == "step-000006"


def test_a_best_whose_figures_are_damaged_gives_way(tmp_path):
    best = Best(tmp_path, "reward")
    best.consider(nominee(best, 3), {"reward": 0.5})
    (best.path / "trainer" / "evaluation.json").write_text("{")
    assert best.consider(nominee(best, 6), {"reward": -1.0})
    assert names(tmp_path) == ["step-000006"]


# --- in a run ---


class Evaluating:
    """The real evaluator in a thread, and its generator's server, which tags with what a FakeGenerator holds."""

    def __init__(self, run):
        self.run, self.versions, self.generator = run, [], None
        self._ready = threading.Event()
        self.thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self.thread.start()
        assert self._ready.wait(LIMIT_S)

    async def _serve(self):
        async with Server(self._choice) as server, aiohttp.ClientSession() as session:
            self.url, config = server.url, self.run.config
            self._ready.set()
            with Link(config.endpoint("eval"), "evaluator", config.bus, first_contact_s=LIMIT_S) as link:
                code = in_process(Addition(seed=0, held_out=4), Tokens())
                await Evaluator(config.eval, link, Asking(config, code, session)).run()

    async def _choice(self):
        """An answer that takes two steps of the trainer, or until it has done all."""
        self.versions.append(version := self.generator.version)
        steps = self.run.config.trainer.steps
        while self.run.lines()[-1]["version"] < min(version + 2, steps):  # noqa: ASYNC110 - a file
            await asyncio.sleep(0.01)
        return choice("07", self.generator.version)


def test_a_run_is_evaluated_under_pinned_versions_while_it_trains(make_run):  # noqa: F811
    run = make_run(steps=6)
    run.config = dataclasses.replace(run.config, eval=EvalConfig(every=2, timeout_s=60.0, concurrency=4))
    run.save()
    evaluating = Evaluating(run)
    run.start(server=evaluating)
    assert train(run) == 0
    evaluating.thread.join(LIMIT_S)
    assert not evaluating.thread.is_alive()
    assert [line["step"] for line in run.lines()] == [1, 2, 3, 4, 5, 6]
    lines = read_lines(run.folder / EVAL_FILE)
    assert {line["step"] for line in lines} == {2, 4, 6}
    done = {line["step"]: line for line in lines if "eval/reward" in line}
    assert 2 in done  # the next one may be due before it is over
    for step, line in done.items():
        assert (line["version"], line["eval/answers"], line["eval/mixed"]) == (step, 4, 0)
        assert line["eval/failed_by"] == {}
    assert set(evaluating.versions) == set(done)
    assert 3 not in run.generator.commits  # it was delivered, as the publication of 4 shows, and waited
    assert run.generator.commits[-1] == 6
    (best,) = (run.folder / "best").glob("step-*")
    assert (best / "model.safetensors").exists()
    assert index.read(best).step == index.step_of(best)


def test_a_run_that_is_resumed_tells_no_evaluation_twice(make_run):  # noqa: F811
    run = make_run()
    given_up = {"step": 2, "eval/given_up": "the run ends"}
    lines = [given_up, {"step": 4}, given_up | {"step": 4}, {"step": 6}]
    (run.folder / EVAL_FILE).write_text("".join(json.dumps(line) + "\n" for line in lines))
    rewind(run.config, 4)
    assert read_lines(run.folder / EVAL_FILE) == [given_up, {"step": 4}]


def test_a_version_whose_evaluation_was_interrupted_is_evaluated_when_the_run_is_resumed(make_run, monkeypatch):  # noqa: F811
    """That of version 2 was under way when the trainer was killed."""
    run = make_run(steps=4, checkpoint_every=2).start()
    with monkeypatch.context() as patched:
        kill_at(patched, loop.Trainer, "train_step", lambda trainer, step: step == 3)
        with pytest.raises(Died):
            train(run)
    (run.folder / EVAL_FILE).write_text(json.dumps({"step": 0}) + "\n")
    settings = EvalConfig(every=2, at_start=True, timeout_s=60.0, concurrency=4)
    run.config = dataclasses.replace(run.config, eval=settings)
    evaluating = Evaluating(run)
    go_on(run, server=evaluating)
    assert train(run) == 0
    assert [line["step"] for line in read_lines(run.folder / EVAL_FILE)] == [0, 2, 4]
    assert set(evaluating.versions) == {2, 4}


class Sent:
    """In place of the launcher: the statuses that it would get."""

    def __init__(self):
        self.statuses = []

    def send(self, message):
        self.statuses.append(message.values)


def test_the_status_says_how_far_a_held_out_reward_may_be_off(tmp_path):
    launcher, done = Sent(), {"step": 2, "version": 2, "eval/reward": 0.25}
    config = dataclasses.replace(make_config(tmp_path), eval=EvalConfig(every=2))
    sizes = [({"eval/reward_stderr": 0.0281, "eval/questions": 3.0}, "± 0.028, n=3"), ({"eval/questions": 1.0}, "n=1")]
    for size, says in [*sizes, ({}, "")]:
        with Reporter(config, launcher) as reporter:
            reporter.evaluation(done | size)
        assert launcher.statuses[-1]["eval_of"] == says
