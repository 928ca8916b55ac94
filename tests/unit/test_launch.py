"""The launcher with stand-ins for the trainer, the generator and the actor."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import shlex
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest
from fake_generator import eventually
from joining_hosts import free_ports

from inflight import processes
from inflight.bus import BusError, Link, Listener, Received
from inflight.config import CONFIG_FILE, ConfigError, RunConfig, save
from inflight.exits import BAD_INPUT, DATA_ENDED, GIVEN_UP, STOPPED, explained, in_words
from inflight.launcher import launch as launching
from inflight.launcher import preflight, run_folder
from inflight.launcher.commands import usual_commands
from inflight.launcher.compose import compose
from inflight.launcher.last_words import last_lines, last_words, why_it_ended
from inflight.launcher.launch import LaunchError, launch
from inflight.launcher.outcome import RunOutcome, report
from inflight.launcher.restarts import Restarts
from inflight.launcher.targets import Targets
from inflight.messages import Status
from inflight.processes import Command, Ended
from inflight.view.progress import Progress
from inflight.view.resumption import command_to_resume
from inflight.view.view import View

LIVE_FOREVER = "import time; time.sleep(600)"
TELLS_ITS_PID = "import os; os.write(1, f'pid {os.getpid()}\\n'.encode())"
# What these say is one call each: of `print`, a process of a run makes several, and others write to the same log.
IGNORES_TERM = (
    "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); os.write(1, b'deaf\\n'); time.sleep(600)"
)
# A generator whose engine is a grandchild in a session of its own, deaf to SIGTERM.
WITH_GRANDCHILD = f"""
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", {IGNORES_TERM!r}], start_new_session=True)
os.write(1, f"grandchild {{child.pid}}\\n".encode())
time.sleep(600)
"""


@pytest.fixture
def config(tmp_path) -> RunConfig:
    quick = ["launch.stop_grace_s=1.0", "launch.line_every_s=1"]
    run = compose("tiny", [f"run_dir={tmp_path}/run", "trainer.steps=8", *quick])
    return dataclasses.replace(run, chosen=None)  # tests change it as a script does


def command(config: RunConfig, name: str, code: str, kind: str | None = None) -> Command:
    return Command(
        name=name,
        kind=kind or name,
        argv=[sys.executable, "-c", textwrap.dedent(code)],
        log=config.path / "logs" / f"{name}.log",
        environment={"RUN_DIR": config.run_dir},
    )


def pids_in(log: Path) -> list[int]:
    return [int(line.split()[1]) for line in last_lines(log, 100) if line.startswith(("pid ", "grandchild "))]


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_the_run_ends_with_the_trainer(config, capfd):
    """Others are stopped, their children too, and the end is a success."""
    log = config.path / "logs" / "g0.log"
    begun = f"""
import pathlib, time
log, deadline = pathlib.Path({str(log)!r}), time.monotonic() + 30
while not (log.exists() and "grandchild" in log.read_text()) and time.monotonic() < deadline:
    time.sleep(0.05)
"""
    commands = [
        command(config, "trainer", begun),
        command(config, "g0", WITH_GRANDCHILD, "generator"),
        command(config, "a0", "pass", "actor"),
    ]
    assert launch(config, commands) == 0
    (grandchild,) = pids_in(log)
    assert gone(grandchild)
    assert capfd.readouterr().err == ""


def test_a_failure_stops_the_run_and_shows_its_log(config, capfd):
    lines = "\n".join(f"print('line {number}')" for number in range(30))
    failing = f"{lines}\nimport sys; print('out of memory', file=sys.stderr); sys.exit(3)"
    commands = [
        command(config, "trainer", f"{TELLS_ITS_PID}; {LIVE_FOREVER}"),
        command(config, "g0", f"import time; time.sleep(0.5)\n{failing}", "generator"),
    ]
    assert launch(config, commands) == 1
    error = capfd.readouterr().err
    assert "g0 ended with code 3" in error
    assert "g0 | out of memory" in error
    assert "g0 | line 29" in error
    assert "g0 | line 10" not in error
    assert all(gone(pid) for pid in pids_in(config.path / "logs" / "trainer.log"))


@pytest.mark.parametrize(
    ("code", "ends"), [(3, DATA_ENDED), (143, STOPPED), (1, GIVEN_UP), (2, BAD_INPUT), (7, GIVEN_UP)]
)
def test_the_exit_code_tells_how_the_trainer_has_ended_the_run(config, capfd, code, ends):
    says = f"import sys; print('inflight trainer: why it ended'); sys.exit({code})"
    assert launch(config, [command(config, "trainer", says), command(config, "g0", LIVE_FOREVER, "generator")]) == ends
    said = capfd.readouterr().err
    assert "why it ended" in said
    assert (f"trainer ended with code {code}" in said) == (ends in (GIVEN_UP, BAD_INPUT)), said


def test_a_killed_process_is_reported_with_its_signal(config, capfd):
    commands = [
        command(config, "trainer", LIVE_FOREVER),
        command(config, "g0", "import os; os.kill(os.getpid(), 9)", "generator"),
    ]
    assert launch(config, commands) == 1
    assert "g0 was ended by SIGKILL" in capfd.readouterr().err


def test_a_generator_that_leaves_early_fails_the_run(config, capfd, monkeypatch):
    monkeypatch.setattr(launching, "FAREWELL_S", 0.2)
    commands = [command(config, "trainer", LIVE_FOREVER), command(config, "g0", "pass", "generator")]
    assert launch(config, commands) == 1
    assert "g0 ended with code 0" in capfd.readouterr().err


def test_what_ignores_sigterm_is_killed_and_named(config, capfd):
    log = config.path / "logs" / "g0.log"
    deaf = f"""
import pathlib, time
log, deadline = pathlib.Path({str(log)!r}), time.monotonic() + 30
while not (log.exists() and "deaf" in log.read_text()) and time.monotonic() < deadline:
    time.sleep(0.05)
"""
    commands = [command(config, "trainer", deaf), command(config, "g0", IGNORES_TERM, "generator")]
    assert launch(config, commands) == 0
    assert "g0 did not stop within 1.0 s, killed" in capfd.readouterr().err


LAUNCHER = """
import sys
from pathlib import Path
from inflight.launcher.compose import compose
from inflight.launcher.launch import launch
from inflight.processes import Command

run_dir, trainer, generator = sys.argv[1:]
config = compose("tiny", [f"run_dir={run_dir}", "launch.stop_grace_s=1.0", "launch.line_every_s=1"])
def command(name, kind, code):
    return Command(name, kind, [sys.executable, "-c", code], config.path / "logs" / f"{name}.log")
sys.exit(launch(config, [command("trainer", "trainer", trainer), command("g0", "generator", generator)]))
"""


def start_launcher(
    run_dir: Path, trainer: str = LIVE_FOREVER, count: int = 3
) -> tuple[subprocess.Popen[str], list[int]]:
    """A launcher in a process of its own with a trainer, a generator and its grandchild, once all have started."""
    trainer, generator = (f"{TELLS_ITS_PID}\n{code}" for code in (trainer, WITH_GRANDCHILD))
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, str(run_dir), trainer, generator],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 180
    while time.monotonic() < deadline and launcher.poll() is None:
        pids = [pid for name in ("trainer", "g0") for pid in pids_in(run_dir / "logs" / f"{name}.log")]
        if len(pids) == count:
            return launcher, pids
        time.sleep(0.05)
    launcher.kill()
    raise AssertionError(f"the processes did not start: {launcher.communicate()}")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_everything(tmp_path, number):
    launcher, pids = start_launcher(tmp_path / "run")
    launcher.send_signal(number)
    output, error = launcher.communicate(timeout=90)
    assert launcher.returncode == 128 + number
    assert f"stopped by {number.name}" in error
    assert "Traceback" not in output + error
    assert all(gone(pid) for pid in pids)
    assert not (tmp_path / "run" / "bus").exists()


def test_processes_follow_a_killed_launcher(tmp_path):
    """Its own processes are ended by the kernel; they in turn are responsible for theirs."""
    launcher, (trainer, generator, grandchild) = start_launcher(tmp_path / "run")
    launcher.kill()
    launcher.communicate(timeout=90)
    try:
        eventually(lambda: gone(trainer) and gone(generator), "their end", timeout_s=30)
    finally:
        os.kill(grandchild, signal.SIGKILL)


def test_status_messages_reach_the_view(config, capfd):
    sender = """
    import os, time
    from inflight import config
    from inflight.bus import Link
    from inflight.messages import Status
    run = config.load(os.environ["RUN_DIR"])
    with Link(run.endpoint("status"), "trainer", run.bus) as link:
        link.send(Status(source="trainer", values={"step": 3, "reward": 0.625, "swaps": 2, "gap_ms": 0.25}))
        time.sleep(1.0)
    """
    assert launch(config, [command(config, "trainer", sender)]) == 0
    output = capfd.readouterr().out
    assert "step 3/8 · reward 0.625 · 2 swaps, last gap 0.25 ms" in output


def test_groups_that_were_lost_before_the_first_step_are_in_the_table(config, capfd):
    sender = """
    import os, time
    from inflight import config
    from inflight.bus import Link
    from inflight.messages import Status
    run = config.load(os.environ["RUN_DIR"])
    (run.path / "metrics.jsonl").touch()
    values = {"failed/reward error: KeyError": 114, "dropped/all rewards equal": 2, "rollouts/too old": 3}
    with Link(run.endpoint("status"), "trainer", run.bus) as link:
        link.send(Status(source="trainer", values=values))
        time.sleep(1.0)
    """
    assert launch(config, [command(config, "trainer", sender)]) == 0
    output = capfd.readouterr().out
    assert "groups failed   114 reward error: KeyError\ngroups dropped  2 all rewards equal\n" in output
    assert "–" not in output, "no figures that have no value"
    assert json.loads((config.path / "summary.json").read_text())["rollouts_dropped"] == {"too old": 3}


@pytest.mark.parametrize(
    ("steps", "checkpoint", "says"),
    [
        (0, "", "no checkpoint was written; to begin again at step 0: {}"),
        (1, "", "no checkpoint was written, and 1 step is lost; to begin again at step 0: {}"),
        (2, "", "no checkpoint was written, and 2 steps are lost; to begin again at step 0: {}"),
        (2, "step-000001", "step-000001 is kept; to resume from it: {}"),
    ],
)
def test_a_run_that_is_not_complete_says_where_a_resume_begins(config, capfd, steps, checkpoint, says):
    config.path.mkdir()
    if checkpoint:
        saved_in = config.path / "checkpoints" / checkpoint
        saved_in.mkdir(parents=True)
    progress = Progress(config)
    if steps:
        progress.update("trainer", {"step": steps})
    report(progress, RunOutcome(interrupted=signal.SIGTERM), ["trainer"])
    said = capfd.readouterr()
    resume = f"the command of its start with resume=true run_dir={config.run_dir}"
    assert f"inflight launch: {says.format(resume)}\n" == said.out
    killed = f"trainer was busy when it was asked to stop and was killed after {config.launch.stop_grace_s} s"
    lost = "its work since the last checkpoint is lost and will be repeated"
    assert said.err == f"inflight launch: {killed}; {lost}\ninflight launch: stopped by SIGTERM\n"
    report(progress, RunOutcome(), [])
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize(
    ("rank", "says"),
    [
        (0, "model.name={0}/checkpoints/step-000002 begins another run with its weights"),
        (4, "to resume from it: the command of its start with resume=true run_dir={0}"),
    ],
)
def test_a_run_whose_data_have_ended_says_what_its_checkpoint_is_good_for(config, capfd, rank, says):
    """Its data and its epochs can't be changed in a resume. A directory of an adapter is no model."""
    (config.path / "checkpoints" / "step-000002").mkdir(parents=True)
    lora = dataclasses.replace(config.trainer.lora, rank=rank)
    trained = dataclasses.replace(config, trainer=dataclasses.replace(config.trainer, lora=lora))
    report(Progress(trained), RunOutcome(trainer=Ended(command(config, "trainer", ""), DATA_ENDED)), [])
    assert capfd.readouterr().out == f"inflight launch: step-000002 is kept; {says.format(config.run_dir)}\n"


@pytest.mark.parametrize("folder", ["run", "my run, it's = 1"])
def test_the_command_that_is_shown_resumes_the_run(tmp_path, monkeypatch, capsys, folder):
    """What a shell makes of it is the same run, with the options of its start, from whichever folder."""
    run_dir = tmp_path / folder
    path = str(run_dir).replace("'", r"\'")
    given = ["trainer.steps=7", "--config-name", "tiny", f"run_dir='{path}'", "rollout.stop=['a b','$c']"]

    def ends(config, commands=None, *, resume=""):
        config.path.mkdir()
        report(Progress(config), RunOutcome(interrupted=signal.SIGTERM), [], resume)
        return 1

    monkeypatch.setattr(launching, "launch", ends)
    assert launching.main(given) == 1
    command = capsys.readouterr().out.partition("to begin again at step 0: inflight launch ")[2]
    began = []
    monkeypatch.setattr(launching, "launch", lambda config, **_: began.append(config) or 0)
    monkeypatch.chdir(tmp_path)
    assert launching.main(shlex.split(command)) == launching.main([*given, "resume=true"]) == 0
    assert began[0] == began[1]
    assert (began[0].path, began[0].resume, began[0].trainer.steps) == (run_dir, True, 7)


def test_a_command_of_a_resumed_run_names_its_folder_once():
    given = ["--config-name", "tiny", "resume=true", "run_dir=runs/mine"]
    says = "inflight launch --config-name tiny run_dir=/data/runs/mine resume=true"
    assert command_to_resume(given, "/data/runs/mine") == says


def test_what_strangers_say_is_not_shown_and_nonsense_ends_nothing(config, capfd):
    sender = """
    import os, time
    from inflight import config
    from inflight.bus import Link
    from inflight.messages import Status
    run = config.load(os.environ["RUN_DIR"])
    to = run.endpoint("status")
    with Link(to, "g7", run.bus) as stranger, Link(to, "trainer", run.bus) as own:
        stranger.send(Status(source="trainer", values={"step": 7, "reward": 1.0}))
        own.send(Status(source="g0", values={"step": "many", "reward": float("nan")}))
        time.sleep(1.0)
    """
    assert launch(config, [command(config, "trainer", sender)]) == 0
    output = capfd.readouterr().out
    assert "step many/8 · reward nan" in output
    assert "step 7/8" not in output


def test_a_flood_of_status_messages_does_not_keep_the_launcher_from_its_processes(config):
    class Flood:
        read = 0

        def receive(self, timeout_s):
            Flood.read += 1
            assert Flood.read < 100_000, "it reads as long as something comes"
            return Received("trainer", Status(source="trainer", values={"step": Flood.read}))

    progress = Progress(config)
    launching._read_status(Flood(), View(progress, line_every_s=60), Restarts(config), Targets(config), ["trainer"])
    assert progress._latest["trainer"]["step"] == Flood.read, "what was read is shown"


def test_only_processes_of_the_run_are_listened_to(config, tmp_path):
    view, restarts, targets = View(Progress(config), line_every_s=60), Restarts(config), Targets(config)
    with (
        Listener(f"ipc://{tmp_path}/s", config.bus) as listener,
        Link(listener.endpoint, "g7", config.bus) as stranger,
        Link(listener.endpoint, "trainer", config.bus) as own,
    ):
        stranger.send(Status(source="trainer", values={"step": 7}))
        eventually(lambda: listener.peers() == {"g7"}, "the stranger's message")
        own.send(Status(source="trainer", values={"step": 1}))

        def seen():
            launching._read_status(listener, view, restarts, targets, ["trainer", "g0"])
            return "step 1/8" in view.progress.news()

        eventually(seen, "the trainer's message")
        assert "step 7" not in view.progress.news()
        assert set(restarts._records) == set(view.progress._latest) == {"trainer"}


def test_the_time_spent_counts_from_the_command_on(config, monkeypatch):
    """The model, the data and the checks before a run take time, too."""
    shown = []

    class Seen(View):
        def __init__(self, progress, **options):
            shown.append(progress.elapsed_s)
            super().__init__(progress, **options)

    def prepared(config):
        time.sleep(0.5)
        return config

    monkeypatch.setattr(launching, "View", Seen)
    monkeypatch.setattr(launching, "with_data", prepared)
    assert launch(config, [command(config, "trainer", "pass")]) == 0
    assert shown[0] >= 0.5


def test_metrics_of_a_process_elsewhere_are_announced_here_until_it_ends(config):
    """By its status; one that has announced itself is left alone, and what is no address is no target."""
    folder = config.path / "bus" / "targets"
    folder.mkdir(parents=True)
    (folder / "g0.json").write_text("its own")
    targets = Targets(config)
    for name, address in (("a0", "10.0.0.2:5701"), ("g0", "10.0.0.3:5701"), ("a1", "evil.example:80"), ("a2", 7)):
        targets.heard(name, {"metrics": address, "tokens": 3})
    (entry,) = json.loads((folder / "a0.json").read_text())
    assert entry == {"targets": ["10.0.0.2:5701"], "labels": {"process": "a0", "run": config.path.name}}
    targets.heard("a0", {"metrics": "10.0.0.2:5702"})
    assert "10.0.0.2:5702" in (folder / "a0.json").read_text()
    for name in ("a0", "g0"):
        targets.ended(name)
    assert [file.name for file in folder.iterdir()] == ["g0.json"]
    assert (folder / "g0.json").read_text() == "its own"


def test_a_long_run_folder_gets_its_sockets_elsewhere(tmp_path):
    config = compose("tiny", [f"run_dir={tmp_path / ('x' * 100)}"])
    probe = "import os; print('bus', os.path.realpath(os.environ['RUN_DIR'] + '/bus'), flush=True)"
    assert launch(config, [command(config, "trainer", probe)]) == 0
    (line,) = last_lines(config.path / "logs" / "trainer.log", 5)
    elsewhere = Path(line.split()[1])
    assert len(str(elsewhere / "rollouts")) < 107
    assert not elsewhere.exists()
    assert not os.path.lexists(config.path / "bus")


def test_no_run_folder_is_used_twice(config):
    assert launch(config, [command(config, "trainer", "pass")]) == 0
    with pytest.raises(LaunchError, match="holds a run already"):
        launch(config, [command(config, "trainer", "pass")])


def test_a_run_folder_that_cannot_be_made_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    config = compose("tiny", [f"run_dir={tmp_path}/file/run"])
    with pytest.raises(LaunchError, match="can't make the run folder"):
        launch(config, [command(config, "trainer", "pass")])


LAUNCHED_ON_A_FULL_DISK = """
import resource, sys
from inflight.launcher import launch
launch.ready_to_start = lambda config: config
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), resource.RLIM_INFINITY))
sys.exit(launch.main(["--config-name", "tiny", *sys.argv[2:]]))
"""


@pytest.mark.parametrize("room, code", [(10, 2), (100, 1)])
@pytest.mark.parametrize("length", [10, 100])
def test_a_launch_on_a_full_disk_is_one_line_and_leaves_no_run(tmp_path, room, code, length):
    """As if full: no file may grow beyond a size, that of the key or that of the configuration."""
    folder, elsewhere = tmp_path / ("x" * length), tmp_path / "tmp"
    elsewhere.mkdir()
    arguments = [sys.executable, "-c", LAUNCHED_ON_A_FULL_DISK, str(room), f"run_dir={folder}"]
    ended = subprocess.run(
        arguments,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
        env={**os.environ, "TMPDIR": str(elsewhere)},
    )
    assert ended.returncode == code
    assert ended.stderr.startswith("inflight launch: ")
    assert ended.stderr.endswith("File too large\n")
    assert ended.stderr.count("\n") == 1
    assert sorted(path.name for path in folder.iterdir()) == ["launcher.lock", "lock"]
    assert list(elsewhere.iterdir()) == []
    config = compose("tiny", [f"run_dir={folder}"])
    assert launch(config, [command(config, "trainer", "pass")]) == 0


def test_the_usual_processes(tmp_path):
    affinity = "launch.affinity={generator: [0], g1: [1], actor: [0], a1: [1]}"
    config = compose("tiny", [f"run_dir={tmp_path}", "generator.count=2", "rollout.actors=2", affinity])
    commands = {each.name: each for each in usual_commands(config)}
    assert list(commands) == ["trainer", "g0", "g1", "a0", "a1"]
    assert commands["g1"].argv[1:] == ["-m", "inflight.generator", "--run-dir", config.run_dir, "--name", "g1"]
    assert commands["trainer"].argv[1:] == ["-m", "inflight.trainer", "--run-dir", config.run_dir]
    for name in ("a0", "a1"):
        assert commands[name].argv[1:] == ["-m", "inflight.actor", "--run-dir", config.run_dir, "--name", name]
    assert [commands[name].cores for name in ("trainer", "g0", "g1", "a0", "a1")] == [(), (0,), (1,), (0,), (1,)]
    assert commands["g0"].environment["OMP_NUM_THREADS"] == "1"


def test_cores_are_given_to_the_process(config):
    probe = command(config, "trainer", "import os; print('cores', *os.sched_getaffinity(0), flush=True)")
    core = min(os.sched_getaffinity(0))
    assert launch(config, [dataclasses.replace(probe, cores=(core,))]) == 0
    assert last_lines(probe.log, 1) == [f"cores {core}"]


@pytest.mark.parametrize("affinity", ["{trainer: [4095]}", "{trainr: [0]}"])
def test_cores_that_are_not_there_are_refused(tmp_path, affinity, monkeypatch):
    config = compose("tiny", [f"run_dir={tmp_path}", f"launch.affinity={affinity}"])
    with pytest.raises(ConfigError, match=r"launch\.affinity\.train.* is not allowed"):
        usual_commands(config)
    monkeypatch.setattr(launching, "ready_to_start", lambda config: config)
    with pytest.raises(ConfigError, match=r"launch\.affinity"):
        launch(config)
    assert not (config.path / CONFIG_FILE).exists()  # the same command, mended, begins the run


@pytest.mark.parametrize(
    "override, says",
    [
        ("task.name=nope", "task.name='nope' is not known: "),
        ("trainer.objective.name=nope", "trainer.objective.name='nope' is not known: "),
        ("trainer.objective.options={tempo: 2}", "trainer.objective.options.tempo is not an option: "),
        ("trainer.advantage.name=nope", "trainer.advantage.name='nope' is not known: "),
        ("trainer.advantage.name=of.mine:own", "trainer.advantage.name='of.mine:own' can't be imported: "),
        ("gate.rules=[{name: nope}]", "gate.rules[0].name='nope' is not known: "),
        ("gate.rules=[{name: oldest_lag, at_most: soon}]", "gate.rules[0].at_most='soon' is not allowed: "),
        ("gate.ratio_rules=[{name: nope}]", "gate.ratio_rules[0].name='nope' is not known: "),
        ("generator.extra={seed: 4}", "generator.extra.seed is not allowed: seed sets it"),
        ("generator.extra={worker_cls: mine}", "generator.extra.worker_cls is not allowed: inflight sets it"),
        (
            "generator.extra={enforce_eager: true, blocksize: 32}",
            "generator.extra.blocksize is not an engine argument of this vLLM, block_size is",
        ),
        ("rollout.kept_tokens=5", "rollout.kept_tokens is set and has no effect: rollout.top_p"),
        ("trainer.objective.kl_estimator=k2", "trainer.objective.kl_estimator is set and has no effect"),
        ("trainer.autocast=true", "trainer.autocast=true is not allowed with model.dtype=float32"),
        ("trainer.advantage.name=process", "trainer.advantage.name=process is not allowed with task.name=addition"),
        ("trainer.objective={kl: 1, kl_reference: teacher}", "trainer.objective.kl_reference=teacher is not allowed"),
    ],
)
def test_what_can_not_be_is_refused_in_one_line_before_anything_starts(tmp_path, capsys, override, says):
    assert launching.main(["--config-name", "tiny", f"run_dir={tmp_path}/run", override]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"inflight launch: {says}")
    assert error.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_a_users_functions_are_found_where_the_trainer_finds_them(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text("def keep(group, *, at_most: int): return group\n")
    monkeypatch.chdir(tmp_path)
    config = compose("tiny", [f"run_dir={tmp_path}/run", "gate.rules=[{name: 'mine:keep', at_most: 2}]"])
    preflight.ready_to_start(config)
    assert "mine" not in sys.modules


def test_damaged_files_do_not_hide_why_a_run_failed(config, capfd):
    damage = """
    import os, pathlib
    run = pathlib.Path(os.environ["RUN_DIR"])
    (run / "metrics.jsonl").touch()
    (run / "rollouts").mkdir()
    (run / "rollouts" / "rollouts.msgpack").touch()
    raise SystemExit("no space left on device")
    """
    assert launch(config, [command(config, "trainer", damage)]) == 1
    error = capfd.readouterr().err
    assert "no summary: " in error
    assert "trainer | no space left on device" in error


def test_a_closed_terminal_stops_all(config):
    code = "import os, signal, time; time.sleep(0.5); os.kill(os.getppid(), signal.SIGHUP); time.sleep(600)"
    before = signal.signal(signal.SIGHUP, signal.default_int_handler)
    try:
        assert launch(config, [command(config, "trainer", code)]) == 128 + signal.SIGHUP
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_the_launcher_was_started_to_ignore_does_not_end_a_run(config, number):
    """As nohup and the background of a shell have it."""
    before = signal.signal(number, signal.SIG_IGN)
    try:
        trainer = command(config, "trainer", f"import os; os.kill(os.getppid(), {int(number)})")
        assert launch(config, [trainer]) == 0
        assert signal.getsignal(number) is signal.SIG_IGN
    finally:
        signal.signal(number, before)


@pytest.mark.parametrize("arguments", [["--config-name", "tiny", "machine=gpu"], ["--config-name", "demo_gpu"]])
def test_a_run_for_gpus_is_refused_at_once_where_there_are_none(tmp_path, capsys, monkeypatch, arguments):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(preflight, "_require_named", lambda config: pytest.fail("GPUs come first"))
    assert launching.main([*arguments, f"run_dir={tmp_path}/run"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("inflight launch: machine=gpu (launch.needs_gpu=true) is not allowed: no GPU was found")
    assert "machine=cpu" in error
    assert error.count("\n") == 1
    assert not (tmp_path / "run").exists()
    assert launching.main([*arguments, "--print"]) == 0


def test_an_address_that_can_not_be_had_leaves_no_run_behind(tmp_path):
    config = compose("tiny", [f"run_dir={tmp_path}/run", "bus.address=192.0.2.1"])
    with pytest.raises(BusError, match=r"192\.0\.2\.1"):
        launch(config, [command(config, "trainer", "pass")])
    assert not (config.path / CONFIG_FILE).exists()  # the same command, mended, begins the run


def test_bad_input_is_one_line_and_code_2(capsys):
    assert launching.main(["--config-name", "tiny", "trainer.steps=0"]) == 2
    assert capsys.readouterr().err == "inflight launch: trainer.steps=0 is not allowed: 1 or more\n"


HEARD_THEN_FAILS = """
import os, sys, time
from inflight import config
from inflight.bus import Link
from inflight.messages import Status
run = config.load(os.environ["RUN_DIR"])
with Link(run.endpoint("status"), "g0", run.bus) as link:
    link.send(Status(source="g0", values={"version": 0}))
    time.sleep(0.5)
print("was here", flush=True)
sys.exit(CODE)
"""


def launch_failing(config: RunConfig, restarts: int) -> int:
    """A run whose generator works and fails, each time; its exit code."""
    settings = dataclasses.replace(config.launch, restarts=restarts, restart_delay_s=0.1)
    commands = [
        command(config, "trainer", LIVE_FOREVER),
        command(config, "g0", HEARD_THEN_FAILS.replace("CODE", "1"), "generator"),
    ]
    return launch(dataclasses.replace(config, launch=settings), commands)


def test_a_generator_that_had_worked_is_started_again_and_given_up_in_the_end(config, capfd, monkeypatch):
    forgotten = []
    monkeypatch.setattr(launching.Progress, "forget", lambda _, name: forgotten.append(name))
    assert launch_failing(config, restarts=2) == 1
    error = capfd.readouterr().err
    assert "g0 ended with code 1; it is restarted in 0.1 s (1 of 2)" in error
    assert "g0 ended with code 1; it is restarted in 0.2 s (2 of 2)" in error
    assert "g0 ended with code 1, after 2 restarts (launch.restarts=2); its log: " in error
    assert last_lines(config.path / "logs" / "g0.log", 9).count("was here") == 3
    assert forgotten == ["g0", "g0"], "what it said is not shown while another one starts"


def test_of_a_process_that_failed_the_errors_are_shown_without_where_they_came_through(tmp_path):
    """An engine that did not start tells its reason in each of its processes, above a screen of frames."""
    log = tmp_path / "g0.log"
    frames = [
        "Traceback (most recent call last):",
        *['  File "core.py", line 9, in run', "    go()", "    ^^^^"] * 30,
        "",
    ]
    engine = "(EngineCore pid=7) ERROR 11-29 02:21:45 [core.py:1545] "
    child = [f"[reward tidy] {frame}" for frame in frames]
    said = ["INFO loading", f"{engine}ValueError: no memory", "RuntimeError: no engine", "inflight generator g0: gone"]
    log.write_text("\n".join([said[0], *(engine + frame for frame in frames), said[1], *child, *frames, *said[2:]]))
    assert last_words(log, 20) == said
    assert last_words(log, 2) == said[-2:]
    assert last_words(tmp_path / "none.log", 2) == []


ENGINE = "(EngineCore pid=7) ERROR 11-29 02:21:45 "
WORKER_DIED = [
    "(APIServer pid=6) INFO 11-29 02:21:40 [launcher.py:46] started",
    f"{ENGINE}[multiproc_executor.py:273] Worker proc VllmWorker-0 died unexpectedly (exit code: -4), shutting down.",
    *[f"{ENGINE}[dump_input.py:{number}] Dumping input data" for number in range(30)],
    f"{ENGINE}[core.py:1545] RuntimeError: cancelled",
    "(APIServer pid=6) INFO 11-29 02:21:46 [async_llm.py:9] [shutdown] the engine is gone",
    *[f"(APIServer pid=6) ERROR 11-29 02:21:46 [async_llm.py:{number}] EngineDeadError" for number in range(4)],
    "/usr/lib/python3.12/multiprocessing/resource_tracker.py:279: UserWarning: 1 leaked semaphore objects",
    "  warnings.warn(",
]


def test_what_killed_a_worker_is_the_first_line_of_what_is_shown(config, capfd):
    """It is far above the end of the log, which vLLM fills with the consequences."""
    generator = command(config, "g0", "", "generator")
    generator.log.parent.mkdir(parents=True)
    generator.log.write_text("\n".join(WORKER_DIED))
    said = why_it_ended(generator.log, 20)
    assert said[0].endswith("died unexpectedly (exit code: -4, SIGILL (illegal instruction)), shutting down.")
    consequences = ("started", "cancelled", "EngineDeadError")
    assert said[1:] == [line for line in WORKER_DIED if any(each in line for each in consequences)]
    assert last_words(generator.log, 1) == said[-1:], "no warning of a Python that was killed"
    report(Progress(config), RunOutcome(failed=Ended(generator, -signal.SIGILL)), [])
    shown = capfd.readouterr().err.splitlines()
    assert shown[:-1] == [f"  g0 | {line}" for line in said]
    assert shown[-1].startswith("inflight launch: g0 was ended by SIGILL (illegal instruction); its log: ")


@pytest.mark.parametrize(
    ("line", "first"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", True),
        ("Fatal Python error: Illegal instruction", True),
        ("a worker was ended by SIGKILL", True),
        ("killed process 12 by the OOM killer", True),
        ("stopping on SIGTERM", False),
    ],
)
def test_a_cause_of_death_is_found_among_many_lines(tmp_path, line, first):
    log = tmp_path / "g0.log"
    log.write_text("\n".join(["begun", line, *(f"after {number}" for number in range(30))]))
    said = why_it_ended(log, 5)
    assert (said[0].startswith(line), len(said)) == (first, 5)


def test_many_causes_leave_room_for_the_end(tmp_path):
    log = tmp_path / "g0.log"
    log.write_text("\n".join([*(f"rank {number} died unexpectedly" for number in range(9)), *"abcde"]))
    assert why_it_ended(log, 5) == [*(f"rank {number} died unexpectedly" for number in (6, 7, 8)), "d", "e"]


def test_a_signal_that_few_know_is_named_in_words():
    told = [explained(code) for code in (3, -signal.SIGILL, -signal.SIGSEGV, -signal.SIGKILL, -99)]
    assert in_words(-signal.SIGILL) == "SIGILL"
    assert told == ["code 3", "SIGILL (illegal instruction)", "SIGSEGV (segmentation fault)", "SIGKILL", "signal 99"]


def test_of_a_log_of_any_size_the_end_is_read_and_nothing_in_it_controls_the_terminal(tmp_path):
    log = tmp_path / "g0.log"
    with log.open("wb") as file:
        file.truncate(1 << 36)  # a hole: to read all of it would take minutes
        file.seek(0, os.SEEK_END)
        file.write(b"\n" + b"x" * 2_000_000 + b"\n\x1b]0;owned\x07\x1b[2J\tred\n\xff\xfe the end\r\n")
    assert last_lines(log, 3) == ["x" * 1000, "\u241b]0;owned\u2407\u241b[2J  red", "\ufffd\ufffd the end"]
    assert last_words(log, 1) == ["\ufffd\ufffd the end"]


def test_what_a_process_said_before_it_died_counts_for_a_launcher_that_was_busy(config, capfd, monkeypatch):
    """Its word and its death are both there when the launcher comes to look."""
    read, ended, heard = launching._read_status, launching.Processes.ended, []

    def late(processes):
        found = ended(processes)
        heard.extend(found)
        return found

    def busy(*arguments):
        read(*arguments) if heard else time.sleep(0.02)

    monkeypatch.setattr(launching.Processes, "ended", late)
    monkeypatch.setattr(launching, "_read_status", busy)
    assert launch_failing(config, restarts=1) == 1
    assert "g0 ended with code 1; it is restarted in 0.1 s (1 of 1)" in capfd.readouterr().err


STEP = 2 * 2 * 100


@pytest.mark.parametrize("tokens, forgiven", [(0, False), (STEP // 2 - 1, False), (STEP // 2, True)])
def test_failures_are_forgiven_for_work_done(config, tokens, forgiven):
    """Half a step's tokens from one of two generators; an actor that was started again counts from zero."""
    config = dataclasses.replace(
        config,
        launch=dataclasses.replace(config.launch, restarts=2),
        generator=dataclasses.replace(config.generator, count=2),
        trainer=dataclasses.replace(config.trainer, groups_per_step=2),
        rollout=dataclasses.replace(config.rollout, group_size=2, max_tokens=100),
    )
    restarts = Restarts(config)
    g0 = command(config, "g0", "", "generator")
    told = []
    for _ in range(4):
        restarts.heard("g0", {"running": 3})
        restarts.heard("a0", {"accepted": 9 * STEP, "accepted.g1": 9 * STEP, "accepted.g0": tokens // 2})
        restarts.heard("a0", {"accepted.g0": tokens})
        restarts.heard("a0", {"accepted.g0": 0})
        told.append(restarts.failed(Ended(g0, 1)) is not None)
    assert told == [True, True, forgiven, forgiven]


@pytest.mark.parametrize(
    ("code", "ends"), [("import sys; sys.exit(1)", GIVEN_UP), (HEARD_THEN_FAILS.replace("CODE", "2"), BAD_INPUT)]
)
def test_what_would_fail_again_is_not_started_again(config, capfd, code, ends):
    """A generator that never came up, and one whose input is bad."""
    assert launch(config, [command(config, "trainer", LIVE_FOREVER), command(config, "g0", code, "generator")]) == ends
    assert "started again" not in capfd.readouterr().err


SEES_IT_GONE = """
import os, pathlib, sys, time
log = pathlib.Path(os.environ["RUN_DIR"]) / "logs" / "g0.log"
for _ in range(500):
    time.sleep(0.1)
    text = log.read_text() if log.exists() else ""
    pids = [line.split()[1] for line in text.splitlines() if line.startswith("grandchild ")]
    if "was here" in text and not pathlib.Path("/proc", pids[0]).exists():
        sys.exit(0)
sys.exit(1)
"""


def test_orphans_of_a_dead_generator_are_ended_before_the_next(config):
    leaves = WITH_GRANDCHILD.replace("time.sleep(600)\n", "")
    commands = [
        command(config, "trainer", SEES_IT_GONE),
        command(config, "g0", leaves + HEARD_THEN_FAILS.replace("CODE", "1"), "generator"),
    ]
    config = dataclasses.replace(config, launch=dataclasses.replace(config.launch, restarts=1, restart_delay_s=60))
    assert launch(config, commands) == 0


def resumed(config: RunConfig, **changes) -> RunConfig:
    return dataclasses.replace(config, resume=True, **changes)


FAMILY = """
import subprocess, sys, time
from inflight.processes import guard_group
guard_group()
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
time.sleep(600)
"""


def test_what_a_generator_starts_ends_with_it_though_it_is_killed():
    command = [sys.executable, "-c", FAMILY]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as parent:
        child = psutil.Process(int(parent.stdout.readline()))
        others = [each for each in psutil.Process(parent.pid).children() if each != child]
        parent.kill()
        _, left = psutil.wait_procs([child, *others], timeout=20)
        for each in left:
            each.kill()
    assert left == []
    assert len(others) == 1, "the one that waited"


def test_what_goes_wrong_in_the_interpreters_shutdown_does_not_make_a_done_process_look_failed():
    code = "import atexit, os; from inflight.processes import leave; atexit.register(os.abort); print('done'); leave(3)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=180, check=False)
    assert (ended.returncode, ended.stdout) == (3, "done\n"), ended.stderr


def test_a_resumed_run_is_the_same_run(config):
    assert launch(config, [command(config, "trainer", "pass")]) == 0
    with pytest.raises(ConfigError, match=r"seed=7 is not allowed: the run in .* began with 0"):
        launch(resumed(config, seed=7), [command(config, "trainer", "pass")])
    for name, value, was in (
        ("temperature", 0.5, "1.0"),
        ("top_k", 3, "0"),
        ("group_size", 6, config.rollout.group_size),
    ):
        rollout = dataclasses.replace(config.rollout, **{name: value})
        with pytest.raises(
            ConfigError, match=rf"rollout\.{name}={value} is not allowed: the run in .* began with {was}"
        ):
            launch(resumed(config, rollout=rollout), [command(config, "trainer", "pass")])
    for name, value in (("rank", 4), ("alpha", 2.0), ("rslora", True), ("target_modules", ["q_proj"])):
        lora = dataclasses.replace(config.trainer.lora, **{name: value})
        trainer = dataclasses.replace(config.trainer, lora=lora)
        with pytest.raises(ConfigError, match=rf"trainer\.lora\.{name}=.* is not allowed: the run in .* began with"):
            launch(resumed(config, trainer=trainer), [command(config, "trainer", "pass")])
    config = dataclasses.replace(config, rollout=dataclasses.replace(config.rollout, max_tokens=9))
    (config.path / "bus").mkdir()
    (config.path / "bus" / "left").touch()  # of a launcher that was killed
    assert launch(resumed(config), [command(config, "trainer", "pass")]) == 0
    assert not (config.path / "bus").exists()


def test_a_folder_without_a_run_can_not_be_resumed(config):
    with pytest.raises(LaunchError, match="holds no run to resume"):
        launch(resumed(config), [command(config, "trainer", "pass")])
    assert not config.path.exists()


@contextlib.contextmanager
def holding_the_lock(config, code):
    """A process that has inherited the lock of a run that is over."""
    assert launch(config, [command(config, "trainer", "pass")]) == 0
    descriptor = os.open(config.path / "lock", os.O_RDWR)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    gone_too = subprocess.Popen(["true"])
    gone_too.wait()
    os.lseek(descriptor, gone_too.pid, os.SEEK_SET)  # as its launcher has signed it
    survivor = subprocess.Popen([sys.executable, "-c", code], pass_fds=[descriptor])
    os.close(descriptor)
    try:
        yield survivor
    finally:
        survivor.kill()
        survivor.wait()


def test_a_run_is_resumed_when_the_last_process_is_gone(config, capfd, monkeypatch, tmp_path):
    """The lock is inherited: a trainer that outlives its launcher still holds it, and gets its time to end."""
    over = tmp_path / "over"

    def told(text, **how):
        print(text, **how)
        over.touch()

    monkeypatch.setattr(run_folder, "print", told, raising=False)
    patient = dataclasses.replace(config.launch, stop_grace_s=8.0)
    waits = f"import pathlib, time\nwhile not pathlib.Path({str(over)!r}).exists(): time.sleep(0.01)"
    with holding_the_lock(config, waits) as survivor:
        assert launch(resumed(config, launch=patient), [command(config, "trainer", "pass")]) == 0
        assert survivor.wait(30) == 0
    out, err = capfd.readouterr()
    assert "waiting for the processes of the last start to end" in out
    assert err == ""


@pytest.mark.parametrize("how", ["deaf", "stopped"])
def test_orphans_of_a_killed_launcher_are_killed_and_named(config, capfd, how):
    """With its descendants, but not who merely reads the file that is locked."""
    deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)" if how == "deaf" else ""
    launcher, (trainer, child, generator, grandchild) = start_launcher(config.path, f"{deaf}\n{WITH_GRANDCHILD}", 4)
    with (config.path / "lock").open() as file:
        reader = subprocess.Popen([sys.executable, "-c", LIVE_FOREVER], stdin=file)
    try:
        if how == "stopped":
            os.kill(trainer, signal.SIGSTOP)
            # Before the launcher's death: of two signals that wait, the lower one comes first, SIGTERM.
            eventually(lambda: psutil.Process(trainer).status() == psutil.STATUS_STOPPED)
        launcher.kill()
        launcher.communicate(timeout=90)
        assert launch(resumed(config), [command(config, "trainer", "pass")]) == 0
        assert [gone(pid) for pid in (trainer, child, generator)] == [True] * 3
        assert not gone(reader.pid)
    finally:
        reader.kill()
        reader.wait()
        for pid in (trainer, child, grandchild):
            if not gone(pid):
                os.kill(pid, signal.SIGKILL)
    (line,) = capfd.readouterr().err.splitlines()
    assert f"orphans of the last start that did not end within 1.0 s, killed: pid {trainer} (python" in line
    assert ("; stopped)" in line) == (how == "stopped")


SHARES = """
import signal, time
from multiprocessing.shared_memory import SharedMemory
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(SharedMemory(create=True, size=1).name, flush=True)
time.sleep(600)
"""


def test_shared_memory_of_what_is_killed_is_freed(config):
    """By the process that Python has for that, which must outlive the one that is killed."""
    g0 = command(config, "g0", SHARES, "generator")
    with processes.Processes(0.2) as running:
        running.start(g0)
        eventually(lambda: last_lines(g0.log, 1))
        shared = Path("/dev/shm", last_lines(g0.log, 1)[0])
        assert shared.exists()
    assert not shared.exists()


def test_who_does_not_end_when_killed_is_named(config, monkeypatch):
    """As in a driver that never returns, which can't be made here: a child that is spared. It holds no lock."""
    monkeypatch.setattr(processes, "KILL_WAIT_S", 0.5)
    kill = psutil.Process.kill
    with holding_the_lock(config, WITH_GRANDCHILD) as survivor, monkeypatch.context() as patch:
        eventually(psutil.Process(survivor.pid).children)
        (child,) = psutil.Process(survivor.pid).children()
        patch.setattr(psutil.Process, "kill", lambda process: process == child or kill(process))
        with pytest.raises(LaunchError, match=rf"processes of its last start do not end: pid {child.pid} \(python"):
            launch(resumed(config), [command(config, "trainer", "pass")])
        assert gone(survivor.pid)
        kill(child)
    assert launch(resumed(config), [command(config, "trainer", "pass")]) == 0


def test_who_holds_the_lock_elsewhere_is_not_to_be_ended(config, monkeypatch, capfd):
    """On another machine that shares the folder, say. Here it is this process itself."""
    monkeypatch.setattr(run_folder, "KILL_WAIT_S", 0.2)
    assert launch(config, [command(config, "trainer", "pass")]) == 0
    with (config.path / "lock").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(LaunchError, match="its lock is held by a process of another user, container or machine"):
            launch(resumed(config), [command(config, "trainer", "pass")])
    assert "killed" not in capfd.readouterr().err


@pytest.mark.parametrize("how", ["--exclusive", "--shared"])
def test_who_has_taken_the_lock_itself_is_named_and_not_killed(config, monkeypatch, capfd, how):
    """A process that copies the folder, say. None of the run's: these have inherited it from their launcher."""
    monkeypatch.setattr(run_folder, "KILL_WAIT_S", 0.2)
    assert launch(config, [command(config, "trainer", "pass")]) == 0
    stranger = subprocess.Popen(["flock", how, config.path / "lock", "sleep", "600"])
    try:
        eventually(psutil.Process(stranger.pid).children)
        with pytest.raises(LaunchError, match=rf"its lock is held by pid {stranger.pid} \(flock {how}"):
            launch(resumed(config), [command(config, "trainer", "pass")])
        assert stranger.poll() is None
    finally:
        for process in (*psutil.Process(stranger.pid).children(), stranger):
            process.kill()
        stranger.wait()
    assert "killed" not in capfd.readouterr().err


def test_who_waits_for_the_lock_is_not_killed_when_it_gets_it(config, monkeypatch):
    """The moment that the orphans are killed."""
    monkeypatch.setattr(run_folder, "KILL_WAIT_S", 0.2)
    with holding_the_lock(config, LIVE_FOREVER) as survivor:
        stranger = subprocess.Popen(["flock", config.path / "lock", "sleep", "600"])
        eventually(lambda: f"-> FLOCK  ADVISORY  WRITE {stranger.pid} " in Path("/proc/locks").read_text())
        kill = psutil.Process.kill

        def kill_and_wait(process):
            kill(process)
            eventually(psutil.Process(stranger.pid).children)

        try:
            monkeypatch.setattr(psutil.Process, "kill", kill_and_wait)
            with pytest.raises(LaunchError, match=rf"its lock is held by pid {stranger.pid} \(flock"):
                launch(resumed(config), [command(config, "trainer", "pass")])
            assert gone(survivor.pid)
            assert stranger.poll() is None
        finally:
            monkeypatch.undo()
            for process in (*psutil.Process(stranger.pid).children(), stranger):
                process.kill()
            stranger.wait()


def test_a_launcher_that_lives_keeps_its_run_though_its_own_lock_is_removed(config, monkeypatch):
    monkeypatch.setattr(run_folder, "KILL_WAIT_S", 0.2)
    launcher, pids = start_launcher(config.path)
    try:
        (config.path / "launcher.lock").unlink()
        with pytest.raises(LaunchError, match=rf"its lock is held by .*pid {launcher.pid} \(python"):
            launch(resumed(config), [command(config, "trainer", "pass")])
        assert not any(gone(pid) for pid in (launcher.pid, *pids))
    finally:
        launcher.terminate()
        launcher.communicate(timeout=90)
    assert all(gone(pid) for pid in pids)


@pytest.mark.parametrize(
    "resume, error, says",
    [(True, ConfigError, "seed=7 is not allowed: the run in"), (False, LaunchError, "holds a run already")],
)
def test_a_run_that_another_launcher_begins_meanwhile_is_not_begun_again(config, monkeypatch, resume, error, says):
    """This one has found none in the folder, and waited for the lock."""
    config.path.mkdir()
    (config.path / "lock").touch()
    locks = run_folder._locks

    def begun_meanwhile(file, timeout_s):
        save(config)
        return locks(file, timeout_s)

    monkeypatch.setattr(run_folder, "_locks", begun_meanwhile)
    with pytest.raises(error, match=says):
        launch(dataclasses.replace(config, resume=resume, seed=7), [command(config, "trainer", "pass")])


def test_a_launcher_that_lives_keeps_its_run(config, monkeypatch):
    """Its processes are not killed, however long they take."""
    monkeypatch.setattr(run_folder, "LOCK_WAIT_S", 0.5)
    launcher, pids = start_launcher(config.path)
    try:
        with pytest.raises(LaunchError, match=rf"its launcher is still alive: pid {launcher.pid} \(python"):
            launch(resumed(config), [command(config, "trainer", "pass")])
        assert not any(gone(pid) for pid in pids)
    finally:
        launcher.terminate()
        launcher.communicate(timeout=90)
    assert all(gone(pid) for pid in pids)


def test_secrets_are_made_for_each_start_and_for_their_owner_alone(config):
    look = """
    import os, pathlib
    for name in ("bus/api.key", "keys/g0.key_secret"):
        path = pathlib.Path(os.environ["RUN_DIR"]) / name
        print(oct(path.stat().st_mode & 0o777), len(path.read_text()) > 40, flush=True)
    """
    config = dataclasses.replace(config, bus=dataclasses.replace(config.bus, address="127.0.0.1", port=free_ports()))
    assert launch(config, [command(config, "trainer", look)]) == 0
    assert last_lines(config.path / "logs" / "trainer.log", 2) == ["0o600 True", "0o600 True"]
    assert not (config.path / "bus").exists()
