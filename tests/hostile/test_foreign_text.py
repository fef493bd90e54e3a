"""Foreign text in the output of the commands: no control character, and nothing that another language would read."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_kto.cli.main import main
from nemo_kto.data.rows.data_sources import read_data_prefix
from nemo_kto.data.rows.records import DataError
from nemo_kto.data.tokens.drawn import DrawnAnswer
from nemo_kto.telemetry.console import set_up_logging
from nemo_kto.tools.chat.session import Session
from nemo_kto.tools.inference.chat_model import Answer
from nemo_kto.tools.inspect import check_data_command as check
from nemo_kto.tools.report import report_command as report
from nemo_kto.utils.text import html_text, markdown_code, markdown_text, terminal_line, terminal_text
from tests.helpers.messages import raises
from tests.helpers.run_folders import healthy, write_extras, write_run
from tests.unit.model_files.test_checkpoint_files import make_checkpoint

FOREIGN = "a\x1b]0;t\x07\x9b31m\r\n# Heading\n<script>x<" + "\\script>|`b`\u202e"
PIECES = st.lists(st.sampled_from([*"\x00\x07\x1b\x7f\x9b\r\n\t|`<>&#*_\\ -1.a", "\ud800", "\u2028", "\u202e", "</script>"]))


@given(PIECES.map("".join))
def test_escaped_text_has_no_power(text: str) -> None:
    assert {each for each in terminal_text(text) if not each.isprintable()} <= {"\n", "\t"}
    assert terminal_line(text).isprintable()
    assert not {"<", ">", '"'} & set(html_text(text))
    for line in (markdown_text(text), markdown_code(text)):
        assert line.isprintable()
        bare = line.strip("`") if line.startswith("`") else line
        escaped = bare.replace("\\\\", "")
        assert "`" not in escaped.replace("\\`", "")
        assert "|" not in escaped.replace("\\|", "")
        assert line.startswith("`") or "<" not in escaped.replace("\\<", "")
        assert not line.startswith(("#", "- ", "1. "))


def assert_plain(text: str) -> None:
    assert {each for each in text if not each.isprintable()} <= {"\n", "\t"}
    assert [line for line in text.splitlines() if line.startswith("# Heading")] == []


def test_data_check_of_a_file_with_a_foreign_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = {"prompt": FOREIGN, "response": FOREIGN, "label": True, FOREIGN: 1}
    (tmp_path / f"{FOREIGN.replace('/', '')}.jsonl").write_text(f"{json.dumps(row)}\n" * 2)
    check.main([str(tmp_path)])
    captured = capsys.readouterr()
    assert_plain(captured.out + captured.err)


def test_checkpoints_with_foreign_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    metrics = {f"val_{FOREIGN}_loss": 1.0, f"val_{FOREIGN}_rows": 1.0}
    make_checkpoint(tmp_path / "checkpoints", 2, metrics=metrics)
    (tmp_path / "checkpoints" / f".writing-{FOREIGN}").mkdir()
    for command in ("ls", "verify"):
        main(["checkpoint", command, str(tmp_path)])
    assert_plain(capsys.readouterr().out)


def test_a_report_of_foreign_text(tmp_path: Path) -> None:
    metrics = [{"step": 1, f'val/{FOREIGN}"_loss': 1.0, f'val/{FOREIGN}"_rows': 1.0}, *healthy(2)]
    run = {"state": "failed", "text": FOREIGN, "summary": {FOREIGN: FOREIGN}, "versions": {FOREIGN: FOREIGN}}
    folder = write_extras(write_run(tmp_path / "run", metrics, run=run, pretrained_checkpoint__restore_from_path=FOREIGN))
    for name in ("samples", "warnings", "extremes"):
        lines = [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
        foreign = [line | {key: FOREIGN for key in ("prompt", "answer", "text", "row") if key in line} for line in lines]
        foreign = [line | ({"answers": {FOREIGN: FOREIGN}} if "answers" in line else {}) for line in foreign]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in foreign))
    report.main([str(folder)])
    html = (folder / "report.html").read_text()
    assert "<script" not in html
    assert {each for each in html if not each.isprintable()} <= {"\n", "\t"}


@pytest.mark.parametrize(
    "command",
    [
        ["translate", "swift.yaml"],
        ["translate", FOREIGN],
        ["data", "preview", "rows.jsonl", "--model", "{model}"],
        ["data", "preview", FOREIGN, "--model", "{model}"],
        ["data", "check", FOREIGN],
        ["data", FOREIGN],
        ["check", "kto", "model", "rows.jsonl", f"model.seed={FOREIGN}"],
        ["check", "kto", f"model.{FOREIGN}=1", f"{FOREIGN}=1"],
        ["check", "kto", FOREIGN, FOREIGN],
        ["plan", "kto", f"pretrained_checkpoint.restore_from_path={FOREIGN}"],
        ["kto", f"model.kto.preference_loss={FOREIGN}", f"--config-name={FOREIGN}"],
        ["export", FOREIGN, FOREIGN],
        ["import", FOREIGN, FOREIGN],
        ["chat", FOREIGN, "-p", FOREIGN],
        ["report", FOREIGN],
        ["checkpoint", "ls", FOREIGN],
        [FOREIGN],
    ],
    ids=lambda command: "-".join(command[:2])[:20].replace(FOREIGN[:12], "FOREIGN"),
)
def test_output_and_errors_of_commands(
    command: list[str], tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {"prompt": FOREIGN, "response": FOREIGN, "label": True, FOREIGN: 1}
    (tmp_path / "rows.jsonl").write_text(f"{json.dumps(row)}\n")
    (tmp_path / "swift.yaml").write_text(
        json.dumps({"rlhf_type": "kto", "dataset": FOREIGN, FOREIGN: FOREIGN, "lora_rank": FOREIGN})
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["nemo-kto", *(word.format(model=tiny_llama) for word in command)])
    with contextlib.suppress(SystemExit):
        main()
    output = "".join(capsys.readouterr())
    assert output
    assert {each for each in output if not each.isprintable()} <= {"\n", "\t"}


class Echo:
    label, has_template = FOREIGN, True
    settings: tuple[dict[str, object], list[str]] = ({}, [])

    def answer(self, messages: object, sampling: object, *, show: object) -> Answer:
        show(FOREIGN)  # type: ignore[operator]
        drawn = DrawnAnswer(text=FOREIGN, answer=FOREIGN, is_same=True)
        return Answer(drawn=drawn, ids=[1], seconds=0.0, finish="stop")


@pytest.mark.parametrize("as_json", [True, False])
def test_answers_of_a_chat(as_json: bool, capsys: pytest.CaptureFixture[str]) -> None:
    session = Session(models=[Echo(), Echo()], sampling=None, as_json=as_json)  # type: ignore[list-item,arg-type]
    session.say("Hello")
    out = capsys.readouterr().out
    assert {each for each in out if not each.isprintable()} <= {"\n", "\t"}
    if as_json:
        assert json.loads(out.splitlines()[0])["answer"] == FOREIGN


def test_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    import logging

    set_up_logging(rank=0)
    logging.getLogger("nemo_kto").warning("the file %s", FOREIGN.replace("\n", ""))
    assert_plain(capsys.readouterr().err)


@pytest.mark.parametrize("name", ["../..", "./rows", "org/..", "org/name@../x", "org/name:..", "org/name"])
def test_a_data_set_of_the_hub_is_not_a_folder(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "org/name"
    folder.mkdir(parents=True)
    (folder / "train.jsonl").write_text("{}\n")
    monkeypatch.chdir(tmp_path if name == "org/name" else folder)
    with raises(DataError, "data set of the hub", f"hf:{name}"):
        read_data_prefix(f"hf:{name}")
