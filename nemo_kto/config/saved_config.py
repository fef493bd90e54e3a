"""The configuration saved in the run folder, with secrets redacted."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from nemo_kto.config.compose import FREE_FORM, known_keys, load, our_source
from nemo_kto.config.schema import RunConfig
from nemo_kto.redaction import redacted_value
from nemo_kto.utils.files import load_yaml, publish_file, read_bytes
from nemo_kto.utils.text import print_error, terminal_line

CONFIG_FILE = "config.yaml"  # in the run folder


def public_config(config: RunConfig) -> dict[str, object]:
    """Return the configuration in a form safe to write and log; values under a secret's name are replaced as a whole."""
    return {str(key): redacted_value(value) for key, value in config.model_dump().items()}


def settings_of_user(config: RunConfig) -> dict[str, object]:
    """Return the keys with other values than our defaults, or than the default expressions give for the user's values."""
    values = dict(_leaves(public_config(config)))
    defaults = load(source=our_source(config.recipe))
    OmegaConf.set_struct(defaults, False)
    given = {}
    for expressions in (False, True):  # an expression is evaluated with the values that the user gave
        for key in known_keys(defaults):
            section, name = OmegaConf.select(defaults, key.rpartition(".")[0]) or defaults, key.rpartition(".")[2]
            if key not in values or OmegaConf.is_interpolation(section, name) is not expressions:
                continue
            value, default = values[key], None if OmegaConf.is_missing(section, name) else section[name]
            if not _equal(value, OmegaConf.to_container(default) if OmegaConf.is_config(default) else default):
                given[key] = value
                section[name] = value
    return {key: given[key] for key in values if key in given}


def _leaves(values: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    for name, value in values.items():
        if isinstance(value, Mapping) and f"{prefix}{name}" not in FREE_FORM:
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _equal(value: object, default: object) -> bool:
    if isinstance(value, list | tuple):
        return isinstance(default, list | tuple) and list(value) == list(default)
    if isinstance(default, str) and default.startswith("~"):
        default = os.path.expanduser(default)
    return value == default


_ABSENT = object()


def save_config(config: RunConfig) -> None:
    """Write the resolved, redacted configuration to the run folder; print the changes since the run was last started."""
    file = Path(config.exp_manager.explicit_log_dir) / CONFIG_FILE
    file.parent.mkdir(parents=True, exist_ok=True)
    for key, (old, new) in changed_keys(config).items():
        print_error(f"nemo-kto: {key} changed since the last start of this run: {terminal_line(f'{old} -> {new}')}")
    with publish_file(file) as writing:
        writing.write_text(OmegaConf.to_yaml(OmegaConf.create(public_config(config))), encoding="utf-8")


def changed_keys(config: RunConfig) -> dict[str, tuple[object, object]]:
    """Return the keys that differ from those of the last start of the run, with their old and new values, redacted."""
    file = Path(config.exp_manager.explicit_log_dir) / CONFIG_FILE
    if not file.exists() or not config.exp_manager.resume_if_exists:
        return {}
    now = OmegaConf.create(public_config(config))
    before, after = _load(file), OmegaConf.to_container(now)
    values = {key: (_value(before, key), _value(after, key)) for key in known_keys(now)}
    # absent if the file was truncated or written by an earlier version
    return {key: (old, new) for key, (old, new) in values.items() if old not in (_ABSENT, new)}


def saved_value(config: RunConfig, key: str) -> object:
    """Return the value of a key in the configuration that the run folder has from an earlier start; None without one."""
    file = Path(config.exp_manager.explicit_log_dir) / CONFIG_FILE
    value = _value(_load(file), key) if file.is_file() else _ABSENT
    return None if value is _ABSENT else value


def read_saved(file: Path) -> dict[str, Any]:
    """Return a saved configuration by key (model.optim.lr), empty if the file is missing or damaged."""
    saved = _read(file)
    config = OmegaConf.create({} if saved is None else saved, flags={"allow_objects": False})
    return {key: _value(saved, key) for key in known_keys(config)}


def _read(file: Path) -> dict[str, Any] | None:
    """Read a saved configuration without resolving interpolations; None if it is missing or damaged."""
    try:
        content = load_yaml(read_bytes(file))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) and "algorithm" in content else None


def _load(file: Path) -> object:
    """Load the saved configuration without resolving interpolations; if it is damaged, print a warning and return None."""
    if (before := _read(file)) is not None:
        return before
    text = "cannot be read and is replaced; changes since the last start of this run are not known"
    print_error(f"nemo-kto: {file} {text}")
    return None


def _value(values: object, key: str) -> object:
    for name in key.split("."):
        values = values.get(name, _ABSENT) if isinstance(values, dict) else _ABSENT
    return values
