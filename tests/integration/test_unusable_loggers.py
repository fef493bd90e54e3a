"""A tracking service that cannot be used ends a new run with one error."""

from __future__ import annotations

from pathlib import Path

from tests.helpers.commands import CLI, TRAINING, environment, run
from tests.helpers.messages import assert_names
from tests.helpers.tiny_models import make_rows, write_rows


def test_an_mlflow_address_of_no_known_kind(tiny_llama: Path, tmp_path: Path) -> None:
    file = write_rows(tmp_path / "rows.jsonl", make_rows(40))
    words = [f"pretrained_checkpoint.restore_from_path={tiny_llama}", f"model.data.data_prefix={file}", "hardware=cpu"]
    words += [f"model.data.cache_dir={tmp_path / 'cache'}", "model.data.seq_length=64", "model.global_batch_size=16"]
    words.append("export.report=false")
    words += ["exp_manager.create_mlflow_logger=true", "exp_manager.mlflow_logger_kwargs.tracking_uri=mlfow://host"]
    done = run([*CLI, "kto", *words], cwd=tmp_path, env=environment(), preload=TRAINING, timeout=300)
    assert done.returncode == 2, done.stderr
    assert_names(done.stderr, "mlflow", "mlfow://host", "exp_manager.create_mlflow_logger=false")
