"""An exported model is prompted as in the run: with the chat template of task.options.chat_template."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from inflight import cli
from inflight.config import ModelConfig, RunConfig, TaskConfig, load, save
from inflight.models.weight_files import ADAPTER, ADAPTER_WEIGHTS
from inflight.prompts import ModelTokens
from inflight.tasks import make
from inflight.trainer.checkpoint.companions import copy_companions

OWN = (
    "{% for m in messages %}{{ m.content + ('+' if plus else '') }}{% endfor %}"
    "{% if add_generation_prompt %}={% endif %}\n"
)
CHAT = [{"role": "user", "content": "3+4"}]


@pytest.fixture
def run(tmp_path, tiny_model) -> Path:
    """The folder of a run that has a template of its own, for a model that has another one, and one checkpoint."""
    (tmp_path / "chat.jinja").write_text(OWN)
    (tmp_path / "problems.jsonl").write_text('{"messages": [{"role": "user", "content": "3+4"}], "answer": "7"}\n' * 2)
    options = {
        "path": str(tmp_path / "problems.jsonl"),
        "messages": "messages",
        "chat_template": str(tmp_path / "chat.jinja"),
        "template": {"plus": True},
    }
    task = make(TaskConfig("dataset", options), 0)
    folder = tmp_path / "run"
    examined = TaskConfig("dataset", options, contents=dict(task.contents()))
    save(RunConfig(ModelConfig(str(tiny_model)), examined, str(folder)))
    checkpoint = folder / "checkpoints" / "step-000004"
    checkpoint.mkdir(parents=True)
    copy_companions(tiny_model, checkpoint)
    (checkpoint / "config.json").write_bytes((tiny_model / "config.json").read_bytes())
    (checkpoint / "model.safetensors").write_bytes((tiny_model / "model.safetensors").read_bytes())
    (checkpoint / "chat_template.jinja").write_text("the model's own")
    (checkpoint / "additional_chat_templates").mkdir()
    (checkpoint / "additional_chat_templates" / "tool_use.jinja").write_text("the model's, for tools")
    return folder


@pytest.mark.parametrize("of", ["run", "run/checkpoints/step-000004", "last"])
def test_a_chat_of_an_exported_model_has_the_tokens_that_it_had_in_the_run(of, run, tmp_path, capsys):
    (tmp_path / "last").symlink_to(run / "checkpoints" / "step-000004")
    assert cli.main(["export", str(tmp_path / of), str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].endswith(", float32, with the run's chat template")
    assert said[1].endswith("""serve with --default-chat-template-kwargs '{"plus": true}'""")
    config = load(run)
    asked = make(config.task, 0).item(0).prompt
    in_the_run = list(ModelTokens(config.model.name).encode(asked))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    served = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=True, plus=True)["input_ids"]
    assert served == in_the_run
    with_tools = tokenizer.apply_chat_template(CHAT, tools=[], tokenize=False, add_generation_prompt=True)
    assert with_tools == "3+4="


def test_a_template_that_is_no_longer_the_run_s_is_not_exported_in_silence(run, tmp_path, capsys):
    def line(*more: object) -> str:
        assert cli.main(["export", str(run), str(tmp_path / "out"), *map(str, more)]) == 2
        (said,) = capsys.readouterr().err.splitlines()
        assert not (tmp_path / "out").exists()
        return said

    template = tmp_path / "chat.jinja"
    template.write_text("another")
    instead = "put the file back, or name it: --chat-template FILE"
    assert line() == (
        f"inflight export: the run's task.options.chat_template={template} holds another template than when the run "
        f"used it; {instead}"
    )
    template.unlink()
    assert line().startswith(f"inflight export: the run's task.options.chat_template={template} can't be read: ")
    assert line("--chat-template", tmp_path / "no").startswith(f"inflight export: --chat-template {tmp_path}/no can't")
    (tmp_path / "kept.jinja").write_text(OWN)
    given = ["export", str(run), str(tmp_path / "out"), "--chat-template", str(tmp_path / "kept.jinja")]
    assert cli.main(given) == 0
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == OWN
    assert (run / "checkpoints/step-000004/chat_template.jinja").read_text() == "the model's own"


def test_a_byte_order_mark_is_no_part_of_a_template(run, tmp_path):
    (tmp_path / "chat.jinja").write_text(OWN, encoding="utf-8-sig")
    assert make(load(run).task, 0).item(0).prompt.arguments["chat_template"] == OWN
    assert cli.main(["export", str(run), str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == OWN


def test_a_checkpoint_outside_of_a_run_keeps_the_model_s_template(run, tmp_path, capsys):
    checkpoint = (run / "checkpoints" / "step-000004").rename(tmp_path / "moved")
    assert cli.main(["export", str(checkpoint), str(tmp_path / "out")]) == 0
    assert "the run's" not in capsys.readouterr().out
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == "the model's own"
    assert (tmp_path / "out" / "additional_chat_templates" / "tool_use.jinja").is_file()


def test_an_exported_adapter_says_how_a_server_of_its_base_gets_the_template(run, tmp_path, capsys):
    checkpoint = run / "checkpoints" / "step-000004"
    (checkpoint / "config.json").unlink()
    (checkpoint / "model.safetensors").rename(checkpoint / ADAPTER_WEIGHTS)
    (checkpoint / ADAPTER).write_text("{}")
    assert cli.main(["export", str(run), str(tmp_path / "out")]) == 0
    assert f"serve the base with --chat-template {tmp_path}/out/chat_template.jinja" in capsys.readouterr().out
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == OWN


def test_exported_weights_are_as_readable_as_the_other_files(run, tmp_path):
    before = os.umask(0o022)
    try:
        assert cli.main(["export", str(run), str(tmp_path / "out"), "--dtype", "bfloat16"]) == 0
    finally:
        os.umask(before)
    modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in (tmp_path / "out").iterdir() if file.is_file()}
    assert "model.safetensors" in modes
    assert set(modes.values()) == {0o644}
