"""Checkpoint metadata as pickled by several versions of Python is loaded without allowing other uses of getattr."""

from __future__ import annotations

import enum
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorProperties

from nemo_kto.checkpoint.safe_loading import read_metadata
from nemo_kto.errors import UserError
from tests.helpers.messages import Message


class _Pickler(pickle.Pickler):
    """Writes members of an enum by name, as Python 3.11.0 to 3.11.3 do."""

    def reducer_override(self, value: object) -> Any:
        return (getattr, (type(value), value.name)) if isinstance(value, enum.Enum) else NotImplemented


class _Reaches:
    """Asks for an attribute of a class that metadata may name."""

    def __reduce__(self) -> Any:
        return getattr, (BytesStorageMetadata, "__init__")


def written(folder: Path, value: object) -> Path:
    stream = io.BytesIO()
    _Pickler(stream).dump(value)
    file = folder / ".metadata"
    file.write_bytes(stream.getvalue())
    return file


def test_enums_by_name(tmp_path: Path) -> None:
    properties = TensorProperties(dtype=torch.bfloat16)
    file = written(tmp_path, Metadata({}, planner_data=properties, storage_data={}))
    assert b"getattr" in file.read_bytes()
    with file.open("rb") as stream:
        assert read_metadata(stream).planner_data == properties


def test_no_other_attribute(tmp_path: Path) -> None:
    file = written(tmp_path, Metadata({}, planner_data=_Reaches(), storage_data={}))
    with file.open("rb") as stream, pytest.raises(UserError) as error:
        read_metadata(stream)
    assert str(error.value) == Message(f"{file}", "builtins.getattr", "take another checkpoint")
