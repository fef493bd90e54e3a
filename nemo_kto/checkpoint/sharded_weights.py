"""Sharded state of weights and adapters, and the random generators of a rank."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core.dist_checkpointing.mapping import ShardedStateDict, ShardedTensor, StateDict
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.utils import unwrap_model
from torch import Tensor, nn

from nemo_kto.architecture.lora import LoRASettings
from nemo_kto.device import device
from nemo_kto.distributed.gradients import finish_gathers
from nemo_kto.errors import UserError
from nemo_kto.model_files.checkpoint_files import adapter_settings
from nemo_kto.models.engine.reference import SwappedWeights
from nemo_kto.models.lora.adapters import is_adapter


def get_rng_state() -> dict[str, Any]:
    """Return the states of this rank's random generators, as tensors and plain data."""
    numpy_state = np.random.get_state(legacy=False)
    return {
        "torch": torch.get_rng_state(),
        "device": device.get_rng_state(),
        "tracker": get_cuda_rng_tracker().get_states(),
        "python": random.getstate(),
        "numpy": json.dumps(numpy_state, default=np.ndarray.tolist),
    }


def set_rng_state(saved: Mapping[str, Any]) -> None:
    """Restore :func:`get_rng_state`; raise ValueError if the generators of model-parallel regions differ."""
    tracker = get_cuda_rng_tracker()
    found, expected = (
        {name: type(each) for name, each in dict(states).items()} for states in (saved["tracker"], tracker.get_states())
    )
    if found != expected:
        raise ValueError(f"tracker must contain the generators {', '.join(expected)}, got {', '.join(map(str, found))}")
    torch.set_rng_state(saved["torch"])
    device.set_rng_state(saved["device"])
    tracker.set_states(saved["tracker"])
    random.setstate(saved["python"])
    np.random.set_state(json.loads(saved["numpy"]))


@dataclass(frozen=True, kw_only=True)
class SavedAdapters:
    """The adapter entry of a checkpoint that holds only adapters."""

    base_model: Path  # source of the base model's weights: a Hugging Face folder or one of our own checkpoints
    settings: LoRASettings


def dtype_name(chunks: Sequence[nn.Module]) -> str:
    """Return the dtype of a model's weights, such as "bfloat16"."""
    return str(next(chunks[0].parameters()).dtype).removeprefix("torch.")


def adapters_of(chunks: Sequence[nn.Module]) -> LoRASettings | None:
    """Return the LoRA settings of a model; None if its own weights are trained."""
    return unwrap_model(chunks[0]).adapters


def adapters_in(info: Mapping[str, Any]) -> SavedAdapters | None:
    """Return the adapter entry of a trainer.json; None if the checkpoint holds all weights of a model."""
    if (entry := info.get("adapters")) is None:
        return None
    return SavedAdapters(base_model=Path(entry["base_model"]), settings=adapter_settings(entry))


def check_adapters(saved: SavedAdapters | None, chunks: Sequence[nn.Module]) -> None:
    """Raise UserError unless a model has the adapters of a checkpoint; their dropout may differ."""
    expected, found = _describe(None if saved is None else saved.settings), _describe(adapters_of(chunks))
    if found != expected:
        raise UserError(
            f"the model must have the adapters of the checkpoint ({expected}), got {found}; restore model.peft, or start a "
            "new run in another folder"
        )


def sharded_weights(chunks: Sequence[nn.Module], *, adapters: bool) -> ShardedStateDict:
    """Return the sharded state of the adapters, or of everything but the adapters: ``model0`` for the first chunk and so on.

    It holds only weights, so that it is the same for layers of megatron-core and of Transformer Engine. The extra fp8 state
    of these layers is left out: with the fp8 scaling used in this program it is empty.
    """
    finish_gathers(chunks)
    # If only some layers are adapted, they need entries of their own instead of parts of one entry for all layers.
    metadata = {"non_homogeneous_layers": True} if adapters else None
    states = [unwrap_model(chunk).sharded_state_dict(metadata=metadata) for chunk in chunks]
    return {
        f"model{number}": {name: value for name, value in state.items() if is_adapter(name) == adapters and _is_weight(name)}
        for number, state in enumerate(states)
    }


def load_weights(chunks: Sequence[nn.Module], loaded: StateDict, *, adapters: bool) -> None:
    """Load weights in the form of :func:`sharded_weights`; raise RuntimeError if some are missing or unexpected."""
    for number, chunk in enumerate(chunks):
        state = loaded.get(f"model{number}", {})  # a stage without adapters has none
        missing, unexpected = unwrap_model(chunk).load_state_dict(state, strict=False)
        missing = [name for name in missing if is_adapter(name) == adapters and _is_weight(name)]
        if missing or unexpected:
            raise RuntimeError(f"the weights do not fit the model: missing {missing}, unexpected {unexpected}")


def sharded_reference(chunks: Sequence[nn.Module], weights: SwappedWeights) -> ShardedStateDict:
    """Return the sharded state of a synced reference: the model's entries, with the reference's fp32 values.

    For a model with adapters these are the adapters, and also the base model if the reference has a different one.
    """
    base, adapters = (sharded_weights(chunks, adapters=adapters) for adapters in (False, True))
    reference: ShardedStateDict = {}
    for part, values in zip(base, _reference_values(chunks, weights), strict=True):
        state = {**base[part], **adapters[part]}
        entries = {name: entry for name, entry in state.items() if name in values}
        for name, entry in entries.items():
            entry.key, entry.data = f"reference.{entry.key}", values[name]
            if isinstance(entry, ShardedTensor):
                entry.dtype = values[name].dtype
        reference[part.replace("model", "reference")] = entries
    return reference


def load_reference(chunks: Sequence[nn.Module], weights: SwappedWeights, loaded: StateDict) -> None:
    """Load reference weights in the form of :func:`sharded_reference`."""
    for number, values in enumerate(_reference_values(chunks, weights)):
        for name, loaded_values in loaded.get(f"reference{number}", {}).items():
            values[name].copy_(loaded_values)
    weights.round_values()


def _reference_values(chunks: Sequence[nn.Module], weights: SwappedWeights) -> Iterator[dict[str, Tensor]]:
    values_of = {id(parameter): values for parameter, values in zip(weights.parameters, weights.values, strict=True)}
    for chunk in chunks:
        named = unwrap_model(chunk).named_parameters()
        yield {name: values_of[id(parameter)] for name, parameter in named if id(parameter) in values_of}


def _is_weight(name: str) -> bool:
    """Return False for the fp8 entries that Transformer Engine, and megatron-core for its sake, add to a state_dict."""
    return not name.endswith("._extra_state")


def _describe(settings: LoRASettings | None) -> str:
    if settings is None:
        return "none"
    layers = "all layers" if settings.layers is None else f"layers {', '.join(map(str, settings.layers))}"
    kind = "DoRA of " if settings.dora else ""
    modules = ", ".join(settings.modules) + ("" if settings.experts else " without routed experts")
    return f"{kind}rank {settings.rank}, {settings.scale_text}, {modules} of {layers}"
