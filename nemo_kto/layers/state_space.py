"""Scan of a selective state space model in chunks (Mamba-2: Dao & Gu 2024, arXiv 2405.21060).

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

from collections.abc import Sequence

import torch
from torch import Tensor

from nemo_kto.layers.chunked_scan import decay_between, divide, scan
from nemo_kto.layers.packing import Prompts


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
