"""Passwords and tokens do not appear in written files and messages."""

from __future__ import annotations

from pathlib import Path

import pytest

from nemo_kto.cli.job import refuse_mistakes
from nemo_kto.config.resolved import ResolvedRun
from nemo_kto.config.saved_config import save_config
from nemo_kto.distributed import state
from nemo_kto.errors import ConfigError
from nemo_kto.run.build import build_logger
from nemo_kto.utils.text import redact_file, redacted
from tests.helpers.messages import Message
from tests.unit.conftest import Load

KEY = "exp_manager.mlflow_logger_kwargs.tracking_uri"
SECRETS = ("pass1word", "held-in-the-environment", "hf_abcdefghijklmnopqrst", "of-a-callback")


def given(folder: Path, *, host: str) -> list[str]:
    return [
        f"{KEY}=https://me:{SECRETS[0]}@{host}/mlflow",
        f"exp_manager.wandb_logger_kwargs.group=run-of-{SECRETS[1]}",
        f"exp_manager.wandb_logger_kwargs.entity={SECRETS[2]}",
        f"trainer.callbacks=[{{_target_:tests.Mine,api_token:{SECRETS[3]},steps:3}}]",
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
    for line in ("tracking_uri: https://***@other/mlflow", "group: run-of-***", "entity: '***'", "api_token: '***'"):
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
