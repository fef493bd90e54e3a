"""Whole jobs for the ranks of a test: what the command line runs, without its start."""

from __future__ import annotations

from pathlib import Path


def train(model: Path, rows: Path, folder: Path, world_size: int, overrides: list[str], algorithm: str = "kto") -> None:
    """Ten steps in fp32 with a validation every fifth, logged to ``folder``/metrics.jsonl."""
    from nemo_kto.launch import build, compose

    defaults = [
        f"pretrained_checkpoint.restore_from_path={model}",
        f"model.data.data_prefix={{train: {rows}, validation: {rows}}}",
        f"model.data.cache_dir={rows.parent / 'cache'}",
        f"exp_manager.explicit_log_dir={folder}",
        f"trainer.devices={world_size}",
        "trainer.accelerator=cpu",
        "trainer.precision=32",
        f"trainer.{algorithm}.max_epochs=2",
        f"trainer.{algorithm}.max_steps=10",
        f"trainer.{algorithm}.val_check_interval=5",
        f"trainer.{algorithm}.save_interval=0",
        "model.global_batch_size=16",
        "model.micro_batch_size=1",
        "model.data.seq_length=64",
        "model.optim.lr=5e-4",
        "model.optim.sched.name=constant",
        "model.optim.sched.warmup_steps=2",
        "exp_manager.create_tensorboard_logger=false",
        "export.enabled=false",
    ]
    source = compose.Source(config_name=f"gpt_{algorithm}")
    cfg, problems = compose.to_config(compose.load([*defaults, *overrides], source=source))
    assert cfg is not None, problems
    build.train(cfg)
