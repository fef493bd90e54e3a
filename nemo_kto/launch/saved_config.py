"""The configuration of a run as its folder keeps it: with everything resolved."""

from __future__ import annotations

import sys
from pathlib import Path

from omegaconf import OmegaConf

from nemo_kto.launch.compose import known_keys
from nemo_kto.launch.schema import RunConfig

CONFIG_FILE = "config.yaml"


def save_config(config: RunConfig) -> None:
    """Write the resolved configuration into the run folder, and say what has changed since the run began."""
    file = Path(config.exp_manager.explicit_log_dir) / CONFIG_FILE
    file.parent.mkdir(parents=True, exist_ok=True)
    now = OmegaConf.create(config.model_dump())
    if file.exists() and config.exp_manager.resume_if_exists:
        before = OmegaConf.load(file)
        for key in known_keys(now):
            old, new = OmegaConf.select(before, key), OmegaConf.select(now, key)
            if old != new:
                print(f"nemo-kto: {key} was {old} when this was last started, and is {new}", file=sys.stderr)
    file.write_text(OmegaConf.to_yaml(now), encoding="utf-8")
