"""Router of a mixture-of-experts layer, its load-balancing loss, and biases of experts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.layers import RowParallelLinear
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_model_config
from torch import Tensor

from nemo_kto.device import device


class BiasedExpertOutput(RowParallelLinear):
    """The down projection of an expert, y = W x + b, where the ranks that share it hold all of b and columns of W.

    What these ranks put out is added up, so that each adds a part of b; the tokens that the expert sees are the same on all
    of them, and so is the gradient of b.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "bias": True})
        # The output is added up where tokens go back to their ranks, if at all. Without this it would pass a reduction of
        # one rank, which gives a view that no bias can be added to in place, as megatron-core's MLP does.
        self.explicit_expert_comm = True
        bias: Any = self.bias
        bias.sequence_parallel = False  # the expert sees whole tokens, wherever they come from
        # In the norm of the gradient it counts once, on the first of the ranks that share the expert.
        bias.tensor_model_parallel, bias.shared = True, self.tp_group.rank() > 0

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor]:
        """The output without the bias, and this rank's part of the bias."""
        output, bias = super().forward(input_)
        part: Tensor = _Part.apply(bias, self.tp_group.size())  # type: ignore[no-untyped-call]
        return output, part


class _Part(torch.autograd.Function):
    """b / n, with the gradient of the sum over n ranks."""

    @staticmethod
    def forward(ctx: Any, bias_H: Tensor, ranks: int) -> Tensor:
        return bias_H / ranks

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class BalancedRouter(TopKRouter):
    """Chooses experts as megatron-core does, and in training notes how evenly.

    Attributes:
        loss_weight: what the loss of each sequence is multiplied by in the objective; the schedule divides by the number of
            examples.
        balance: what was noted since it was None: the sum of the losses, the number of sequences, and how often each expert
            was chosen; [2 + E], the same on all ranks that share a sequence.
    """

    loss_weight: float = 0.0
    balance: Tensor | None = None

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """As megatron-core's.

        Args:
            logits: [s, b, E].
            padding_mask: not a mask of padding, but whose tokens these are: True where a token counts for a sequence,
                [s, b, n]. None for no loss.
        """
        probs, chosen = super().routing(_chosen(logits, self.topk) if self.score_function == "sigmoid" else logits)
        # not when activations are dropped that are recomputed later
        if padding_mask is not None and self.training and torch.is_grad_enabled():
            owners_Tn = padding_mask.flatten(0, 1).float()
            losses_n = self._losses(logits.flatten(0, 1), chosen.view(-1, self.num_experts), owners_Tn)
            if self.loss_weight:
                probs = MoEAuxLossAutoScaler.apply(probs, self.loss_weight * losses_n.sum())
        return probs, chosen

    def _losses(self, logits_TE: Tensor, chosen_TE: Tensor, owners_Tn: Tensor) -> Tensor:
        """The loss of each sequence: [n]. Of a sequence that ranks share, this rank's part; they add up to it."""
        probs_nE = owners_Tn.T @ torch.softmax(logits_TE, dim=-1, dtype=torch.float32)
        chosen_nE = owners_Tn.T @ chosen_TE.float()
        whole = torch.stack([chosen_nE, probs_nE.detach()])
        if self.tp_cp_group.size() > 1:
            torch.distributed.all_reduce(whole, group=self.tp_cp_group)
        tokens_n = whole[0].sum(dim=-1) / self.topk
        scale_n = self.num_experts / (self.topk * tokens_n.clamp(min=1).square())
        values = [(scale_n * (whole[0] * whole[1]).sum(dim=-1)).sum(), (tokens_n > 0).sum()]
        noted = torch.cat([torch.stack([value.double() for value in values]), whole[0].double().sum(dim=0)])
        self.balance = noted if self.balance is None else self.balance + noted
        return scale_n * (whole[0] * probs_nE).sum(dim=-1)


class BiasedRouter(BalancedRouter):
    """Adds a learned number to the logit of each expert.

    megatron-core has one only beside biases everywhere, and lets Transformer Engine's product add it, in the type of the
    model; logits are fp32 here.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        bias: Any = torch.nn.Parameter(
            torch.zeros(self.num_experts, dtype=self.config.params_dtype, device=device.current_device())
        )
        bias.sequence_parallel = self.config.sequence_parallel  # its gradient is a partial sum, as the weight's
        self.logit_bias = bias

    def gating(self, input: Tensor) -> Tensor:
        """Logits [..., E] of hidden states [..., H]."""
        logits: Tensor = super().gating(input) + self.logit_bias
        return logits


def _chosen(logits: Tensor, per_token: int) -> Tensor:
    """The largest logits of each token, and -inf for the others. megatron-core compares sigmoids, which in fp32 are 1 for
    all large logits."""
    largest = logits.topk(per_token, dim=-1)
    return torch.full_like(logits, -torch.inf).scatter(-1, largest.indices, largest.values)


def experts_span_copies(config: TransformerConfig) -> bool:
    """Whether the ranks that share out experts belong to several data-parallel copies of the other layers."""
    if config.num_moe_experts is None:
        return False
    shards = config.expert_tensor_parallel_size
    return bool(config.tensor_model_parallel_size % (config.expert_model_parallel_size * shards))


def routers(chunks: Iterable[torch.nn.Module]) -> Iterator[BalancedRouter]:
    """The routers of a model; none of a dense one."""
    for chunk in chunks:
        yield from (module for module in chunk.modules() if isinstance(module, BalancedRouter))


def balance_sums(chunks: Sequence[torch.nn.Module]) -> dict[str, float]:
    """What the routers of all ranks have noted, the same on every rank; collective. Nothing of a dense model.

    Args:
        chunks: of this rank.

    Returns:
        ``moe_aux_loss_sum`` over the sequences and layers, and ``moe_aux_losses``, the number of them; the shares of the
        choices of a layer that fell on the expert with the most and with the fewest of all layers, each summed over
        ``moe_batches``, which is 1.
    """
    config = get_model_config(chunks[0])
    if config.num_moe_experts is None:
        return {}
    noted = torch.zeros(config.num_layers, 2 + config.num_moe_experts, dtype=torch.float64, device=device.current_device())
    for router in routers(chunks):
        if router.balance is not None:
            noted[router.layer_number - 1] = router.balance
    torch.distributed.all_reduce(noted, group=parallel_state.get_data_parallel_group())
    torch.distributed.all_reduce(noted, group=parallel_state.get_pipeline_model_parallel_group())
    noted = noted.cpu()
    noted = noted[noted[:, 1] > 0]  # layers with experts, if any sequence counts
    if not len(noted):
        return {}
    shares = noted[:, 2:] / noted[:, 2:].sum(dim=1, keepdim=True)
    return {
        "moe_aux_loss_sum": float(noted[:, 0].sum()),
        "moe_aux_losses": float(noted[:, 1].sum()),
        "moe_largest_share_sum": float(shares.max()),
        "moe_smallest_share_sum": float(shares.min()),
        "moe_batches": 1.0,
    }
