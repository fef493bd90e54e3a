"""The configuration in the run folder: changes are reported, and a damaged file is replaced."""

from __future__ import annotations

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from nemo_kto.config.saved_config import save_config
from tests.helpers.messages import Message, assert_names
from tests.unit.conftest import Load

NESTED_ALIASES = b"algorithm: kto\na0: &a0 [x, x]\n" + b"".join(
    b"a%d: &a%d [%s]\n" % (number, number, b", ".join([b"*a%d" % (number - 1)] * 9)) for number in range(1, 12)
)
DAMAGES = [b"", b"\0" * 99, b"\xff\xfe", b"a: [", b"- a\n- b\n", b"text", b"a: *b\n", b"[" * 400, b"[" * 9_999]
DAMAGES += [
    NESTED_ALIASES,
    b"algorithm: kto\n" * 99_999,
    b"algorithm: kto\n? [a]\n: b\n",
    b"algorithm: kto\na: !!python/object:os\n",
]


@pytest.mark.parametrize("damage", DAMAGES, ids=range(len(DAMAGES)))
def test_a_damaged_configuration_is_replaced(
    damage: bytes, load: Load, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, file = load(f"exp_manager.explicit_log_dir={tmp_path}"), tmp_path / "config.yaml"
    save_config(config)
    content = file.read_bytes()
    assert OmegaConf.load(file).exp_manager.explicit_log_dir
    file.write_bytes(damage)
    save_config(config)
    assert file.read_bytes() == content
    assert capsys.readouterr().err == Message("nemo-kto", f"{file}", "replaced")


def test_interpolations_of_a_saved_configuration_are_not_resolved(
    load: Load, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET", "hunter2")
    config, file = load(f"exp_manager.explicit_log_dir={tmp_path}"), tmp_path / "config.yaml"
    file.write_text("algorithm: kto\nmodel:\n  seed: ${oc.env:SECRET}\n")
    save_config(config)
    (line,) = capsys.readouterr().err.splitlines()
    assert_names(line, "model.seed", "${oc.env:SECRET}", str(config.model.seed))
    assert "hunter2" not in line
