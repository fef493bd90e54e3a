"""The norm on torch that megatron-core's layers accept where Transformer Engine is absent, sequence parallelism included."""

from __future__ import annotations

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from nemo_kto.parallel import device


class _RMSNorm(torch.nn.RMSNorm):
    returns_residual = False  # read by megatron-core >= 0.18 of every norm


class TorchNorm:
    """Builds an RMS norm; called as megatron-core calls its own norm builder.

    Under sequence parallelism every rank of a tensor-parallel group normalises its own part of the sequence, so the gradient
    of the weight is a partial sum. Its parameters carry ``sequence_parallel``, the mark by which megatron-core finds the
    gradients it must add up over the group.
    """

    def __new__(  # type: ignore[misc]  # a builder that reads like a class, as the layer spec expects
        cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: object
    ) -> torch.nn.Module:
        """Build the norm.

        Args:
            config: gives the dtype of the parameters and sequence parallelism.
            hidden_size: size of the last dimension, over which the norm is taken.
            eps: added to the variance.

        Raises:
            ValueError: another norm is configured, or what torch's norm does not have.
        """
        if config.normalization != "RMSNorm":
            raise ValueError(f"normalization must be RMSNorm, got {config.normalization!r}")
        if config.layernorm_zero_centered_gamma:
            raise ValueError(
                "layernorm_zero_centered_gamma must be False without Transformer Engine; torch's norms scale by the weight"
            )
        norm = _RMSNorm(hidden_size, eps=eps, dtype=config.params_dtype, device=device.current_device())
        norm.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return norm
