"""The configuration in the run folder: what has changed is said, and what a crash has damaged is written again."""

from __future__ import annotations

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from nemo_kto.launch.saved_config import save_config
from tests.messages import Message
from tests.unit.launch.conftest import Load


@pytest.mark.parametrize("damage", [b"", b"\0" * 99, b"\xff\xfe", b"a: [", b"- a\n- b\n", b"text", b"a: *b\n", b"[" * 400])
def test_a_damaged_configuration_is_written_again(
    damage: bytes, load: Load, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, file = load(f"exp_manager.explicit_log_dir={tmp_path}"), tmp_path / "config.yaml"
    save_config(config)
    content = file.read_bytes()
    assert OmegaConf.load(file).exp_manager.explicit_log_dir
    file.write_bytes(damage)
    save_config(config)
    assert file.read_bytes() == content
    assert capsys.readouterr().err == Message("nemo-kto", f"{file}", "written")
