"""Counts other work of the host for the device: launches, copies to the device, and probes of its own environment."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import os
import shutil
import sysconfig
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from tests.emulated_cuda import waits

# Functions that look at files, environment variables, packages or devices, which do not change while a process runs.
PROBES: tuple[tuple[Any, str], ...] = (
    (os, "stat"),
    (type(os.environ), "__getitem__"),
    (shutil, "which"),
    (sysconfig, "get_paths"),
    (importlib.util, "find_spec"),
    (inspect, "signature"),
    (torch.cuda, "is_available"),
)
launches = Counter[bool]()  # operators on the device, by whether they are in a micro-batch
counted: Counter[waits.Wait] = Counter()  # copies to the device, and probes of nemo_kto


def note_launch() -> None:
    if waits.is_counting():
        launches[waits.in_micro_batch()] += 1


def note(kind: str) -> None:
    if waits.is_counting():
        counted[waits.here(kind)] += 1


def watch_probes() -> None:
    """Count the probes that lines of nemo_kto make, directly or through Python's own modules."""
    for owner, name in PROBES:
        setattr(owner, name, _watched(getattr(owner, name), name))


def _watched(original: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if waits.is_counting() and waits.calls_from_package():
            counted[waits.here(f"probe: {name}")] += 1
        return original(*args, **kwargs)

    return call
