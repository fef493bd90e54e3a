"""Settings of layers: RoPE, attention temperature scaling, experts, formats of weights."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nemo_kto.utils import lazy_import

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = lazy_import("torch")


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary position embedding: the rotation angles of a position."""

    # radians per position for each pair of channels, exact fp32 values; further channels do not rotate
    frequencies: tuple[float, ...]
    attention_factor: float = 1.0  # on cosines and sines, and so squared on each score; yarn and longrope have one
    factor_in_table: bool = False  # it is applied to cosines and sines; otherwise its square is part of the softmax scale

    def __str__(self) -> str:
        message = f"{len(self.frequencies)} frequencies from {max(self.frequencies):g} to {min(self.frequencies):g}"
        return message if self.attention_factor == 1.0 else f"{message} and attention factor {self.attention_factor:g}"

    def inverse_frequencies(self) -> Tensor:
        """Return the frequencies, fp32 [rotated channels / 2]."""
        return torch.tensor(self.frequencies, dtype=torch.float32)

    def softmax_scale(self, head_dim: int, scalar: float | None = None, multiplier: float | None = None) -> float | None:
        """Return the factor on the scores, attention_factor^2 / sqrt(scalar); None for the usual 1 / sqrt(head size).

        If the attention factor is part of it, cosines and sines are unscaled, so that fused kernels, which do not scale
        them, can be used. ``scalar`` is that of the configuration; None means the head size. A ``multiplier`` replaces
        1 / sqrt(scalar).
        """
        factor = 1.0 if self.factor_in_table else self.attention_factor
        if multiplier is not None:
            return factor**2 * multiplier
        usual = factor == 1.0 and scalar in (None, head_dim)
        return None if usual else factor**2 / (scalar or head_dim) ** 0.5


@dataclass(frozen=True, kw_only=True)
class Temperature:
    """Attention temperature scaling: queries grow with the position.

    Queries at position p are multiplied by 1 + scale * log(1 + floor(p / floor)), so that the softmax over many keys stays
    sharp (Nakanishi 2025, arXiv 2501.19399).
    """

    floor: int  # length of the position intervals with one scale; queries of the first one are not scaled
    scale: float
    first: int = 1  # position of a sequence's first token
    with_rope: bool = False  # queries of layers with RoPE are scaled, after the rotation; otherwise those of the others


@dataclass(frozen=True, kw_only=True)
class Experts:
    """A mixture of experts: MLPs from which a router chooses some for each token (Shazeer et al. 2017, arXiv 1701.06538)."""

    number: int  # per layer
    per_token: int  # experts chosen for each token
    ffn_hidden_size: int  # width of an expert's gate and up projection
    normalized: bool  # the weights of a token's experts sum to 1; else they are scores over all experts
    layers: tuple[bool, ...]  # whether each layer has experts; the others have one MLP
    # width of gate and up projection of a shared expert, which processes every token; 0: none
    shared_ffn_hidden_size: int = 0
    shared_gate: bool = True  # the output of the shared expert is weighted by a gate, the sigmoid of one value per token
    # The score of an expert is the sigmoid of its logit, not a softmax over experts.
    sigmoid: bool = False
    # Shape of the correction bias of the router, which is added to the scores for the choice of experts, not to their
    # weights, and never trained (Wang et al. 2024, arXiv 2408.15664); empty: there is none.
    correction: tuple[int, ...] = ()
    # a token chooses from the ``chosen_groups`` groups with the largest sums of their ``best_of_group`` best scores
    groups: int = 1
    best_of_group: int = 2
    chosen_groups: int = 1
    scale: float = 1.0  # factor on the weights of a token's experts
    least_sum: float = 1e-20  # of the scores by whose sum normalised weights are divided
    added_sum: float = 0.0  # added to this sum
    router_in_fp32: bool = True  # logits are computed in fp32, else in the dtype of the model
    # The router probability is the sigmoid of the expert's logit, not a softmax over experts, and scales the expert's input
    # instead of its output. Only for one expert per token.
    weighs_input: bool = False
    # Router, experts and shared expert have norms of their own: ``layers.mlp.NormedExperts``.
    normed: bool = False

    @property
    def has_own_router(self) -> bool:
        """Whether the router has a feature that megatron-core's lacks."""
        return bool(self.correction) or self.groups > 1 or self.scale != 1.0


@dataclass(frozen=True, kw_only=True)
class BaseFormat:
    """A format of quantized weights [out, in]: codes of ``bits`` bits, and one scale for each block."""

    name: str
    bits: int  # of the code of a value
    block: tuple[int, int]  # rows and columns of a weight in the files that have one scale
    scale_bytes: int

    def bytes_of(self, shape: tuple[int, ...]) -> int:
        """Return the bytes of a rank's weight of this shape; in memory each row has scales of its own."""
        values = math.prod(shape)
        return values * self.bits // 8 + values // self.block[1] * self.scale_bytes


FORMATS: dict[str, BaseFormat] = {
    # 4-bit NormalFloat (Dettmers et al. 2023, arXiv 2305.14314), without double quantization, as bitsandbytes stores it
    "nf4": BaseFormat(name="nf4", bits=4, block=(1, 64), scale_bytes=4),
    # e4m3 with fp32 scales, as in the files of DeepSeek-V3 (arXiv 2412.19437, section 3.3.2)
    "fp8": BaseFormat(name="fp8", bits=8, block=(128, 128), scale_bytes=4),
    # e2m1 with e8m0 scales (OCP Microscaling Formats 1.0), as in the files of gpt-oss
    "mxfp4": BaseFormat(name="mxfp4", bits=4, block=(1, 32), scale_bytes=1),
}
