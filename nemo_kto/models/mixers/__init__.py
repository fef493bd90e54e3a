"""Modules of the sequence mixers; a mixer without modules in this table cannot be built."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.spec_utils import ModuleSpec

from nemo_kto.architecture.architecture import Architecture
from nemo_kto.mixers import GatedDeltaNet, LatentAttention, Mamba2, NoMixer, SequenceMixer, SoftmaxAttention
from nemo_kto.models.mixers.gated_delta_net_module import gated_delta_net
from nemo_kto.models.mixers.mamba2_module import mamba2
from nemo_kto.models.mixers.mla_module import latent_attention
from nemo_kto.models.mixers.no_mixer import no_mixer
from nemo_kto.models.mixers.softmax_attention_module import softmax_attention


class Specify(Protocol):
    """Function that puts the modules of a sequence mixer into the spec of one of megatron-core's layers."""

    def __call__(
        self,
        layer: ModuleSpec,
        mixer: Any,
        architecture: Architecture,
        *,
        use_te: bool,
        share_prompts: bool,
        attn_mask_type: AttnMaskType,
    ) -> None: ...


MODULES: Mapping[type[SequenceMixer], Specify] = {
    GatedDeltaNet: gated_delta_net,
    LatentAttention: latent_attention,
    Mamba2: mamba2,
    NoMixer: no_mixer,
    SoftmaxAttention: softmax_attention,
}
