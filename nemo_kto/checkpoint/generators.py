"""The random generators of a rank in and out of a checkpoint."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from nemo_kto.device import device


def get_rng_state() -> dict[str, Any]:
    """The states of all generators of this rank, in tensors and plain data."""
    kept = np.random.get_state(legacy=False)
    assert isinstance(kept, dict)
    return {
        "torch": torch.get_rng_state(),
        "device": device.get_rng_state(),
        "tracker": get_cuda_rng_tracker().get_states(),
        "python": random.getstate(),
        "numpy": json.dumps(kept, default=np.ndarray.tolist),
    }


def set_rng_state(kept: Mapping[str, Any]) -> None:
    """Put back what :func:`get_rng_state` gave.

    Raises:
        ValueError: there are other generators of model-parallel regions; torch, Python and numpy raise their own errors.
    """
    tracker = get_cuda_rng_tracker()
    kinds, ours = (
        {name: type(each) for name, each in dict(states).items()} for states in (kept["tracker"], tracker.get_states())
    )
    if kinds != ours:
        raise ValueError(f"tracker must hold the generators {', '.join(ours)}, got {', '.join(map(str, kinds))}")
    torch.set_rng_state(kept["torch"])
    device.set_rng_state(kept["device"])
    tracker.set_states(kept["tracker"])
    random.setstate(kept["python"])
    np.random.set_state(json.loads(kept["numpy"]))
