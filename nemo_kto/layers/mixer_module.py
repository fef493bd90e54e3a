"""Modules of sequence mixers that megatron-core lacks; the settings of a mixer build its module and compute with it.

Between the two projections of a recurrent mixer each context-parallel rank has all tokens of some heads, because states pass
through all tokens of a sequence (Jacobs et al. 2023, arXiv 2309.14509); otherwise it has some tokens of all heads.

Shape suffixes: s sequence, b batch, t tokens of a rank's share, T tokens of the whole pack, X values of all heads, x those
of a rank's heads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import all_to_all_hp2sp, all_to_all_sp2hp
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group, make_sharded_tensors_for_checkpoint
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from nemo_kto.device import device
from nemo_kto.layers.attention import PackedSequences
from nemo_kto.layers.packing import Prompts, shard_tokens, unshard_tokens


class MixerSettings(Protocol):
    """Settings of a sequence mixer that is a :class:`MixerModule`."""

    def build(self, module: MixerModule, **settings: Any) -> None:
        """Add the layers of the mixer to its module; ``settings`` are those of megatron-core's attention."""

    def mix(self, module: MixerModule, hidden_sbH: Tensor, packed: PackedSequences | None) -> Tensor:
        """Return the output [sequence, batch, hidden]."""


class MixerModule(MegatronModule):
    """A sequence mixer, called like megatron-core's attention."""

    def __init__(self, config: TransformerConfig, layer_number: int, *, mixer: MixerSettings, **settings: Any) -> None:
        super().__init__(config=config)
        self.layer_number, self.mixer = layer_number, mixer
        self._recomputes = config.recompute_granularity == "selective" and "core_attn" in config.recompute_modules
        mixer.build(self, **settings)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        *,
        packed_seq_params: PackedSequences | None = None,
        **_: object,  # those of attention
    ) -> tuple[Tensor, None]:
        """Mix [sequence, batch, hidden], of packed sequences with batch 1. No token takes in values of later ones."""
        return self.mixer.mix(self, hidden_states, packed_seq_params), None

    def attend(self, attention: Callable[..., Tensor], *inputs: object, **options: Any) -> Tensor:
        """Call a function that contains the core attention, with recomputation if the run has it for core attention."""
        if self._recomputes:
            options |= {"use_reentrant": False, "preserve_rng_state": False, "determinism_check": "none"}
            return checkpoint(attention, *inputs, **options)  # type: ignore[no-any-return]
        return attention(*inputs, **options)


class RecurrentSettings(Protocol):
    """Settings of a sequence mixer that is a :class:`RecurrentModule`."""

    def build(self, module: RecurrentModule) -> None:
        """Add the projections and the parameters of the mixer to its module."""

    def mix(self, module: RecurrentModule, projected_TX: Tensor, lengths: tuple[int, ...], prompts: Prompts) -> Tensor:
        """Return the inputs of the output projection for all tokens, [T, columns of this rank].

        Context-parallel ranks divide among them the groups of the tensor-parallel rank.
        """


class RecurrentModule(MegatronModule):
    """A sequence mixer that keeps a state of fixed size instead of the keys and values of all tokens.

    It consists of an input projection, a recurrence over the tokens, and an output projection, and is called like
    megatron-core's attention. A tensor-parallel rank has some of the groups of heads; the rows of its input projection
    stand together group by group. All between the two projections is computed again in the backward pass, so that only the
    projections are kept.
    """

    def __init__(
        self,
        *,
        config: TransformerConfig,
        layer_number: int,
        mixer: RecurrentSettings,
        **_: object,  # those of attention
    ) -> None:
        super().__init__(config=config)
        self.layer_number, self.mixer = layer_number, mixer
        mixer.build(self)

    def add_projections(self, *, groups: int, rows: int, columns: int) -> None:
        """Add the projections.

        Args:
            groups: number of groups of heads on all ranks, with padding.
            rows, columns: rows of the input projection and columns of the output projection for one group.
        """
        config = self.config
        self.groups = groups // config.tensor_model_parallel_size
        linear: dict[str, Any] = {"config": config, "init_method": config.init_method, "bias": False}
        self.linear_in = ColumnParallelLinear(config.hidden_size, groups * rows, gather_output=False, **linear)
        self.linear_out = RowParallelLinear(
            groups * columns, config.hidden_size, input_is_parallel=True, skip_bias_add=True, **linear
        )

    def add_parameter(self, name: str, *shape: int, value: float = 0.0, sharded: bool = True) -> None:
        """Add a parameter with this shape on a rank; the groups are along its first dimension if it is ``sharded``."""
        values = torch.full(shape, value, dtype=self.config.params_dtype, device=device.current_device())
        parameter = torch.nn.Parameter(values)
        if sharded:
            set_tensor_model_parallel_attributes(parameter, True, 0, 1)
        self.register_parameter(name, parameter)

    def own(self, *names: str) -> list[Tensor]:
        """Return the part of sharded parameters that belongs to the heads of this context-parallel rank."""
        size, rank = parallel_state.get_context_parallel_world_size(), parallel_state.get_context_parallel_rank()
        return [getattr(self, name).chunk(size)[rank] for name in names]

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        *,
        packed_seq_params: PackedSequences | None = None,
        **_: object,  # those of attention
    ) -> tuple[Tensor, None]:
        """Mix [sequence, batch, hidden], of packed sequences with batch 1. No token takes in values of later ones."""
        projected_sbX, _bias = self.linear_in(hidden_states)
        sequence, batch = projected_sbX.shape[:2]
        if packed_seq_params is None:
            lengths, prompts = (sequence * self.config.context_parallel_size,) * batch, None
        else:
            lengths, prompts = packed_seq_params.lengths, packed_seq_params.prompts
        projected_tX = projected_sbX.transpose(0, 1).flatten(0, 1)
        inputs = self, _all_tokens(projected_tX, lengths), lengths, prompts
        options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False, "determinism_check": "none"}
        mixed_Tx = checkpoint(self.mixer.mix, *inputs, **options)
        # a copy, because matrix products of views round in other ways
        mixed_sbX = _all_heads(mixed_Tx, lengths).unflatten(0, (batch, sequence)).transpose(0, 1).contiguous()
        return self.linear_out(mixed_sbX)[0], None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> ShardedStateDict:
        """Return the sharded state of the projections and of the other parameters."""
        state: ShardedStateDict = {}
        for name, module in (("linear_in", self.linear_in), ("linear_out", self.linear_out)):
            state |= module.sharded_state_dict(f"{prefix}{name}.", sharded_offsets, metadata)
        own: dict[str, Any] = dict(self.named_parameters(recurse=False))
        return state | make_sharded_tensors_for_checkpoint(
            own,
            prefix,
            {name: 0 for name, parameter in own.items() if getattr(parameter, "tensor_model_parallel", False)},
            sharded_offsets,
            tp_group=parallel_state.get_tensor_model_parallel_group(),
            dp_cp_group=ensure_metadata_has_dp_cp_group(metadata)["dp_cp_group"],
        )


class AttentionBesideRecurrence(SelfAttention):  # type: ignore[misc]
    """megatron-core's attention with a recurrent mixer of the same input; the sum of both, multiplied by two factors."""

    def __init__(self, *args: Any, mixer: RecurrentSettings, factors: tuple[float, float], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.recurrence = RecurrentModule(config=self.config, layer_number=self.layer_number, mixer=mixer)
        self.factors = factors

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        """Mix [sequence, batch, hidden], of packed sequences with batch 1. No token takes in values of later ones."""
        attended, _ = super().forward(hidden_states, *args, **kwargs)
        mixed, _ = self.recurrence(hidden_states, packed_seq_params=kwargs.get("packed_seq_params"))
        return torch.add(attended * self.factors[0], mixed, alpha=self.factors[1]), None


class ReplicatedLinear(MegatronModule):
    """Linear layer without a bias that every tensor-parallel rank has as a whole.

    Its inputs are the same on all ranks, or with sequence parallelism parts of the sequence. In that case the gradient of
    the weight is a partial sum, which megatron-core sums over the ranks.
    """

    bias: Tensor | None = None

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig) -> None:
        super().__init__(config=config)
        self.sequence_parallel = config.sequence_parallel
        self.tp_group = parallel_state.get_tensor_model_parallel_group()
        where = None if config.use_cpu_initialization else device.current_device()
        weight: Any = torch.nn.Parameter(torch.empty(output_size, input_size, dtype=config.params_dtype, device=where))
        config.init_method(weight)
        weight.sequence_parallel = config.sequence_parallel
        self.weight = weight

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return W x, and None in the place of a bias."""
        return F.linear(input_, self.weight), None


def _all_tokens(values_tX: Tensor, lengths: Sequence[int]) -> Tensor:
    """Return all tokens of this rank's heads, [T, x]; ``lengths`` are those of the whole segments. Differentiable."""
    group = parallel_state.get_context_parallel_group()
    if group.size() == 1:
        return values_tX
    return unshard_tokens(all_to_all_sp2hp(values_tX, group=group), lengths, size=group.size())


def _all_heads(values_Tx: Tensor, lengths: Sequence[int]) -> Tensor:
    """Return all heads of this rank's tokens, [t, X]: the inverse of :func:`_all_tokens`. Differentiable."""
    group = parallel_state.get_context_parallel_group()
    if group.size() == 1:
        return values_Tx
    values_tX: Tensor = all_to_all_hp2sp(shard_tokens(values_Tx, lengths, size=group.size()), group=group)
    return values_tX
