"""The configuration in the run folder."""

from __future__ import annotations

import sys
from pathlib import Path

import yaml
from omegaconf import OmegaConf

from nemo_kto.config.compose import WRONG, known_keys
from nemo_kto.config.redaction import public_config
from nemo_kto.config.schema import RunConfig
from nemo_kto.utils.files import publish_file, read_bytes

_MAX_BYTES = 2**18  # what is written has a thirtieth of that
_ABSENT = object()


class _PlainLoader(yaml.SafeLoader):
    """Reads YAML without aliases, which this program does not write: a few nested ones may stand for billions of values."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("there must be no aliases")
        return super().compose_node(parent, index)


def save_config(config: RunConfig) -> None:
    """Write the resolved configuration, without secrets, into the run folder; say what has changed since the run began."""
    file = Path(config.exp_manager.explicit_log_dir) / "config.yaml"
    file.parent.mkdir(parents=True, exist_ok=True)
    now = OmegaConf.create(public_config(config))
    if file.exists() and config.exp_manager.resume_if_exists:
        before, values = _load(file), OmegaConf.to_container(now)
        for key in known_keys(now):
            old, new = _value(before, key), _value(values, key)
            if old not in (_ABSENT, new):  # absent where the file was cut short, or is of an earlier version
                print(f"nemo-kto: {key} was {old} when this was last started, and is {new}", file=sys.stderr)
    with publish_file(file) as writing:
        writing.write_text(OmegaConf.to_yaml(now), encoding="utf-8")


def _load(file: Path) -> object:
    """The configuration that was saved, with its interpolations as they are; None, and a warning, where it is damaged."""
    try:
        before = yaml.load(read_bytes(file, limit=_MAX_BYTES), Loader=_PlainLoader)  # nosec B506  # a SafeLoader
        if isinstance(before, dict) and "algorithm" in before:
            return before
    except (*WRONG, ValueError):
        pass
    text = "cannot be read and is written again; what has changed since the last start is not known"
    print(f"nemo-kto: {file} {text}", file=sys.stderr)
    return None


def _value(values: object, key: str) -> object:
    for name in key.split("."):
        values = values.get(name, _ABSENT) if isinstance(values, dict) else _ABSENT
    return values
