"""MLPs and mixtures of experts: activations, biases, routers, load-balancing loss."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region
from megatron.core.tensor_parallel.layers import RowParallelLinear
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_model_config
from torch import Tensor

from nemo_kto.device import device
from nemo_kto.layers.layer_settings import Experts
from nemo_kto.layers.norm import TorchNorm, unit_norm

_XIELU_EPSILON = -1e-6


class SwiGLU(MegatronModule):
    """SwiGLU, silu(gate) * up; megatron-core's own saves silu(gate), writes one more tensor and concatenates gradients."""

    is_gelu = False

    def forward(self, gate_and_up: Tensor) -> Tensor:
        """Map [..., 2 * f], the gate first, to [..., f]."""
        activated: Tensor = _Gated.apply(gate_and_up, self.is_gelu)  # type: ignore[no-untyped-call]
        return activated


class ScaledSwiGLU(SwiGLU):
    """SwiGLU of scaled projections, silu(a gate) * b up."""

    def __init__(self, *, config: TransformerConfig, gate: float, up: float) -> None:
        super().__init__(config)
        self.factors = gate, up

    def forward(self, gate_and_up: Tensor) -> Tensor:
        """Map [..., 2 * f], the gate first, to [..., f]; the input is overwritten."""
        width = gate_and_up.size(-1) // 2
        for number, factor in enumerate(self.factors):
            gate_and_up.narrow(-1, number * width, width).mul_(factor)
        return super().forward(gate_and_up)


class GeGLU(SwiGLU):
    """GeGLU activation, gelu(gate) * up, with gelu(x) = x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))."""

    is_gelu = True


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_and_up: Tensor, is_gelu: bool) -> Tensor:
        ctx.save_for_backward(gate_and_up)
        ctx.is_gelu = is_gelu
        gate, up = gate_and_up.chunk(2, dim=-1)
        return _activate(gate, is_gelu).mul_(up)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (gate_and_up,) = ctx.saved_tensors
        gate, up = gate_and_up.chunk(2, dim=-1)
        both_grads = torch.empty_like(gate_and_up)
        gate_grad, up_grad = both_grads.chunk(2, dim=-1)
        activated = _activate(gate, ctx.is_gelu)
        torch.mul(grads[0], activated, out=up_grad)
        torch.mul(grads[0], up, out=activated)  # now holds the gradient of the activated gate
        if ctx.is_gelu:
            torch.ops.aten.gelu_backward.grad_input(activated, gate, approximate="tanh", grad_input=gate_grad)
        else:
            torch.ops.aten.silu_backward.grad_input(activated, gate, grad_input=gate_grad)
        return both_grads, None


def _activate(gate: Tensor, is_gelu: bool) -> Tensor:
    return F.gelu(gate, approximate="tanh") if is_gelu else F.silu(gate)


class SquaredReLU(MegatronModule):
    """relu(x)^2, without a gate (So et al. 2021, arXiv 2109.08668)."""

    def forward(self, values: Tensor) -> Tensor:
        return F.relu(values).square()


class XIELU(MegatronModule):
    """xIELU (arXiv 2411.13010, section 4): a x^2 + x / 2 for x > 0, else c (exp(min(x, -1e-6)) - 1 - x) + x / 2.

    a = softplus(alpha_p) and c = 1 / 2 + softplus(alpha_n) are trained.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        for name in ("alpha_p", "alpha_n"):
            zero = torch.zeros(1, dtype=config.params_dtype, device=device.current_device())
            self.register_parameter(name, torch.nn.Parameter(zero))

    def forward(self, values: Tensor) -> Tensor:
        # each tensor-parallel rank has some columns, over which the gradients of both numbers are sums
        a, b = (F.softplus(copy_to_tensor_model_parallel_region(each)) for each in (self.alpha_p, self.alpha_n))
        activated: Tensor = _XIELU.apply(values, a, 0.5 + b)  # type: ignore[no-untyped-call]
        return activated


class _XIELU(torch.autograd.Function):
    """Saves its input only."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, a: Tensor, c: Tensor) -> Tensor:
        ctx.save_for_backward(values, a, c)
        negative = (torch.expm1(values.clamp(max=_XIELU_EPSILON)) - values) * c
        return torch.where(values > 0, a * values * values, negative).add_(values, alpha=0.5)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        values, a, c = ctx.saved_tensors
        grad, positive = grads[0], values > 0
        exponential = torch.expm1(values.clamp(max=_XIELU_EPSILON))
        a_grad = (grad * values * values).masked_fill_(~positive, 0).sum(dtype=torch.float32)
        c_grad = (grad * (exponential - values)).masked_fill_(positive, 0).sum(dtype=torch.float32)
        slope = torch.where(values < _XIELU_EPSILON, exponential, -1.0) * c
        slope = torch.where(positive, 2 * a * values, slope).add_(0.5)
        return slope.mul_(grad), a_grad.to(a.dtype).view(1), c_grad.to(c.dtype).view(1)


class ClampedSwiGLU(MegatronModule):
    """Clamped SwiGLU (arXiv 2508.10925): g sigmoid(alpha g) (u + 1), g = min(gate, limit), u = clamp(up, -limit, limit)."""

    def __init__(self, config: TransformerConfig, *, alpha: float, limit: float) -> None:
        super().__init__(config)
        self.alpha, self.limit = alpha, limit

    def forward(self, gate_and_up: Tensor) -> Tensor:
        """Map [..., 2 * f], the gate first, to [..., f]."""
        activated: Tensor = _ClampedGated.apply(gate_and_up, self.alpha, self.limit)  # type: ignore[no-untyped-call]
        return activated


class _ClampedGated(torch.autograd.Function):
    """With s = sigmoid(alpha g): dg = s (1 + alpha g (1 - s)) (u + 1), du = g s; each is 0 where its input was clamped."""

    @staticmethod
    def forward(ctx: Any, gate_and_up: Tensor, alpha: float, limit: float) -> Tensor:
        ctx.save_for_backward(gate_and_up)
        ctx.alpha, ctx.limit = alpha, limit
        gate, up = gate_and_up.chunk(2, dim=-1)
        gate = gate.clamp(max=limit)
        return torch.sigmoid(gate * alpha).mul_(gate).mul_(up.clamp(-limit, limit).add_(1))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (gate_and_up,) = ctx.saved_tensors
        alpha, limit = ctx.alpha, ctx.limit
        gate, up = gate_and_up.chunk(2, dim=-1)
        both_grads = torch.empty_like(gate_and_up)
        gate_grad, up_grad = both_grads.chunk(2, dim=-1)
        clamped = gate.clamp(max=limit)
        sigmoid = torch.sigmoid(clamped * alpha)
        torch.mul(grads[0], clamped, out=up_grad).mul_(sigmoid).masked_fill_(up.abs() > limit, 0.0)
        torch.mul(grads[0], up.clamp(-limit, limit).add_(1), out=gate_grad).mul_(sigmoid)
        slope = clamped.mul_(alpha).mul_(1 - sigmoid).add_(1)
        gate_grad.mul_(slope).masked_fill_(gate > limit, 0.0)
        return both_grads, None, None


def with_bias(linear: type) -> type:
    """Return a subclass of a linear layer with a bias; megatron-core's option adds one to attention output and MLP alike."""

    class LinearWithBias(linear):  # type: ignore[misc, valid-type]
        def __init__(self, *args: object, **kwargs: object) -> None:
            super().__init__(*args, **{**kwargs, "bias": True})

    return LinearWithBias


class BiasedExpertOutput(RowParallelLinear):
    """Down projection of an expert, y = W x + b, with b replicated and W sharded by columns.

    The outputs of the n ranks that share the expert are summed, so each rank adds b / n. The tokens of the expert are the
    same on all these ranks, and so is the gradient of b.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "bias": True})
        # Outputs are summed, if at all, where tokens return to their ranks. Without this flag the output would go through a
        # reduction over one rank, which returns a view, and megatron-core's MLP adds the bias in place.
        self.explicit_expert_comm = True
        bias: Any = self.bias
        bias.sequence_parallel = False  # the inputs of an expert are not sharded along the sequence
        # In the gradient norm the bias counts once, on the first of the ranks that share the expert.
        bias.tensor_model_parallel, bias.shared = True, self.tp_group.rank() > 0

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output without the bias, and this rank's part of the bias."""
        output, bias = super().forward(input_)
        part: Tensor = _BiasShare.apply(bias, self.tp_group.size())  # type: ignore[no-untyped-call]
        return output, part


class _BiasShare(torch.autograd.Function):
    """b / n on each of n ranks; the gradient of b is that of the sum over the ranks."""

    @staticmethod
    def forward(ctx: Any, bias_H: Tensor, ranks: int) -> Tensor:
        return bias_H / ranks

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class BalancedRouter(TopKRouter):
    """megatron-core's router, with a load-balancing loss and statistics of the expert choices in training."""

    # Weight of the loss of each sequence in the objective; the schedule divides by the number of examples.
    loss_weight: float = 0.0
    # Statistics accumulated since it was last set to None: the sum of the losses, the number of sequences, and how often
    # each expert was chosen; [2 + E], the same on all ranks that share a sequence.
    balance: Tensor | None = None

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Choose experts for the logits [s, b, E]; in training, add the load-balancing loss.

        ``padding_mask`` is not a padding mask, but the owners of the tokens: [s, b, n], True if a token counts for a
        sequence. None for no loss.
        """
        probs, chosen = self._choose(logits.flatten(0, 1))
        # not in the first forward pass of layers that are recomputed, which runs without gradient
        if padding_mask is not None and self.training and torch.is_grad_enabled():
            owners_Tn = padding_mask.flatten(0, 1).float()
            losses_n = self._balance_losses(logits.flatten(0, 1), chosen.view(-1, self.num_experts), owners_Tn)
            if self.loss_weight:
                probs = MoEAuxLossAutoScaler.apply(probs, self.loss_weight * losses_n.sum())
        return probs, chosen

    def _choose(self, logits_TE: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weight of each expert for each token, and whether it is chosen, [T, E], as megatron-core does."""
        scored_TE = logits_TE
        if self.score_function == "sigmoid":
            # keeps only the largest logits: megatron-core would compare sigmoids, which in fp32 are 1 for all large ones
            largest = logits_TE.topk(self.topk, dim=-1)
            scored_TE = torch.full_like(logits_TE, -torch.inf).scatter(-1, largest.indices, largest.values)
        weights_TE, chosen_TE = super().routing(scored_TE.unsqueeze(1))
        return weights_TE, chosen_TE

    def _scores(self, logits_TE: Tensor) -> Tensor:
        """Return the scores of the experts, [T, E] in fp32; those of a token sum to 1 unless they are sigmoids."""
        return torch.softmax(logits_TE, dim=-1, dtype=torch.float32)

    def _shares(self, logits_TE: Tensor) -> Tensor:
        """Return the scores divided by their sum."""
        return self._scores(logits_TE)

    def _balance_losses(self, logits_TE: Tensor, chosen_TE: Tensor, owners_Tn: Tensor) -> Tensor:
        """Return the loss of each sequence, [n], or this rank's part of it, and record statistics in ``balance``."""
        probs_nE = owners_Tn.T @ self._shares(logits_TE)
        chosen_nE = owners_Tn.T @ chosen_TE.float()
        whole = torch.stack([chosen_nE, probs_nE.detach()])
        if self.tp_cp_group.size() > 1:
            torch.distributed.all_reduce(whole, group=self.tp_cp_group)
        tokens_n = whole[0].sum(dim=-1) / self.topk
        scale_n = self.num_experts / (self.topk * tokens_n.clamp(min=1).square())
        values = [(scale_n * (whole[0] * whole[1]).sum(dim=-1)).sum(), (tokens_n > 0).sum()]
        statistics = torch.cat([torch.stack([value.double() for value in values]), whole[0].double().sum(dim=0)])
        self.balance = statistics if self.balance is None else self.balance + statistics
        return scale_n * (whole[0] * probs_nE).sum(dim=-1)


class CorrectedRouter(BalancedRouter):
    """Router that chooses experts by corrected scores, also in groups, and weighs them by the scores themselves.

    The correction bias, if there is one, balances the experts without a loss (Wang et al. 2024, arXiv 2408.15664). It is
    never trained: both policy and reference have that of the model.
    """

    def __init__(self, *args: Any, experts: Experts, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.experts = experts
        self.correction_bias: torch.nn.Parameter | None = None
        if experts.correction:
            zeros = torch.zeros(experts.correction, dtype=torch.float32, device=device.current_device())
            self.correction_bias = torch.nn.Parameter(zeros, requires_grad=False)

    def _choose(self, logits_TE: Tensor) -> tuple[Tensor, Tensor]:
        scores_TE, experts = self._scores(logits_TE), self.experts
        corrected_TE = scores_TE.detach()
        if self.correction_bias is not None:
            corrected_TE = corrected_TE + self.correction_bias
        if experts.groups > 1:
            corrected_Tgn = corrected_TE.unflatten(-1, (experts.groups, -1))
            best_Tg = corrected_Tgn.topk(experts.best_of_group, dim=-1).values.sum(dim=-1)
            best_Tg = best_Tg.topk(experts.chosen_groups, dim=-1).indices
            allowed_Tg1 = torch.zeros_like(corrected_Tgn[..., 0], dtype=torch.bool).scatter(-1, best_Tg, True).unsqueeze(-1)
            corrected_TE = corrected_Tgn.masked_fill(~allowed_Tg1, -torch.inf).flatten(-2)
        chosen_Tk = corrected_TE.topk(self.topk, dim=-1).indices
        weights_Tk = scores_TE.gather(-1, chosen_Tk)
        if experts.normalized:
            sum_T1 = weights_Tk.sum(dim=-1, keepdim=True).clamp(min=experts.least_sum)
            weights_Tk = weights_Tk / (sum_T1 + experts.added_sum)
        weights_TE = torch.zeros_like(scores_TE).scatter(-1, chosen_Tk, weights_Tk * experts.scale)
        return weights_TE, torch.zeros_like(scores_TE, dtype=torch.bool).scatter(-1, chosen_Tk, True)

    def _scores(self, logits_TE: Tensor) -> Tensor:
        return torch.sigmoid(logits_TE.float()) if self.experts.sigmoid else super()._scores(logits_TE)

    def _shares(self, logits_TE: Tensor) -> Tensor:
        scores_TE = self._scores(logits_TE)
        return scores_TE / scores_TE.sum(dim=-1, keepdim=True)


class BiasedRouter(BalancedRouter):
    """Router with a learned bias on the logit of each expert, added in fp32.

    megatron-core has one only if all linear layers have one, and lets Transformer Engine add it in the dtype of the model.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        zeros = torch.zeros(self.num_experts, dtype=self.config.params_dtype, device=device.current_device())
        bias: Any = torch.nn.Parameter(zeros)
        bias.sequence_parallel = self.config.sequence_parallel  # its gradient is a partial sum, like that of the weight
        self.logit_bias = bias

    def gating(self, input: Tensor) -> Tensor:
        """Return the logits [..., E] for hidden states [..., H]."""
        logits: Tensor = super().gating(input) + self.logit_bias
        return logits


class NormedRouter(BalancedRouter):
    """Router of Gemma 4: its input is normalised and scaled by a vector, the weights of experts by a number for each."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for name, size in {"scale": self.config.hidden_size, "per_expert_scale": self.num_experts}.items():
            ones = torch.ones(size, dtype=self.config.params_dtype, device=device.current_device())
            parameter: Any = torch.nn.Parameter(ones)
            parameter.sequence_parallel = self.config.sequence_parallel  # its gradient is a partial sum
            self.register_parameter(name, parameter)

    def gating(self, input: Tensor) -> Tensor:
        """Return the logits [..., E] for hidden states [..., H]."""
        normed = unit_norm(input, self.config.layernorm_epsilon) * self.scale * self.config.hidden_size**-0.5
        logits: Tensor = super().gating(normed)
        return logits

    def _choose(self, logits_TE: Tensor) -> tuple[Tensor, Tensor]:
        weights_TE, chosen_TE = super()._choose(logits_TE)
        return weights_TE * self.per_expert_scale, chosen_TE


def normed_experts(submodules: Any) -> type:
    """Return the class of experts and a shared expert with norms before and after each, made of these submodules."""

    class NormedExperts(MoELayer):  # type: ignore[misc]
        """norm(experts(norm(x))) + norm(shared(norm(x)))."""

        def __init__(self, *, config: TransformerConfig, **kwargs: Any) -> None:
            super().__init__(config, submodules, **kwargs)
            for name in ("pre_shared", "post_shared", "pre_experts", "post_experts"):
                norm = TorchNorm(config, config.hidden_size, eps=config.layernorm_epsilon)
                self.add_module(f"{name}_layernorm", norm)

        def shared_experts_compute(self, hidden_states: Tensor) -> Tensor:
            output = super().shared_experts_compute(self.pre_shared_layernorm(hidden_states))
            return self.post_shared_layernorm(output)  # type: ignore[no-any-return]

        def preprocess(self, hidden_states: Tensor, *routing: Tensor) -> tuple[Tensor, Tensor]:
            return super().preprocess(self.pre_experts_layernorm(hidden_states), *routing)  # type: ignore[no-any-return]

        def postprocess(self, output: Tensor, shared_expert_output: Tensor) -> Tensor:
            return self.post_experts_layernorm(super().postprocess(output, None)) + shared_expert_output  # type: ignore[no-any-return]

    return NormedExperts


def experts_span_copies(config: TransformerConfig) -> bool:
    """Return whether the experts of a layer are sharded across several data-parallel replicas of the other layers."""
    if config.num_moe_experts is None:
        return False
    shards = config.expert_tensor_parallel_size
    return bool(config.tensor_model_parallel_size % (config.expert_model_parallel_size * shards))


def routers(chunks: Iterable[torch.nn.Module]) -> Iterator[BalancedRouter]:
    """Yield the routers of a model; a dense model has none."""
    for chunk in chunks:
        yield from (module for module in chunk.modules() if isinstance(module, BalancedRouter))


def balance_sums(chunks: Sequence[torch.nn.Module]) -> dict[str, float]:
    """Return the statistics of the routers of all ranks, identical on every rank; empty for a dense model. Collective.

    ``moe_aux_loss_sum`` and ``moe_aux_losses`` are the sum and the number of the losses over sequences and layers;
    ``moe_largest_share_sum`` and ``moe_smallest_share_sum`` the largest and the smallest fraction of a layer's choices that
    fell on one expert, over all layers; ``moe_batches`` is 1, the number of batches that these two are sums over.
    """
    config = get_model_config(chunks[0])
    if config.num_moe_experts is None:
        return {}
    shape = (config.num_layers, 2 + config.num_moe_experts)
    statistics = torch.zeros(shape, dtype=torch.float64, device=device.current_device())
    for router in routers(chunks):
        if router.balance is not None:
            statistics[router.layer_number - 1] = router.balance
    torch.distributed.all_reduce(statistics, group=parallel_state.get_data_parallel_group())
    torch.distributed.all_reduce(statistics, group=parallel_state.get_pipeline_model_parallel_group())
    statistics = statistics.cpu()
    statistics = statistics[statistics[:, 1] > 0]  # keeps the layers with experts, if any sequence counts
    if not len(statistics):
        return {}
    shares = statistics[:, 2:] / statistics[:, 2:].sum(dim=1, keepdim=True)
    return {
        "moe_aux_loss_sum": float(statistics[:, 0].sum()),
        "moe_aux_losses": float(statistics[:, 1].sum()),
        "moe_largest_share_sum": float(shares.max()),
        "moe_smallest_share_sum": float(shares.min()),
        "moe_batches": 1.0,
    }
