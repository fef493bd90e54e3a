"""Sequence mixers: the parts of layers in which a token takes in values of earlier tokens. One file each."""

from __future__ import annotations

from nemo_kto.mixers.attention_with_mamba import AttentionWithMamba
from nemo_kto.mixers.gated_delta_net import GatedDeltaNet
from nemo_kto.mixers.global_attention import GlobalAttention
from nemo_kto.mixers.mamba2 import Mamba2
from nemo_kto.mixers.mixer import NO_MIXER, AttentionWindow, LinearLayer, NoMixer, Saving, SequenceMixer
from nemo_kto.mixers.mla import LatentAttention
from nemo_kto.mixers.short_convolution import ShortConvolution
from nemo_kto.mixers.softmax_attention import SOFTMAX_ATTENTION, SoftmaxAttention

__all__ = [
    "NO_MIXER",
    "SOFTMAX_ATTENTION",
    "AttentionWindow",
    "AttentionWithMamba",
    "GatedDeltaNet",
    "GlobalAttention",
    "LatentAttention",
    "LinearLayer",
    "Mamba2",
    "NoMixer",
    "Saving",
    "SequenceMixer",
    "ShortConvolution",
    "SoftmaxAttention",
]
