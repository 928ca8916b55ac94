"""The HTML report: what it holds of whole, running, crashed and hostile runs. How it looks: tests/browser."""

from __future__ import annotations

import fcntl
import html.parser
import json
import re
import signal

import pytest
from report_samples import HOSTILE, STEP, make_one, make_run

from inflight.cli import main
from inflight.config import load
from inflight.metrics import METRICS_FILE, JsonLines
from inflight.report.html import bands, page, series
from inflight.report.html.data import of_run
from inflight.report.html.redact import REDACTED, flat, redacted
from inflight.rollout.buffer import ROLLOUTS_FILE
from inflight.rollout.frames import StreamError
from inflight.rollout.stream import Writer, read_group

MIB = 1 << 20


class Elements(html.parser.HTMLParser):
    """What a browser would make of a page: its elements, and the text of its scripts."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict]] = []
        self.texts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self.texts.append("")

    def handle_endtag(self, tag):
        self.handle_starttag(f"/{tag}", [])

    def handle_data(self, data):
        if self.tags:
            self.texts[-1] += data

    def of(self, tag: str) -> list[tuple[dict, str]]:
        both = zip(self.tags, self.texts, strict=True)
        return [(attributes, text) for (name, attributes), text in both if name == tag]


@pytest.fixture
def run(tmp_path):
    return make_run(tmp_path / "run")


def data_of(text: str) -> dict:
    (found,) = [text for attributes, text in Elements(text).of("script") if attributes.get("id") == "data"]
    return json.loads(found)


def test_each_token_has_its_text_logprob_and_version(run):
    data = of_run(run)
    row = data["bands"]["rows"][0]
    assert (row["id"], row["reward"], row["generator"], row["trained_at"]) == ("q0/0", 0.0, "g0", 0)
    assert row["texts"] == [HOSTILE[at % len(HOSTILE)] for at in range(12)]
    assert row["logprobs"] == [-0.5] * 12
    assert row["spans"] == [[0, 0], [6, 1]]
    assert (row["started"], row["first"], row["finished"]) == (1000.0, 1000.2, 1002.0)
    assert (data["bands"]["shown"], data["bands"]["of"], data["notes"]) == (8, 8, [])


def test_curves_and_counts(run):
    data = of_run(run)
    assert data["steps"]["tokens"] == [110, 220, 330]
    assert data["steps"]["reward"] == [0.5] * 3
    assert data["swaps"]["committed"]["version"] == [1, 2, 3, 4, 5]
    assert data["swaps"]["others"] == [["failed", "g0", "<b>late</b>", 1]]
    assert data["lags"] == [[0, 180], [2, 120]]
    assert data["gate"]["groups dropped"] == {"too old": 3}, "counted since the run began: the last line's"
    assert data["gate"]["tokens masked"] == {"too old": 30}
    assert data["waits"] == {
        "wait for rollouts": 3.0,
        "train": pytest.approx(5.7),
        "wait for the version before": 0.75,
        "pack the weights": pytest.approx(0.45),
    }
    assert dict(data["summary"])["reward"].startswith("0.5 ")
    assert data["state"] == "complete, 3 of 3 steps"


def test_evaluations_and_the_time_of_scores(run):
    data = of_run(run)
    found = data["evaluations"]
    assert (found["version"], found["reward"], found["best"]) == ([2], [0.25], [True])
    assert found["given_up"] == [HOSTILE[0]]
    assert data["scores"] == {"count": 8, "sum": 2.0, "median": 0.25, "p99": 0.25, "most": 0.25}


def test_nothing_of_a_model_is_markup(run):
    text = page.rendered([of_run(run)])
    elements = Elements(text)
    assert len(elements.of("script")) == 2, "the data and the program"
    assert not [tag for tag, _ in elements.tags if tag in ("img", "b", "iframe", "object", "link")]
    assert data_of(text)["runs"][0]["bands"]["rows"][0]["texts"] == [HOSTILE[at % len(HOSTILE)] for at in range(12)]
    inside = text[text.index('id="data"') : text.index("</script>")]
    assert not re.search("[<>&\u2028\u2029]", inside.partition(">")[2])


def test_it_loads_nothing_and_its_policy_allows_its_own_parts_alone(run):
    text = page.rendered([of_run(run)])
    elements = Elements(text)
    assert not [attributes for _, attributes in elements.tags if {"src", "href"} & attributes.keys()]
    (policy,) = [a["content"] for a, _ in elements.of("meta") if a.get("http-equiv") == "Content-Security-Policy"]
    (style,), program = [t for _, t in elements.of("style")], elements.of("script")[-1][1]
    assert policy == (
        f"default-src 'none'; style-src {page._digest(style)}; script-src {page._digest(program)}; base-uri 'none'"
    )
    assert "url(" not in style
    sources = "".join(page._part(name) for name in page.SCRIPTS)
    unsafe = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function|fetch\(|XMLHttp"
    assert not re.search(unsafe, sources)


def test_every_script_of_the_folder_is_in_the_page():
    folder = page.resources.files("inflight.report.html")
    assert sorted(page.SCRIPTS) == sorted(each.name for each in folder.iterdir() if each.name.endswith(".js"))
    for name in (*page.SCRIPTS, "style.css", "page.html"):
        assert page._part(name).count("\n") < 300, name


def test_secrets_are_redacted(run):
    text = page.rendered([of_run(run)])
    assert "s3cret-value" not in text
    assert "pa55" not in text
    assert of_run(run)["config"]["task.options.url"] == f"https://{REDACTED}@host/x"


@pytest.mark.parametrize(
    ("name", "value", "hidden"),
    [
        ("api_key", "x", True),
        ("OPENAI_API_KEY", "x", True),
        ("hf_token", "x", True),
        ("password", "x", True),
        ("authorization", "x", True),
        ("key", "x", True),
        ("max_tokens", "x", False),
        ("kept_tokens", 19, False),
        ("keys", "folder", False),
        ("prompt_key", "question", False),
        ("note", "hf_" + "a" * 20, True),
        ("headers", ["Bearer abcdefgh12345678"], True),
        ("url", "https://u:p@h/", True),
        ("url", "https://h/", False),
        ("api_key", "", False),
    ],
)
def test_what_a_secret_is(name, value, hidden):
    assert (REDACTED in str(redacted({"a": {name: value}}))) == hidden


def test_names_of_nested_options():
    assert flat({"a": {"b": 1, "c": {}}, "d": None}) == {"a.b": "1", "a.c": "{}", "d": ""}


def test_a_run_that_is_running(tmp_path):
    run = make_run(tmp_path / "run", steps=2, of_steps=9)
    assert of_run(run)["state"] == "ended early, 2 of 9 steps"
    with (run / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert of_run(run)["state"] == "running, 2 of 9 steps so far"
    assert of_run(run, "failed: g0 ended with code 1")["state"] == "failed: g0 ended with code 1, 2 of 9 steps"


def test_a_run_that_was_killed_while_it_wrote(run):
    path = run / ROLLOUTS_FILE
    path.write_bytes(path.read_bytes()[:-5])
    with (run / METRICS_FILE).open("a") as metrics:
        metrics.write('{"step": 4, "rew')
    data = of_run(run)
    assert (data["bands"]["of"], len(data["steps"]["step"])) == (6, 3)
    assert ["of a frame's" in note for note in data["notes"]] == [True]


def test_what_is_damaged_is_named_and_the_rest_is_shown(run):
    with (run / METRICS_FILE).open("a") as metrics:
        metrics.write("nonsense\n")
    path = run / ROLLOUTS_FILE
    damaged = bytearray(path.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    path.write_bytes(damaged)
    (run / "audit.json").write_text("{}")
    data = of_run(run)
    said = " ".join(data["notes"])
    for name in (METRICS_FILE, ROLLOUTS_FILE, "audit.json"):
        assert name in said
    assert 0 < data["bands"]["of"] < 8, "up to the damage"
    assert data["config"]["task.name"] == "addition"
    page.rendered([data])


@pytest.mark.parametrize(
    "figure", ["groups_failed", "groups_dropped", "rollouts_dropped", "tokens_masked_by_ratio", "lag_counts"]
)
def test_counts_that_are_damaged_are_named_and_the_rest_is_shown(run, figure):
    with JsonLines(run / METRICS_FILE) as metrics:
        metrics.write(STEP | {"step": 4, "version": 4, "time_s": 40.0, figure: [5]})
    data = of_run(run)
    assert f"{METRICS_FILE}: {figure} is [5], not an object of whole numbers" in data["notes"]
    assert len(data["steps"]["step"]) == 4
    page.rendered([data])


def test_a_run_that_failed_before_its_first_step(run):
    (run / METRICS_FILE).unlink()
    (run / ROLLOUTS_FILE).unlink()
    data = of_run(run, "failed: g0 ended with code 1")
    assert (data["bands"]["rows"], data["steps"]["step"]) == ([], [])
    page.rendered([data])


def test_token_ids_where_there_is_no_tokenizer(run):
    (run.parent / "model of run" / "tokenizer.json").unlink()
    data = of_run(run)
    assert (data["bands"]["texts"], data["bands"]["rows"][0]["texts"]) == (False, None)
    assert "token ids instead of text" in data["notes"][0]


def test_numbers_that_are_none(run):
    with JsonLines(run / METRICS_FILE) as metrics:
        metrics.write({"step": 4, "version": 4, "reward": float("nan"), "time_s": 1.0})
    with Writer(run / ROLLOUTS_FILE) as writer:
        group = make_one(9, 1, 4)
        from msgspec.structs import replace

        odd = replace(group.rollouts[0], reward=float("inf"), started=float("nan"))
        writer.append(replace(group, rollouts=[odd]))
    data = of_run(run)
    assert data["steps"]["reward"][-1] is None
    assert (data["bands"]["rows"][-1]["reward"], data["bands"]["rows"][-1]["started"]) == (None, None)
    page.rendered([data])


def test_a_long_run_is_sampled_and_says_so(tmp_path):
    """10,000 sequences: stretches of consecutive ones from several parts, in less than 10 MB."""
    run = make_run(tmp_path / "run", groups=2500, size=4, length=400, steps=5000, of_steps=5000)
    text = page.rendered([of_run(run)])
    assert len(text) < 10 * MIB
    data = data_of(text)["runs"][0]
    shown = data["bands"]
    assert shown["of"] == 10_000
    assert 100 < shown["shown"] <= bands.MOST_SEQUENCES
    indices = [int(row["id"][1:].partition("/")[0]) for row in shown["rows"]]
    stretches = {row["stretch"] for row in shown["rows"]}
    assert stretches == set(range(bands.STRETCHES))
    assert (indices[0], max(indices) > 2400) == (0, True)
    first = sorted({index for index, row in zip(indices, shown["rows"], strict=True) if row["stretch"] == 0})
    assert first == list(range(len(first))), "consecutive"
    assert len(data["steps"]["step"]) == series.MOST_POINTS
    assert (data["steps"]["step"][0], data["steps"]["step"][-1]) == (1, 5000)


def test_a_limit_on_tokens_and_text(run, monkeypatch):
    note = "more sequences would make this file too large"
    assert of_run(run)["bands"]["note"] == ""
    monkeypatch.setattr(bands, "MOST_TOKENS", 30)
    assert (of_run(run)["bands"]["shown"], of_run(run)["bands"]["note"]) == (2, note)
    monkeypatch.setattr(bands, "MOST_TOKENS", 10_000)
    monkeypatch.setattr(bands, "MOST_TEXT", 1500)
    assert (0 < of_run(run)["bands"]["shown"] < 8, of_run(run)["bands"]["note"]) == (True, note)


def test_a_sequence_that_is_very_long_is_cut_off(tmp_path, monkeypatch):
    monkeypatch.setattr(bands, "MOST_TOKENS_EACH", 5)
    row = of_run(make_run(tmp_path / "run"))["bands"]["rows"][0]
    assert (row["count"], len(row["ids"]), len(row["texts"]), len(row["logprobs"])) == (12, 5, 5, 5)


@pytest.mark.parametrize("sizes", [[4] * 3, [1] * 5000, [4] * 1001, [4096] * 3, []])
def test_stretches_hold_no_group_twice(sizes):
    picked = bands.chosen(sizes)
    flat_ones = [index for stretch in picked for index in stretch]
    assert flat_ones == sorted(set(flat_ones))
    assert all(0 <= index < len(sizes) for index in flat_ones)
    assert len(picked) == (bands.STRETCHES if len(sizes) > 1000 else min(len(sizes), 1) if sum(sizes) < 400 else 3)
    if sum(sizes) < bands.MOST_SEQUENCES:
        assert len(flat_ones) == len(sizes), "all of them"


def test_when_generators_were_busy():
    counted = bands.GroupIndex(generators={"g0": [(0.0, 4.0), (2.0, 4.0), (8.0, 10.0)], "g1": [(0.0, 10.0)]})
    found = bands.busy(counted, points=10)
    g0, g1 = found["generators"]
    assert g0["running"] == [1, 1, 2, 2, 0, 0, 0, 0, 1, 1]
    assert (g0["idle_s"], g1["idle_s"], g1["running"]) == (4.0, 0.0, [1] * 10)
    within = bands.busy(bands.GroupIndex(generators={"g0": [(0.25, 0.5), (0.0, 2.0)]}), points=2)
    assert within["generators"][0]["running"] == [1.25, 1.0]


def test_a_group_is_read_where_it_is(run):
    counted = bands.census(run / ROLLOUTS_FILE)
    names = [read_group(run / ROLLOUTS_FILE, counted.place(index)).group_id for index in range(len(counted.sizes))]
    assert names == ["q0", "q1", "q2", "q3"]
    with pytest.raises(StreamError):
        read_group(run / ROLLOUTS_FILE, counted.place(1)._replace(byte=counted.offsets[1] + 1))


def test_the_command_writes_a_page_of_one_run_or_of_two(tmp_path, capsys):
    first, second = make_run(tmp_path / "a"), make_run(tmp_path / "b", groups=2)
    assert main(["report", str(first), "--html"]) == 0
    assert capsys.readouterr().out == f"{first / 'report.html'}\n"
    assert main(["report", str(first), str(second), "--html", str(tmp_path / "both.html")]) == 0
    runs = data_of((tmp_path / "both.html").read_text())["runs"]
    assert [(each["name"], each["bands"]["of"]) for each in runs] == [("a", 8), ("b", 4)]
    assert len(list(first.iterdir())) == 6, "its five files, and the page"


@pytest.mark.parametrize(
    "arguments",
    [["{0}", "{0}", "--html"], ["{0}", "{0}", "{0}", "--html", "x"], ["{1}", "--html"], ["{0}", "--html", "{1}"]],
)
def test_what_cannot_be_a_report_is_one_line(run, tmp_path, arguments, capsys):
    (tmp_path / "empty").mkdir()
    assert main(["report", *(each.format(run, tmp_path / "empty") for each in arguments)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_disk_that_is_full_leaves_the_page_before(run, monkeypatch):
    target = run / "report.html"
    target.write_text("before")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(page.os, "replace", full)
    with pytest.raises(OSError, match="No space"):
        page.write([run], target)
    assert target.read_text() == "before"
    assert not list(run.glob(".report.html.*"))


def test_a_launcher_writes_it_and_keeps_its_exit_code_where_it_cannot(run, capsys, monkeypatch):
    from inflight.launcher import outcome

    config = load(run)
    outcome._write_page(config, outcome.RunOutcome(interrupted=signal.SIGINT))
    assert capsys.readouterr().out == f"report      {run / 'report.html'}\n"
    assert data_of((run / "report.html").read_text())["runs"][0]["state"] == "stopped by SIGINT, 3 of 3 steps"

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(page.os, "replace", full)
    outcome._write_page(config, outcome.RunOutcome())
    assert capsys.readouterr().err.startswith("inflight launch: no report: ")


def test_what_a_run_was_started_in(run):
    from inflight.launcher import environment

    around = {"NCCL_DEBUG": "INFO", "VLLM_API_KEY": "s3cret", "RANK": "1", "HOME": "/home/x", "CUDA_TOKEN": "t0ken"}
    environment.write(run, around)
    assert "s3cret" not in (run / "environment.json").read_text()
    assert "t0ken" not in (run / "environment.json").read_text()
    found = of_run(run)["environment"]
    assert (found["variables.NCCL_DEBUG"], found["not inherited"]) == ("INFO", "RANK")
    assert found["libraries.torch"]
    assert "variables.HOME" not in found
