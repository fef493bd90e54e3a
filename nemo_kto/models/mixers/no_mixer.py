"""Absence of a sequence mixer."""

from __future__ import annotations

from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec

from nemo_kto.architecture.architecture import Architecture
from nemo_kto.mixers import NoMixer


def no_mixer(layer: ModuleSpec, mixer: NoMixer, architecture: Architecture, **_: object) -> None:
    """Leave out a layer's attention with its norm and its residual connection."""
    parts = layer.submodules
    parts.input_layernorm = parts.self_attention = IdentityOp
    parts.self_attn_bda = IdentityFuncOp
