"""Rotary position embeddings: as Hugging Face configurations describe them, and applied to queries and keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nemo_kto.models.spans import token_positions
from nemo_kto.parallel import device

# Each rope type and what it cannot do without; transformers has a default for the rest.
_NEEDED: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor",),
    "dynamic": ("factor", "max_position_embeddings"),
    "longrope": ("short_factor", "long_factor", "original_max_position_embeddings"),
}
ROPE_TYPES = tuple(_NEEDED)
# Families with a rope of their own for layers with a window.
_BY_LAYER_TYPE = ("gemma3_text", "olmo3")
_OF_THE_CONFIG = ("max_position_embeddings", "original_max_position_embeddings", "rope_theta", "partial_rotary_factor")


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Which rotation a position means.

    Attributes:
        frequencies: radians a position for each pair of channels, exact fp32 values. Channels of a head beyond the pairs are
            not rotated.
        attention_factor: factor on cosines and sines, and so twice on each score; yarn and longrope have one.
        factor_in_table: cosines and sines have it; else the scale of the softmax has its square.
    """

    frequencies: tuple[float, ...]
    attention_factor: float = 1.0
    factor_in_table: bool = False

    def __str__(self) -> str:
        """For messages."""
        told = f"{len(self.frequencies)} frequencies from {max(self.frequencies):g} to {min(self.frequencies):g}"
        return told if self.attention_factor == 1.0 else f"{told} and attention factor {self.attention_factor:g}"

    def inverse_frequencies(self) -> Tensor:
        """The frequencies, fp32 [rotated channels / 2]."""
        return torch.tensor(self.frequencies, dtype=torch.float32)

    def softmax_scale(self, head_dim: int, scalar: float | None = None) -> float | None:
        """The factor on the scores, attention_factor^2 / sqrt(scalar); None for the usual one, 1 / sqrt(head size).

        With the attention factor there, cosines and sines stay as they are, so that fused kernels, which have no factor on
        them, can be used. The scalar is that of the configuration; None for the head size.
        """
        factor = 1.0 if self.factor_in_table else self.attention_factor
        usual = factor == 1.0 and scalar in (None, head_dim)
        return None if usual else factor**2 / (scalar or head_dim) ** 0.5


class RotaryTable:
    """Cosines and sines of all positions so far; one for all layers of a model.

    megatron-core computes them again in each layer, of queries and of keys.
    """

    def __init__(self, *, rope: Rope) -> None:
        self._rope = rope
        self._cos_and_sin: tuple[Tensor, Tensor] | None = None
        self._of_row: tuple[tuple[int, ...], tuple[Tensor, Tensor]] | None = None

    def rotate(self, heads_sbhd: Tensor, lengths: tuple[int, ...] | None = None, *, rank: int = 0, size: int = 1) -> Tensor:
        """Queries or keys [sequence, batch, heads, head size], the first channels rotated by their place.

        Args:
            heads_sbhd: what is rotated.
            lengths: of the sequences that lie one after the other, each of which begins at 0; None for one.
            rank, size: of the context-parallel group, whose ranks share the sequences; their lengths are needed then. The
                same in every call.
        """
        if lengths is None:
            cos_s11d, sin_s11c = self._from_zero(len(heads_sbhd), heads_sbhd)
        else:
            cos_s11d, sin_s11c = self._row(lengths, heads_sbhd, rank=rank, size=size)
        first, rest = heads_sbhd.tensor_split([cos_s11d.size(-1)], dim=-1)
        rotated: Tensor = _Rotation.apply(first, cos_s11d, sin_s11c)  # type: ignore[no-untyped-call]
        return torch.cat((rotated, rest), dim=-1) if rest.size(-1) else rotated

    def _from_zero(self, positions: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines [positions, 1, 1, rotated channels], sines [.., half of them]."""
        kept = self._cos_and_sin
        if kept is None or len(kept[0]) < positions or kept[0].dtype != like.dtype:
            kept = self._cos_and_sin = self._tables_like(positions, like)
        return kept[0][:positions], kept[1][:positions]

    def _row(self, lengths: tuple[int, ...], like: Tensor, *, rank: int, size: int) -> tuple[Tensor, Tensor]:
        """The same for a row of sequences; that of the last row is kept, for its other layers."""
        if self._of_row is None or self._of_row[0] != lengths or self._of_row[1][0].dtype != like.dtype:
            cos_s11d, sin_s11c = self._from_zero(max(lengths), like)
            (position_t,) = device.upload([token_positions(lengths, rank=rank, size=size)])
            self._of_row = lengths, (cos_s11d[position_t], sin_s11c[position_t])
        return self._of_row[1]

    def _tables_like(self, positions: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """In the dtype of ``like``, computed in fp32."""
        frequency_c = self._rope.inverse_frequencies().to(like.device)
        position_s = torch.arange(positions, dtype=torch.float32, device=like.device)
        angle_s11c = torch.outer(position_s, frequency_c)[:, None, None, :]
        factor = self._rope.attention_factor if self._rope.factor_in_table else 1.0
        cos_s11d, sin_s11c = (angle_s11c.cos() * factor).repeat(1, 1, 1, 2), angle_s11c.sin() * factor
        return cos_s11d.to(like.dtype), sin_s11c.to(like.dtype)


class _Rotation(torch.autograd.Function):
    """Channel c and channel c + half of the head are a pair. The gradient is rotated back."""

    @staticmethod
    def forward(ctx: Any, heads_sbhd: Tensor, cos_s11d: Tensor, sin_s11c: Tensor) -> Tensor:
        ctx.save_for_backward(cos_s11d, sin_s11c)
        return _rotated(heads_sbhd, cos_s11d, sin_s11c, direction=1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _rotated(grads[0], *ctx.saved_tensors, direction=-1), None, None


def _rotated(heads_sbhd: Tensor, cos_s11d: Tensor, sin_s11c: Tensor, *, direction: int) -> Tensor:
    rotated_sbhd = heads_sbhd * cos_s11d
    (low, high), (rotated_low, rotated_high) = heads_sbhd.chunk(2, dim=-1), rotated_sbhd.chunk(2, dim=-1)
    rotated_low.addcmul_(high, sin_s11c, value=-direction)
    rotated_high.addcmul_(low, sin_s11c, value=direction)
    return rotated_sbhd


def layer_rope(config: Mapping[str, Any], layer_type: str) -> Mapping[str, Any]:
    """A configuration with the rope of one of its layer types (full_attention, sliding_attention) as that of all layers.

    That of a family which has one rope stays as it is.
    """
    if config.get("model_type") not in _BY_LAYER_TYPE:
        return config
    parameters = config.get("rope_parameters") or {}
    if layer_type in parameters:
        return {**config, "rope_parameters": parameters[layer_type], "rope_scaling": None}
    if layer_type == "sliding_attention":  # the old form
        theta = config.get("rope_local_base_freq", config.get("rope_theta"))
        return {**config, "rope_parameters": None, "rope_scaling": None, "rope_theta": theta}
    return config


def check_rope_type(config: Mapping[str, Any]) -> str:
    """The rope type that a configuration names, for layers without a window where others have another.

    Raises:
        ValueError: it is not implemented, or differs between layers of a family that has one.
    """
    _rope_type(layer_rope(config, "sliding_attention"))
    return _rope_type(layer_rope(config, "full_attention"))


def _rope_type(config: Mapping[str, Any]) -> str:
    settings = _settings(config)
    nested = sorted(name for name, value in settings.items() if isinstance(value, Mapping))
    if nested:
        told = f"rope_parameters must be the same for all layers, got one set for each of {', '.join(nested)}"
        raise ValueError(f"{told}; choose another model")
    kind = settings.get("rope_type", settings.get("type", "default"))
    if config.get("model_type") == "phi3" and kind == "yarn":
        kind = "longrope"  # as transformers reads it there
    if kind not in ROPE_TYPES:
        raise ValueError(f"the rope type must be one of {', '.join(ROPE_TYPES)}, got {kind!r}; choose another model")
    return kind


def longest_sequence(config: Mapping[str, Any]) -> tuple[str, int | None]:
    """The most tokens of a sequence, None if the configuration does not say it, and the name of the field that does.

    The frequencies of longrope and dynamic change beyond that length, for the whole batch: log-probs of a short sequence
    would depend on those beside it, and so on the layout.
    """
    config = layer_rope(config, "full_attention")
    settings = _settings(config)
    if _rope_type(config) == "longrope":
        name = "original_max_position_embeddings"
        return name, config.get(name) or settings.get(name)
    return "max_position_embeddings", config.get("max_position_embeddings")


def read_rope(config: Mapping[str, Any], *, partial: bool = False) -> Rope:
    """Read the rotary embedding out of a Hugging Face configuration, in its old form (rope_theta, rope_scaling) or its new
    one (rope_parameters). The numbers are those of transformers' own functions, for sequences up to ``longest_sequence``.

    Args:
        config: the configuration as a dict, with the family's defaults filled in; of one layer type (``layer_rope``).
        partial: the family has models that rotate only the first channels of each head.

    Raises:
        ValueError: a rope type that is not implemented, one of its numbers is missing, or a partial rotation is impossible.
    """
    settings, kind = _settings(config), _rope_type(config)
    given = {**config, **settings}
    if missing := [name for name in (*_NEEDED[kind], "rope_theta") if given.get(name) is None]:
        told = f"rope type {kind!r} needs {', '.join(missing)}, missing in rope_parameters (or rope_scaling)"
        raise ValueError(f"{told}; add what is missing")
    part, head_dim = given.get("partial_rotary_factor") or 1.0, _head_dim(config)
    if part != 1.0 and not partial:
        raise ValueError(f"partial_rotary_factor must be 1.0, got {part}; choose another model")
    if part > 1.0 or int(head_dim * part) < 2 or int(head_dim * part) % 2:
        told = f"partial_rotary_factor must be at most 1.0 and rotate an even number of the {head_dim} channels of a head"
        raise ValueError(f"{told}, got {part}; choose another model")
    frequencies, attention_factor = _initialised(config, settings, kind)
    return Rope(
        frequencies=tuple(frequencies.tolist()),
        attention_factor=float(attention_factor),
        factor_in_table=attention_factor != 1.0 and int(head_dim * part) < head_dim,
    )


def _head_dim(config: Mapping[str, Any]) -> int:
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def _initialised(config: Mapping[str, Any], settings: Mapping[str, Any], kind: str) -> tuple[Tensor, float]:
    """Frequencies and attention factor, by transformers' function for this rope type."""
    from transformers import PretrainedConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    if kind == "default":  # some versions of transformers have no function for it
        kind, settings = "linear", {**settings, "factor": 1.0}
    described = PretrainedConfig()
    described.hidden_size, described.num_attention_heads = config["hidden_size"], config["num_attention_heads"]
    described.head_dim = _head_dim(config)
    for name in _OF_THE_CONFIG:
        if (value := config.get(name)) is not None:
            setattr(described, name, value)
    described.rope_theta = settings.get("rope_theta", config.get("rope_theta"))
    is_new = hasattr(described, "standardize_rope_params")  # since transformers 5
    parameters = {**settings, "rope_type": kind, "rope_theta": described.rope_theta}
    setattr(described, "rope_parameters" if is_new else "rope_scaling", parameters)
    frequencies, attention_factor = ROPE_INIT_FUNCTIONS[kind](described, torch.device("cpu"))
    return frequencies, attention_factor


def _settings(config: Mapping[str, Any]) -> dict[str, Any]:
    return {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
