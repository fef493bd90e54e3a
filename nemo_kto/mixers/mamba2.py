"""Mamba-2: a short convolution and a selective state space model (Dao & Gu 2024, arXiv 2405.21060).

For each head with the state S [N, P], which starts at zero, and each token with input x [P], step d > 0, and the vectors B
and C [N] of the head's group (equation 2, with a state matrix that is the number -a, a > 0, of the head, section 2.3):

    S <- exp(-a d) S + B (d x)^T,    y = S^T C

Chunks of tokens are evaluated together (section 6). With G the sums of -a d from the start of a chunk and S the state
before it:

    y_i = exp(G_i) S^T C_i + sum_{j <= i} exp(G_i - G_j) (C_i . B_j) d_j x_j

Shape suffixes: t tokens of a pack, c chunks, n sequences of a wave, C tokens of a chunk, g groups of heads with the same B
and C, r heads of a group, N and P sizes of a state and of an input.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from nemo_kto.device import device
from nemo_kto.layers.chunked_scan import CHUNK, causal_convolution, decay_between, divide, scan
from nemo_kto.layers.packing import Prompts
from nemo_kto.mixers.mixer import FP32, LinearLayer, ModelSizes, Saving, SequenceMixer, round_up
from nemo_kto.mixers.param_mapping import HF, MCORE, ParamMapping, Shape, Split
from nemo_kto.utils import lazy_import

if TYPE_CHECKING:
    import torch
    import torch.nn.functional as F
    from megatron.core.transformer.spec_utils import ModuleSpec
    from torch import Tensor

    from nemo_kto.device.kernels import Form
    from nemo_kto.layers.mixer_module import RecurrentModule
else:
    torch, F = lazy_import("torch"), lazy_import("torch.nn.functional")

_NORMED = "Mamba-2 with a norm"
_KERNEL_CHUNK = 128  # tokens of a chunk in the kernel, as in the configurations of Nemotron


@dataclass(frozen=True, kw_only=True)
class Mamba2(SequenceMixer):
    """Selective state space model of convolved inputs, with a gate and, if ``normed``, a norm over each group of its output.

    The heads of a group have the same vectors into and out of the state; tensor parallelism does not divide it.
    """

    kind: ClassVar[str] = "Mamba-2"
    lora_inputs: ClassVar[tuple[str, ...]] = ("in_proj",)
    lora_outputs: ClassVar[tuple[str, ...]] = ("out_proj",)
    deterministic: ClassVar[bool] = False
    padded_with_heads: ClassVar[tuple[str, ...]] = tuple(
        f"self_attention.{name}"
        for name in (
            *("linear_in.weight", "linear_in.lora_b", "linear_in.lora_magnitude"),
            *("linear_out.weight", "linear_out.lora_a", "convolution", "convolution_bias"),
            *("decay_log", "step_bias", "skip", "norm"),
        )
    )

    heads: int
    groups: int
    head_dim: int
    state_dim: int
    kernel: int  # tokens that the convolution combines
    step_limits: tuple[float, ...]  # smallest and largest step
    normed: bool = True
    # factors on gates, inputs, the vectors into and out of the state, and steps, as they are projected; empty: none
    multipliers: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.heads % self.groups:
            raise ValueError(
                "the number of Mamba-2 heads (mamba_num_heads or mamba_n_heads) must be divisible by that of groups "
                f"(n_groups or mamba_n_groups), got {self.heads} and {self.groups}; correct one"
            )
        if len(limits := self.step_limits) != 2 or not limits[0] < limits[1]:
            raise ValueError(f"time_step_limit must be the smallest and the largest step, got {[*limits]}; correct it")

    @property
    def kinds(self) -> tuple[str, ...]:
        return (self.kind, *[_NORMED] * self.normed)

    @property
    def sizes(self) -> dict[str, int]:
        heads = self.heads // self.groups
        inner, state = heads * self.head_dim, self.state_dim
        group = {"inner": inner, "convolved": inner + 2 * state, "in": 2 * inner + 2 * state + heads, "heads": heads}
        whole = {f"mamba_{name}": size * self.groups for name, size in group.items()}
        of_group = {f"mamba_{name}_group": size for name, size in group.items()}
        return {**whole, **of_group, "mamba_groups": self.groups, "mamba_state": state, "mamba_kernel": self.kernel}

    def unsupported_by_te(self, architecture: ModelSizes) -> Mapping[str, bool]:
        return {"Mamba-2": True}

    def products(self, architecture: ModelSizes) -> tuple[int, int]:
        """Return the weights; the state of each head counts as two: to update and to read it."""
        hidden, sizes = architecture.hidden_size, self.sizes
        inputs = hidden * sizes["mamba_in"] + sizes["mamba_convolved"] * self.kernel
        return inputs + 2 * sizes["mamba_inner"] * self.state_dim, hidden * sizes["mamba_inner"]

    def context_values(self, architecture: ModelSizes, ranks: int) -> float:
        """Return the values of the groups of other ranks: inputs, and outputs."""
        of_group = self.sizes["mamba_in_group"] + self.sizes["mamba_inner_group"]
        return self.divided_heads(architecture) * of_group * (ranks - 1) / ranks

    def divided_heads(self, architecture: ModelSizes) -> int:
        return round_up(self.groups, architecture.tensor_parallel) // architecture.tensor_parallel

    def saved_bytes(self, saving: Saving, *, core: bool) -> float:
        return self.bytes_of_projections(saving)

    def backward_bytes(self, saving: Saving) -> float:
        """Return the bytes per token of what is recomputed, all in fp32 and with gradients.

        These are two passes of the convolved values and gates, and for each head three matrices of a chunk's tokens by its
        tokens, five of inputs, and the state at the end of each chunk. For full chunks the peak is a quarter less.
        """
        groups, sizes = self.divided_heads(saving.architecture), self.sizes
        of_head = 3 * CHUNK + 5 * self.head_dim + self.head_dim * self.state_dim / CHUNK
        return 2 * FP32 * groups * (2 * sizes["mamba_in_group"] + sizes["mamba_heads_group"] * of_head)

    def linear_layers(self, saving: Saving) -> tuple[LinearLayer, ...]:
        groups, sizes = self.divided_heads(saving.architecture), self.sizes
        rows, inner = groups * sizes["mamba_in_group"], groups * sizes["mamba_inner_group"]
        return (
            LinearLayer(("in_proj",), saving.hidden, rows, rows),
            LinearLayer(("out_proj",), inner, saving.architecture.hidden_size, saving.hidden),
        )

    def specify(self, layer: ModuleSpec, architecture: ModelSizes, *, use_te: bool, share_prompts: bool) -> None:
        self.specify_recurrent(layer)

    def build(self, module: RecurrentModule) -> None:
        """Add the projections and the parameters.

        The rows of the input projection are, for each group: gates of the outputs, inputs, the vectors into and out of the
        state, steps.
        """
        config, sizes, ranks = module.config, self.sizes, module.config.tensor_model_parallel_size
        inner, convolved, heads = sizes["mamba_inner_group"], sizes["mamba_convolved_group"], sizes["mamba_heads_group"]
        module.add_projections(groups=round_up(self.groups, ranks), rows=sizes["mamba_in_group"], columns=inner)
        sizes_of_heads = {"heads": heads, "head_dim": self.head_dim, "state_dim": self.state_dim}
        module.scan = fastest_scan(config.params_dtype, **sizes_of_heads)
        module.add_parameter("convolution", module.groups * convolved, 1, self.kernel)
        module.add_parameter("convolution_bias", module.groups * convolved)
        for name in ("decay_log", "step_bias", "skip"):
            module.add_parameter(name, module.groups * heads)
        if self.normed:
            module.add_parameter("norm", module.groups * inner, value=1.0)
        if self.multipliers:
            lengths = (inner, inner, self.state_dim, self.state_dim, heads)
            factors = [factor for each, length in zip(self.multipliers, lengths, strict=True) for factor in [each] * length]
            module.register_buffer("factors", torch.tensor(factors, device=device.current_device()), persistent=False)

    def mix(self, module: RecurrentModule, projected_tX: Tensor, lengths: tuple[int, ...], prompts: Prompts) -> Tensor:
        """Return the gated and normalised outputs of all tokens, [t, heads of this rank * size of a head]."""
        sizes = self.sizes
        inner, heads, state = sizes["mamba_inner_group"], sizes["mamba_heads_group"], self.state_dim
        parts = [inner, sizes["mamba_convolved_group"], heads]
        convolution, convolution_bias = module.own("convolution", "convolution_bias")
        projected_tgX = projected_tX.unflatten(-1, (-1, sum(parts)))
        if self.multipliers:
            projected_tgX = (projected_tgX * module.factors).to(projected_tX.dtype)
        gate_tgI, values, step_tgr = projected_tgX.split(parts, -1)
        convolved_tc = causal_convolution(
            values.flatten(1), convolution.squeeze(1), convolution_bias, lengths=lengths, prompts=prompts
        )
        inputs, into_tgN, out_of_tgN = F.silu(convolved_tc).unflatten(-1, (-1, parts[1])).split([inner, state, state], -1)
        input_tgrP = inputs.unflatten(-1, (heads, -1))
        decay_log, step_bias, skip = (each.view(-1, heads) for each in module.own("decay_log", "step_bias", "skip"))
        output_tgrP = module.scan(
            input_tgrP,
            F.softplus(step_tgr.float() + step_bias.float()).clamp(*self.step_limits),
            decay_log.float().exp(),
            into_tgN,
            out_of_tgN,
            lengths=lengths,
            prompts=prompts,
        )
        output_tgI = (output_tgrP + input_tgrP.float() * skip.unsqueeze(-1)).flatten(-2)
        gated_tgI = output_tgI * F.silu(gate_tgI.float())
        if not self.normed:
            return gated_tgI.flatten(1).to(projected_tX.dtype)
        normed_tgI = F.rms_norm(gated_tgI, (inner,), eps=module.config.layernorm_epsilon)
        return (normed_tgI.flatten(1) * module.own("norm")[0]).to(projected_tX.dtype)


def mamba2_weights(block: str, module: str = "self_attention") -> tuple[ParamMapping, ...]:
    """Return the mappings of the weights in layers with Mamba-2.

    Args:
        block, module: names of the mixer in a layer of the file, and in ours.
    """

    def weight(name: str, hf_name: str, shape: Shape, *parts: str, split: Split = Split.GROUPS) -> ParamMapping:
        return ParamMapping(
            mcore_name=f"{MCORE}{module}.{name}",
            hf_names={f"{HF}{block}.{hf_name}": shape},
            split=split,
            mixer=_NORMED if name == "norm" else Mamba2.kind,
            groups="mamba_groups",
            parts=tuple((0, part) for part in parts),
        )

    inner, heads, state = "mamba_inner_group", "mamba_heads_group", "mamba_state"
    convolved = (inner, state, state)
    return (
        weight("linear_in.weight", "in_proj.weight", ("mamba_in", "hidden"), inner, *convolved, heads),
        weight("convolution", "conv1d.weight", ("mamba_convolved", 1, "mamba_kernel"), *convolved),
        weight("convolution_bias", "conv1d.bias", ("mamba_convolved",), *convolved),
        weight("decay_log", "A_log", ("mamba_heads",), heads),
        weight("step_bias", "dt_bias", ("mamba_heads",), heads),
        weight("skip", "D", ("mamba_heads",), heads),
        weight("norm", "norm.weight", ("mamba_inner",), inner),
        weight("linear_out.weight", "out_proj.weight", ("hidden", "mamba_inner"), inner, split=Split.GROUP_COLUMNS),
    )


def state_space_scan(
    input_tgrP: Tensor,
    step_tgr: Tensor,
    rate_gr: Tensor,
    into_tgN: Tensor,
    out_of_tgN: Tensor,
    *,
    lengths: Sequence[int],
    prompts: Prompts = None,
) -> Tensor:
    """Return the outputs of all tokens, [t, g, r, P]; the computation and the result are in fp32, or fp64 for such inputs.

    Args:
        rate_gr: a of each head.
        into_tgN, out_of_tgN: B and C.
        lengths, prompts: segments of the pack, as for ``layers/packing.py``. A segment starts from the state of its
            prompt, which is computed once.
    """
    dtype = torch.promote_types(input_tgrP.dtype, torch.float32)
    chunks = divide(tuple(lengths), prompts)
    step_cgCr = chunks.lay_out(step_tgr, dtype)
    input_cgCrP = chunks.lay_out(input_tgrP, dtype) * step_cgCr.unsqueeze(-1)
    into_cgCN, out_of_cgCN = (chunks.lay_out(each, dtype) for each in (into_tgN, out_of_tgN))
    decay_cgCr = (step_cgCr * -rate_gr.to(dtype).unsqueeze(1)).cumsum(2)

    scores_cgrCC = (out_of_cgCN @ into_cgCN.mT).unsqueeze(2) * decay_between(decay_cgCr.transpose(2, 3))
    within_cgrCP = scores_cgrCC @ input_cgCrP.transpose(2, 3)
    to_end_cgCr = (decay_cgCr[:, :, -1:] - decay_cgCr).exp()
    # the heads of a group are side by side, so that B and C are multiplied by all of them at once
    added_cgNX = into_cgCN.mT @ (input_cgCrP * to_end_cgCr.unsqueeze(-1)).flatten(-2)
    kept_cg1X = decay_cgCr[:, :, -1:].exp().repeat_interleave(input_tgrP.size(-1), dim=-1)

    def step(now: slice, state_ngNX: Tensor) -> tuple[Tensor, Tensor]:
        return out_of_cgCN[now] @ state_ngNX, state_ngNX * kept_cg1X[now] + added_cgNX[now]

    before_cgCX = scan(chunks, added_cgNX.new_zeros(added_cgNX.shape[1:]), step)
    before_cgCrP = before_cgCX.unflatten(-1, input_tgrP.shape[-2:]) * decay_cgCr.exp().unsqueeze(-1)
    return chunks.collect(before_cgCrP + within_cgrCP.transpose(2, 3))


@functools.cache
def fastest_scan(dtype: torch.dtype, *, heads: int, head_dim: int, state_dim: int) -> Form:
    """Return mamba_ssm's kernel if it is installed and agrees with :func:`state_space_scan` on this device, else that.

    The outputs of the kernel are in the dtype of the inputs, except those of answers to a shared prompt.

    Args:
        heads: number of heads of a group.
    """
    from nemo_kto.device.kernels import agreeing, draw_inputs, scan_kernel

    if (kernel := scan_kernel(dtype)) is None:
        return state_space_scan
    values, step, into, out_of = draw_inputs((heads, head_dim), (heads,), (state_dim,), (state_dim,))
    # the last state of a sequence contains most of its tokens
    inputs = [values.to(dtype), F.softplus(step - 4), step[0].exp(), into.to(dtype), out_of.to(dtype)]
    return agreeing(functools.partial(scan_with, kernel), state_space_scan, name="mamba_ssm's kernel", inputs=inputs)


def scan_with(
    kernel: Callable[..., Any],
    input_tgrP: Tensor,
    step_tgr: Tensor,
    rate_gr: Tensor,
    into_tgN: Tensor,
    out_of_tgN: Tensor,
    *,
    lengths: Sequence[int],
    prompts: Prompts = None,
) -> Tensor:
    """Return the outputs of all tokens, [t, g, r, P], by a kernel with the signature of mamba_ssm's scan.

    The kernel returns no gradients of the states at the ends of packed sequences, so it starts all segments from zero. As
    outputs are linear in the state, those that an answer gets from the last state of its prompt are added to the kernel's.
    """
    output_tgrP = kernel(
        input_tgrP.flatten(1, 2).unsqueeze(0),
        step_tgr.float().flatten(1).unsqueeze(0),
        -rate_gr.float().flatten(),
        into_tgN.unsqueeze(0),
        out_of_tgN.unsqueeze(0),
        chunk_size=_KERNEL_CHUNK,
        seq_idx=_sequence_1t(tuple(lengths)),
    )[0].unflatten(1, input_tgrP.shape[1:3])
    if prompts is None:
        return output_tgrP
    decay_tgr = step_tgr.float() * -rate_gr.float()
    added_tgrP = input_tgrP.float() * step_tgr.float().unsqueeze(-1)
    values = (output_tgrP, out_of_tgN, decay_tgr, added_tgrP, into_tgN)
    segments = [*zip(*(each.split([*lengths]) for each in values), strict=True)]
    states = {prompt: _last_state(*segments[prompt][2:]) for prompt in {*prompts} if prompt is not None}
    outputs: list[Tensor] = []
    for (output, out_of, decay, *_), prompt in zip(segments, prompts, strict=True):
        if prompt is not None:
            from_prompt_gtX = out_of.float().transpose(0, 1) @ states[prompt]
            from_prompt_tgrP = from_prompt_gtX.transpose(0, 1).unflatten(-1, output.shape[2:])
            output = output.float() + from_prompt_tgrP * decay.cumsum(0).exp().unsqueeze(-1)
        outputs.append(output)
    return torch.cat(outputs)


@functools.lru_cache(maxsize=32)  # the layers of a model use the same
def _sequence_1t(lengths: tuple[int, ...]) -> Tensor:
    """Return the number of the segment of each token, [1, t], on the device."""
    sequence_t = torch.arange(len(lengths), dtype=torch.int32).repeat_interleave(torch.tensor(lengths))
    (uploaded,) = device.upload([sequence_t.unsqueeze(0)])
    return uploaded  # type: ignore[no-any-return]


def _last_state(decay_tgr: Tensor, added_tgrP: Tensor, into_tgN: Tensor) -> Tensor:
    """Return the state after a segment that starts from zero, [g, N, r * P]."""
    later_tgr = decay_tgr.flip(0).cumsum(0).flip(0) - decay_tgr  # decay between a token and the end
    weighted_tgX = (added_tgrP * later_tgr.exp().unsqueeze(-1)).flatten(2)
    return into_tgN.float().permute(1, 2, 0) @ weighted_tgX.transpose(0, 1)
