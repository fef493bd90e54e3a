"""The configuration in the run folder."""

from __future__ import annotations

import sys
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from nemo_kto.files import open_file, publish_file
from nemo_kto.launch.compose import WRONG, known_keys
from nemo_kto.launch.redaction import public_config
from nemo_kto.launch.schema import RunConfig


def save_config(config: RunConfig) -> None:
    """Write the resolved configuration, without secrets, into the run folder; say what has changed since the run began."""
    file = Path(config.exp_manager.explicit_log_dir) / "config.yaml"
    file.parent.mkdir(parents=True, exist_ok=True)
    now = OmegaConf.create(public_config(config))
    if file.exists() and config.exp_manager.resume_if_exists:
        before = _load(file)
        known = set() if before is None else set(known_keys(before))
        for key in known_keys(now):
            if before is None or key not in known:  # cut short, or of an earlier version
                continue
            old = OmegaConf.select(before, key, throw_on_resolution_failure=False)
            new = OmegaConf.select(now, key)
            if old != new:
                print(f"nemo-kto: {key} was {old} when this was last started, and is {new}", file=sys.stderr)
    with publish_file(file) as writing:
        writing.write_text(OmegaConf.to_yaml(now), encoding="utf-8")


def _load(file: Path) -> DictConfig | None:
    """The configuration that was saved; None, and a warning, where a crash has damaged it."""
    try:
        with open_file(file) as handle:
            before = OmegaConf.load(handle)
        if isinstance(before, DictConfig) and "algorithm" in before:
            return before
    except (*WRONG, ValueError):
        pass
    text = "cannot be read and is written again; what has changed since the last start is not known"
    print(f"nemo-kto: {file} {text}", file=sys.stderr)
    return None
