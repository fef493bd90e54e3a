"""Gated delta net: a short convolution and the gated delta rule (Yang et al. 2024, arXiv 2412.06464).

The rule is linear attention whose state decays and corrects what it stores. For each head with the state S [K, V], which
starts at zero, and each token with query q and key k of unit length [K], value v [V], decay g <= 0 and strength b in [0, 1]
(equation 10):

    S <- exp(g) S,    S <- S + b k (v - S^T k)^T,    o = S^T q / sqrt(K)

Chunks of tokens are evaluated together. With G the sums of the decays from the start of a chunk, the corrections
d = b (v - S^T k) of its tokens solve the triangular system

    d_i + b_i sum_{j < i} exp(G_i - G_j) (k_i . k_j) d_j = b_i (v_i - exp(G_i) S^T k_i)

which is solved for both terms on the right before the states are known (section 3.3).

Shape suffixes: t tokens of a pack, c chunks, n sequences of a wave, C tokens of a chunk, g groups of heads with the same
query and key, r heads of a group, K and V sizes of a key and a value.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
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

_HF = HF + "linear_attn."
_INPUTS = ("in_proj_qkvz", "in_proj_ba", "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
_EPSILON = 1e-6  # added to the squared lengths of queries and keys


def _weight(name: str, hf_names: dict[str, Shape], split: Split, *parts: tuple[int, str]) -> ParamMapping:
    """Return the mapping of a weight; ``parts`` are those of a key head."""
    names, kind = {_HF + each: shape for each, shape in hf_names.items()}, GatedDeltaNet.kind
    mcore = f"{MCORE}self_attention.{name}"
    return ParamMapping(mcore_name=mcore, hf_names=names, split=split, mixer=kind, groups="delta_keys", parts=parts)


@dataclass(frozen=True, kw_only=True)
class GatedDeltaNet(SequenceMixer):
    """Gated delta rule on convolved queries, keys and values, with a gated norm of its output.

    A key head and the value heads that it serves are a group, which tensor parallelism does not divide.
    """

    kind: ClassVar[str] = "gated delta net"
    lora_inputs: ClassVar[tuple[str, ...]] = _INPUTS
    lora_outputs: ClassVar[tuple[str, ...]] = ("out_proj",)
    deterministic: ClassVar[bool] = False
    padded_with_heads: ClassVar[tuple[str, ...]] = tuple(
        f"self_attention.{name}"
        for name in (
            *("linear_in.weight", "linear_in.lora_b", "linear_in.lora_magnitude"),
            *("linear_out.weight", "linear_out.lora_a", "convolution", "decay_log", "step_bias"),
        )
    )

    key_heads: int
    value_heads: int
    key_dim: int  # of a head
    value_dim: int
    kernel: int  # tokens that the convolution combines

    def __post_init__(self) -> None:
        if self.value_heads % self.key_heads:
            got = f"{self.value_heads} and {self.key_heads}"
            raise ValueError(f"linear_num_value_heads must be divisible by linear_num_key_heads, got {got}; correct one")

    @property
    def values_per_key(self) -> int:
        """Number of value heads of a key head."""
        return self.value_heads // self.key_heads

    @property
    def sizes(self) -> dict[str, int]:
        key, value, heads = self.key_dim, self.value_dim * self.values_per_key, self.values_per_key
        group = {"qkvz": 2 * key + 2 * value, "ba": 2 * heads, "qkv": 2 * key + value, "z": value, "heads": heads}
        whole = {f"delta_{name}": size * self.key_heads for name, size in group.items()}
        of_group = {f"delta_{name}_group": size for name, size in group.items()}
        single = {"keys": self.key_heads, "key": key, "value": self.value_dim, "kernel": self.kernel}
        return {**whole, **of_group, **{f"delta_{name}": size for name, size in single.items()}}

    def unsupported_by_te(self, architecture: ModelSizes) -> Mapping[str, bool]:
        return {"gated delta nets": True}

    def products(self, architecture: ModelSizes) -> tuple[int, int]:
        """Return the weights; the state of each value head counts as three: to correct, to update and to read it."""
        sizes = self.sizes
        inputs = architecture.hidden_size * (sizes["delta_qkvz"] + sizes["delta_ba"]) + sizes["delta_qkv"] * self.kernel
        return inputs + 3 * self.value_heads * self.key_dim * self.value_dim, architecture.hidden_size * sizes["delta_z"]

    def context_values(self, architecture: ModelSizes, ranks: int) -> float:
        """Return the values of the heads of other ranks: the inputs of the convolution and the gates, and the outputs."""
        of_head = self.sizes["delta_qkvz_group"] + self.sizes["delta_ba_group"] + self.sizes["delta_z_group"]
        return self.divided_heads(architecture) * of_head * (ranks - 1) / ranks

    def divided_heads(self, architecture: ModelSizes) -> int:
        return round_up(self.key_heads, architecture.tensor_parallel) // architecture.tensor_parallel

    def saved_bytes(self, saving: Saving, *, core: bool) -> float:
        return self.bytes_of_projections(saving)

    def backward_bytes(self, saving: Saving) -> float:
        """Return the bytes per token of what is recomputed, all in fp32 and with gradients.

        These are two passes of convolved values and gates, and for each value head five matrices of a chunk's tokens by its
        tokens, four of vectors, and the state at the end of each chunk. For full chunks the peak is a quarter less.
        """
        heads = self.divided_heads(saving.architecture)
        of_head = 5 * CHUNK + 4 * (self.key_dim + self.value_dim) + self.key_dim * self.value_dim / CHUNK
        return 2 * FP32 * heads * (2 * self.sizes["delta_qkvz_group"] + self.values_per_key * of_head)

    def linear_layers(self, saving: Saving) -> tuple[LinearLayer, ...]:
        heads, sizes = self.divided_heads(saving.architecture), self.sizes
        fused, value = heads * (sizes["delta_qkvz_group"] + sizes["delta_ba_group"]), heads * sizes["delta_z_group"]
        names = [hf_name for each in saving.architecture.family.mappings for hf_name in each.hf_names]
        inputs = tuple(name for name in _INPUTS if f"{_HF}{name}.weight" in names)
        return (
            LinearLayer(inputs, saving.hidden, fused, fused),
            LinearLayer(("out_proj",), value, saving.architecture.hidden_size, saving.hidden),
        )

    def specify(self, layer: ModuleSpec, architecture: ModelSizes, *, use_te: bool, share_prompts: bool) -> None:
        self.specify_recurrent(layer)

    def build(self, module: RecurrentModule) -> None:
        """Add the projections and the parameters.

        A group is a key head with its value heads. The rows of its input projection are: query, key, values, gates of the
        outputs, strengths, decays.
        """
        config, sizes, ranks = module.config, self.sizes, module.config.tensor_model_parallel_size
        rows = sizes["delta_qkvz_group"] + sizes["delta_ba_group"]
        module.add_projections(groups=round_up(self.key_heads, ranks), rows=rows, columns=sizes["delta_z_group"])
        sizes_of_heads = {"key_dim": self.key_dim, "value_dim": self.value_dim, "values_per_key": self.values_per_key}
        module.delta_rule = fastest_delta_rule(config.params_dtype, **sizes_of_heads)
        module.add_parameter("convolution", module.groups * sizes["delta_qkv_group"], 1, self.kernel)
        for name in ("decay_log", "step_bias"):
            module.add_parameter(name, module.groups * self.values_per_key)
        module.add_parameter("norm", self.value_dim, value=1.0, sharded=False)

    def mix(self, module: RecurrentModule, projected_tX: Tensor, lengths: tuple[int, ...], prompts: Prompts) -> Tensor:
        """Return the gated and normalised outputs of all tokens, [t, heads of this rank * size of a value]."""
        from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region

        sizes, dtype = self.sizes, projected_tX.dtype
        heads = sizes["delta_heads_group"]
        parts = [sizes["delta_qkv_group"], sizes["delta_z_group"], heads, heads]
        convolution, decay_log, step_bias = module.own("convolution", "decay_log", "step_bias")
        qkv, gate, strength_tgr, step_tgr = projected_tX.unflatten(-1, (-1, sum(parts))).split(parts, -1)
        convolved_tc = causal_convolution(qkv.flatten(1), convolution.squeeze(1), lengths=lengths, prompts=prompts)
        widths = [self.key_dim, self.key_dim, sizes["delta_z_group"]]
        query_tgK, key_tgK, value = F.silu(convolved_tc).unflatten(-1, (-1, parts[0])).split(widths, -1)
        rate_gr, bias_gr = (each.float().view(-1, heads) for each in (decay_log.float().exp(), step_bias))
        output_tgrV = module.delta_rule(
            query_tgK,
            key_tgK,
            value.unflatten(-1, (heads, -1)),
            -rate_gr * F.softplus(step_tgr.float() + bias_gr),
            strength_tgr.sigmoid(),
            lengths=lengths,
            prompts=prompts,
        )
        # the gradient of the norm's weight is summed over the ranks, which have different heads
        weight_V = copy_to_tensor_model_parallel_region(module.norm)
        output_tgrV = output_tgrV.to(dtype).float()  # the rounding of transformers
        normed = F.rms_norm(output_tgrV, output_tgrV.shape[-1:], eps=module.config.layernorm_epsilon).to(dtype)
        gated = (weight_V * normed) * F.silu(gate.unflatten(-1, (heads, -1)).float())
        return gated.to(dtype).flatten(1)


_OTHERS = (
    _weight(
        "convolution",
        {"conv1d.weight": ("delta_qkv", 1, "delta_kernel")},
        Split.GROUPS,
        *((0, "delta_key"), (0, "delta_key"), (0, "delta_z_group")),
    ),
    _weight("decay_log", {"A_log": ("delta_heads",)}, Split.GROUPS, (0, "delta_heads_group")),
    _weight("step_bias", {"dt_bias": ("delta_heads",)}, Split.GROUPS, (0, "delta_heads_group")),
    _weight("norm", {"norm.weight": ("delta_value",)}, Split.REPLICATED),
    _weight("linear_out.weight", {"out_proj.weight": ("hidden", "delta_z")}, Split.GROUP_COLUMNS, (0, "delta_z_group")),
)
# for files in which the rows of a key head and its value heads stand together, with queries, keys, values and gates, then
# strengths and decays
BY_HEAD = (
    _weight(
        "linear_in.weight",
        {"in_proj_qkvz.weight": ("delta_qkvz", "hidden"), "in_proj_ba.weight": ("delta_ba", "hidden")},
        Split.GROUPS,
        *((0, "delta_qkvz_group"), (1, "delta_ba_group")),
    ),
    *_OTHERS,
)
# for files in which all queries stand before all keys, and so on
BY_KIND = (
    _weight(
        "linear_in.weight",
        {
            "in_proj_qkv.weight": ("delta_qkv", "hidden"),
            "in_proj_z.weight": ("delta_z", "hidden"),
            "in_proj_b.weight": ("delta_heads", "hidden"),
            "in_proj_a.weight": ("delta_heads", "hidden"),
        },
        Split.GROUPS,
        *((0, "delta_key"), (0, "delta_key"), (0, "delta_z_group"), (1, "delta_z_group")),
        *((2, "delta_heads_group"), (3, "delta_heads_group")),
    ),
    *_OTHERS,
)


def gated_delta_rule(
    query_tgK: Tensor,
    key_tgK: Tensor,
    value_tgrV: Tensor,
    decay_tgr: Tensor,
    strength_tgr: Tensor,
    *,
    lengths: Sequence[int],
    prompts: Prompts = None,
) -> Tensor:
    """Return the outputs of all tokens, [t, g, r, V]; the computation and the result are in fp32, or fp64 for such inputs.

    Args:
        query_tgK, key_tgK: of any length; they are divided by it.
        lengths, prompts: segments of the pack, as for ``layers/packing.py``. A segment starts from the state of its
            prompt, which is computed once.
    """
    dtype = torch.promote_types(query_tgK.dtype, torch.float32)
    chunks = divide(tuple(lengths), prompts)

    query_cg1CK, key_cg1CK = (chunks.lay_out(_unit(x.to(dtype)), dtype).unsqueeze(2) for x in (query_tgK, key_tgK))
    value_cgrCV = chunks.lay_out(value_tgrV, dtype).transpose(2, 3)
    strength_cgrC1 = chunks.lay_out(strength_tgr, dtype).transpose(2, 3).unsqueeze(-1)
    decay_cgrC = chunks.lay_out(decay_tgr, dtype).transpose(2, 3).cumsum(-1)
    query_cg1CK = query_cg1CK * query_tgK.size(-1) ** -0.5

    between_cgrCC = decay_between(decay_cgrC)
    from_start_cgrC1 = decay_cgrC.exp().unsqueeze(-1)
    to_end_cgrC1 = (decay_cgrC[..., -1:] - decay_cgrC).exp().unsqueeze(-1)
    # solve_triangular takes the diagonal for 1 and ignores what is above it
    system_cgrCC = key_cg1CK @ key_cg1CK.mT * between_cgrCC * strength_cgrC1
    right_cgrCX = torch.cat((value_cgrCV, key_cg1CK * from_start_cgrC1), -1) * strength_cgrC1
    solved_cgrCX = torch.linalg.solve_triangular(system_cgrCC, right_cgrCX, upper=False, unitriangular=True)
    solved_cgrCV, seen_cgrCK = solved_cgrCX.split([value_tgrV.size(-1), key_tgK.size(-1)], -1)
    scores_cgrCC = query_cg1CK @ key_cg1CK.mT * between_cgrCC
    query_cgrCK, key_cgrKC = query_cg1CK * from_start_cgrC1, (key_cg1CK * to_end_cgrC1).mT
    decay_cgr11 = from_start_cgrC1[..., -1:, :]

    def step(now: slice, state_ngrKV: Tensor) -> tuple[Tensor, Tensor]:
        correction = solved_cgrCV[now] - seen_cgrCK[now] @ state_ngrKV
        output = query_cgrCK[now] @ state_ngrKV + scores_cgrCC[now] @ correction
        return output, state_ngrKV * decay_cgr11[now] + key_cgrKC[now] @ correction

    start = key_cgrKC.new_zeros(*key_cgrKC.shape[1:4], value_tgrV.size(-1))
    return chunks.collect(scan(chunks, start, step).transpose(2, 3))


def _unit(vectors: Tensor) -> Tensor:
    """Divide vectors by their length over the last dimension."""
    return vectors * (vectors.square().sum(-1, keepdim=True) + _EPSILON).rsqrt()


@functools.cache
def fastest_delta_rule(dtype: torch.dtype, *, key_dim: int, value_dim: int, values_per_key: int) -> Form:
    """Return fla's kernel if it is installed and agrees with :func:`gated_delta_rule` on this device, else that function.

    The outputs of the kernel are in the dtype of the values.
    """
    from nemo_kto.device.kernels import agreeing, delta_rule_kernel, draw_inputs

    if (kernel := delta_rule_kernel(dtype)) is None:
        return gated_delta_rule
    shapes = [(key_dim,), (key_dim,), (values_per_key, value_dim), (values_per_key,), (values_per_key,)]
    query, key, value, decay, strength = draw_inputs(*shapes)
    inputs = [each.to(dtype) for each in (query, key, value, -0.1 * decay.square(), strength.sigmoid())]
    return agreeing(functools.partial(delta_rule_with, kernel), gated_delta_rule, name="fla's kernel", inputs=inputs)


def delta_rule_with(
    kernel: Callable[..., Any],
    query_tgK: Tensor,
    key_tgK: Tensor,
    value_tgrV: Tensor,
    decay_tgr: Tensor,
    strength_tgr: Tensor,
    *,
    lengths: Sequence[int],
    prompts: Prompts = None,
) -> Tensor:
    """Return the outputs of all tokens, [t, g, r, V], by a kernel with the signature of fla's ``chunk_gated_delta_rule``.

    Sequences are computed first, then the segments that continue one of them, from its last state.
    """
    heads = [query_tgK, key_tgK, value_tgrV.flatten(1, 2), decay_tgr.float().flatten(1), strength_tgr.flatten(1)]
    parts = [each.split([*lengths]) for each in heads]
    before = [None] * len(lengths) if prompts is None else [*prompts]
    roots = [number for number, prompt in enumerate(before) if prompt is None]
    others = [(number, prompt) for number, prompt in enumerate(before) if prompt is not None]

    def compute(members: Sequence[int], states: Tensor | None) -> tuple[Tensor, Tensor]:
        inputs = (torch.cat([segments[number] for number in members]).unsqueeze(0) for segments in parts)
        outputs, finals = kernel(
            *inputs,
            initial_state=states,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
            **_boundaries(kernel, tuple(lengths[number] for number in members)),
        )
        return outputs[0], finals

    outputs, finals = compute(roots, None)
    found = dict(zip(roots, outputs.split([lengths[number] for number in roots]), strict=True))
    if others:
        members = [number for number, _ in others]
        outputs, _ = compute(members, finals.index_select(0, _on_device(tuple(roots.index(prompt) for _, prompt in others))))
        found |= zip(members, outputs.split([lengths[number] for number in members]), strict=True)
    return torch.cat([found[number] for number in range(len(lengths))]).unflatten(1, value_tgrV.shape[1:3])


@functools.lru_cache(maxsize=32)
def _boundaries(kernel: Callable[..., Any], lengths: tuple[int, ...]) -> dict[str, Tensor]:
    """Return the arguments of ``kernel`` that say where sequences begin and end, the same tensors for all layers.

    fla finds the chunks of the sequences again for each new tensor (fla/ops/utils/index.py): on the host if it gets a copy
    there, for which older releases have no argument, otherwise the host waits for the device.
    """
    boundaries = 0, *accumulate(lengths)
    arguments = {"cu_seqlens": _on_device(boundaries)}
    if "cu_seqlens_cpu" in inspect.signature(kernel).parameters:
        arguments["cu_seqlens_cpu"] = torch.tensor(boundaries)
    return arguments


@functools.lru_cache(maxsize=64)
def _on_device(numbers: tuple[int, ...]) -> Tensor:
    """Return ``numbers`` as a tensor on the device, the same for all layers."""
    (uploaded,) = device.upload([torch.tensor(numbers)])
    return uploaded  # type: ignore[no-any-return]
