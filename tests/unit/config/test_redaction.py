"""Passwords and tokens do not appear in written files and messages."""

from __future__ import annotations

import html
import json
import logging
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote, quote_plus

import pytest

from nemo_kto.cli.job import refuse_mistakes
from nemo_kto.config.resolved import ResolvedRun
from nemo_kto.config.saved_config import save_config
from nemo_kto.distributed import state
from nemo_kto.errors import ConfigError, UserError, describe, printable, redacted, show
from nemo_kto.run.build_trainer import build_logger
from nemo_kto.telemetry import loggers
from nemo_kto.telemetry.loggers import WARNINGS_FILE, RunLogger, collect_warnings
from nemo_kto.utils.files import redact_file
from tests.helpers.commands import environment
from tests.helpers.messages import Message, raises
from tests.unit.conftest import Load

KEY = "exp_manager.mlflow_logger_kwargs.tracking_uri"
SECRETS = ("pass1word", "held-in-the-environment", "hf_abcdefghijklmnopqrst", "of-a-callback", "hook-of-mine")


def given(folder: Path, *, host: str) -> list[str]:
    return [
        f"{KEY}=https://me:{SECRETS[0]}@{host}/mlflow",
        f"exp_manager.wandb_logger_kwargs.group=run-of-{SECRETS[1]}",
        f"exp_manager.wandb_logger_kwargs.entity={SECRETS[2]}",
        f"trainer.callbacks=[{{_target_:tests.Mine,api_token:{SECRETS[3]},steps:3}}]",
        f"exp_manager.notify=https://hooks.host/services/{SECRETS[4]}",
        f"exp_manager.explicit_log_dir={folder / 'run'}",
    ]


def test_files_of_a_run_contain_no_secrets(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(state, "is_rank_zero", lambda: True)
    monkeypatch.setattr(state, "raise_together", lambda problem, failure: None)  # there is one rank
    monkeypatch.setenv("WANDB_API_KEY", SECRETS[1])
    config = load(*given(tmp_path, host="host"))
    save_config(config)
    save_config(load(*given(tmp_path, host="other")))
    build_logger(ResolvedRun.of(config), resumed_step=None).finalize("success")
    assert capsys.readouterr().err == Message("nemo-kto", KEY, "https://***@host/mlflow", "last", "https://***@other/mlflow")
    written = {file.relative_to(tmp_path): file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    assert [(name, secret) for name, text in written.items() for secret in SECRETS if secret.encode() in text] == []
    text = (tmp_path / "run" / "config.yaml").read_text()
    for line in (
        "tracking_uri: https://***@other/mlflow",
        "group: run-of-***",
        "entity: '***'",
        "api_token: '***'",
        "notify: '***'",
    ):
        assert line in text
    assert "steps: 3" in text
    (events,) = (tmp_path / "run" / "tensorboard").iterdir()
    assert b"https://***@host/mlflow" in events.read_bytes()


def test_errors_contain_no_secrets(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        refuse_mistakes([ConfigError("tracking", "got tracking=https://me:pass1word@host/x")], None)
    assert capsys.readouterr().err.splitlines()[1] == "  tracking got tracking=https://***@host/x"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("postgresql://u:p/w@db:5432/runs", "postgresql://***@db:5432/runs"),
        ("https://token@host", "https://***@host"),
        ("https://host/x?api_key=abc&y=1", "https://host/x?api_key=***&y=1"),
        ("sqlite:////data/mlflow.db", "sqlite:////data/mlflow.db"),
        ("me@host and a: b", "me@host and a: b"),
    ],
)
def test_redaction_of_a_string(text: str, shown: str) -> None:
    assert redacted(text) == shown


CHARACTERS = "aZ09-_./+=%&<>{}[]$^*?\"'\\\r\n\t \x01\x1b\x7f\xa3é日\U0001f600"
WRITTEN: tuple[Callable[[str], str], ...] = (  # by libraries and servers that quote a value
    str,
    repr,
    ascii,
    json.dumps,
    lambda text: json.dumps(text, ensure_ascii=False),
    lambda text: repr(text.encode()),
    lambda text: repr(repr(text.encode())),
    lambda text: text.encode().decode("latin-1"),
    lambda text: text.encode("ascii", "replace").decode(),
    lambda text: " ".join(text.split()),
    quote,
    quote_plus,
    html.escape,
)


def test_a_secret_is_redacted_in_whatever_way_it_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in messages, values and exceptions, which are cut: no part of it is left."""
    draw = random.Random(0)
    for number in range(60):
        secret = "begin" + "".join(draw.choices(CHARACTERS, k=draw.randrange(6, 14))) + "ended"
        monkeypatch.setenv("WANDB_API_KEY", f"{secret}\r\n")
        for written in WRITTEN:
            text = f"{'x' * draw.randrange(320)} before {written(secret)} after {'y' * draw.randrange(320)}"
            shown = [redacted(text), describe(ValueError(text)), *(str(UserError(f(text))) for f in (str, printable, show))]
            assert not [each for each in shown if "begi" in each or "nded" in each], (number, secret, text)
            assert "***" in shown[0]


def test_text_without_secrets_is_not_changed_and_long_text_takes_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "short")
    assert redacted("short") == "short"
    monkeypatch.setenv("OPENAI_API_KEY", "k \\é \\é \\é ??++")
    monkeypatch.setenv("DB_PASSWORD", "$begins-with-a-sign")
    began = time.process_time()
    for part in ("://", "k ", "k\\ ", "?a", "\\", "k"):
        assert redacted(part * 200_000) == part * 200_000
        assert len(printable(part * 1_000_000)) < 2000
    assert time.process_time() - began < 10


def test_a_program_writes_no_secret_to_stderr(tmp_path: Path) -> None:
    """Neither in a traceback of any thread, nor in a warning of a library, nor in an error."""
    program = """
import logging, sys, threading, warnings
from nemo_kto.telemetry import console
console.protect()
def fail():
    raise OSError("refused: Bearer the-secret-key")
warnings.warn("the-secret-key is old")
logging.getLogger("library").warning("refused \x1b]0;: %r", "the-secret-key")
threading.Thread(target=fail).start()
print("the-secret-key", file=sys.stderr)
fail()
"""
    given = {**environment(tmp_path), "HF_TOKEN": "the-secret-key"}
    done = subprocess.run([sys.executable, "-c", program], env=given, capture_output=True, text=True, check=False)
    assert "secret" not in done.stderr.replace('"refused: Bearer the-secret-key"', "").replace("the-secret-key is", "")
    assert done.stderr.count("refused: Bearer ***") == 2
    assert "warning: refused \\x1b]0;: '***'" in done.stderr


def test_the_key_of_a_tracker_with_a_line_break_is_redacted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As requests quotes it, at the start of a run, and in its file of warnings."""
    monkeypatch.setenv("WANDB_API_KEY", "the-secret-é\rkey\n")

    def refuse(*_: object) -> None:
        raise ValueError(f"Illegal header value {os.environ['WANDB_API_KEY'].encode()!r}\nsee {os.environ['WANDB_API_KEY']}")

    monkeypatch.setattr(loggers, "_wandb", refuse)
    with raises(UserError, "wandb", "Illegal header value b'***"):
        RunLogger(folder=tmp_path, enabled=True, resumed_step=None, wandb={})
    with collect_warnings() as warnings:
        warnings.open_file(tmp_path, step=lambda: 1, resumed_step=None)
        RunLogger(folder=tmp_path, enabled=True, resumed_step=1, wandb={}).finalize("success")
        logging.getLogger("library").error("cannot log in with %r", os.environ["WANDB_API_KEY"])
    written = (tmp_path / WARNINGS_FILE).read_text()
    assert written.count("***") == 3
    assert "secret" not in written


def test_secrets_in_a_hydra_file(tmp_path: Path) -> None:
    file = tmp_path / "multirun.yaml"
    redact_file(file)
    file.write_text(
        "- trainer.callbacks=[{_target_:tests.Mine,api_token:abc,steps:3}]\n- x=postgresql://u:p@db\n  password: 'a b'\n"
    )
    redact_file(file)
    assert file.read_text() == (
        "- trainer.callbacks=[{_target_:tests.Mine,api_token:***,steps:3}]\n- x=postgresql://***@db\n  password: ***\n"
    )
    assert [each.name for each in tmp_path.iterdir()] == ["multirun.yaml"]
