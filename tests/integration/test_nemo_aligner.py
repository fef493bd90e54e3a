"""A NeMo-Aligner configuration file trains with the few overrides that a small machine needs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from tests.helpers.commands import CLI, REPOSITORY, TRAINING, environment, run, stub_training
from tests.helpers.messages import assert_names
from tests.helpers.tiny_models import make_rows, write_rows

FILES = str(REPOSITORY / "tests/data/nemo_aligner")
SOURCE = ["--config-dir", FILES, "--config-name", "gpt_kto"]


def test_gpt_kto_of_nemo_aligner_trains(tiny_llama: Path, tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", make_rows(16))
    given = [
        f"pretrained_checkpoint.restore_from_path={tiny_llama}",
        f"model.data.data_prefix={rows}",
        "hardware=cpu",
        "trainer.num_nodes=1",
        "trainer.devices=1",
        "exp_manager.explicit_log_dir=results",
        "model.global_batch_size=8",
        "export.report=false",
        "++model.encoder_seq_length=64",
        f"++model.data.cache_dir={tmp_path / 'cache'}",
    ]
    done = run([*CLI, "kto", *SOURCE, *given], cwd=tmp_path, env=environment(), preload=TRAINING, timeout=300)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (tmp_path / "results/metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "train/loss" in line]
    assert [line["train/lr"] for line in steps] == pytest.approx([9e-6, 9e-7]), "one step of warm-up, the last at min_lr"
    assert steps[0]["train/loss"] == pytest.approx(0.5, abs=1e-6)
    output = done.stdout + done.stderr
    assert_names(output, "nemo-kto", "model.overwrite_base_config.data.data_prefix")
    assert output.count("has no effect") == 3
    assert_names(output, "model.optim.sched.warmup_steps", "2", "10", "using 1")
    assert_names(output, "model.optim.sched.constant_steps", "1000", "1", "using 0")
    saved = OmegaConf.load(tmp_path / "results/config.yaml")
    assert (saved.algorithm, saved.model.data.seq_length, saved.model.optim.name) == ("kto", 64, "adam")
    assert (tmp_path / "results/hf/config.json").is_file()


def test_the_ranks_of_a_job_of_a_sweep_read_the_same_file(tmp_path: Path) -> None:
    env = stub_training(tmp_path, "open(f'rank{rank}', 'w').write(str(cfg.model.optim.sched.constant_steps))")
    given = ["pretrained_checkpoint.restore_from_path=model", "model.data.data_prefix=rows.jsonl", "trainer.num_nodes=1"]
    given += [
        "trainer.accelerator=cpu",
        "trainer.devices=2",
        "exp_manager.explicit_log_dir=results",
        "+model.mcore_gpt=true",
    ]
    done = run([*CLI, "kto", *SOURCE, *given, "--multirun", "model.seed=5"], cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr
    assert [(tmp_path / f"rank{rank}").read_text() for rank in (0, 1)] == ["1000", "1000"]
    assert done.stderr.count("model.overwrite_base_config.data.data_prefix ") == 1, "once, not per rank"


@pytest.mark.parametrize(
    ("text", "output"), [("model: [1\n", ["compose"]), ("defaults: 3\n", ["compose", "list", "mine", "int"])]
)
def test_a_file_without_a_configuration(tmp_path: Path, text: str, output: list[str]) -> None:
    env = stub_training(tmp_path, "raise AssertionError('started')")
    (tmp_path / "mine.yaml").write_text(text)
    done = run([*CLI, "kto", "--config-dir", ".", "--config-name", "mine"], cwd=tmp_path, env=env)
    assert (done.returncode, done.stdout) == (2, "")
    assert_names(done.stderr, "nemo-kto", "1", "nothing", "mine.yaml", *output)
    assert "Traceback" not in done.stderr
