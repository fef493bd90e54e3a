"""Adapters on experts: divided over two ranks, replicated on both, or on one rank."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.helpers import lora_jobs
from tests.helpers.messages import Message
from tests.helpers.rank_pool import RankPool

EXPERTS, HIDDEN, FFN, RANK = 4, 32, 24, 2


def draw(name: str, shape: Any) -> torch.Tensor:
    """Values that depend only on the name in the complete model."""
    generator = torch.Generator().manual_seed(sum(position * ord(letter) for position, letter in enumerate(name, start=1)))
    return torch.randn(shape, generator=generator) * 0.3


def global_names(model: torch.nn.Module, first_expert: int) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Parameters under names in which experts are counted over all ranks."""
    for name, parameter in model.named_parameters():
        before, mark, after = name.partition("local_experts.")
        if mark:
            number, rest = after.split(".", 1)
            name = f"{before}{mark}{int(number) + first_expert}.{rest}"
        yield name, parameter


def drawn(name: str, parameter: Any) -> torch.Tensor:
    """This rank's part of the values of a parameter."""
    from megatron.core import parallel_state

    shape, ranks = list(parameter.shape), parallel_state.get_tensor_model_parallel_world_size()
    if ranks == 1 or ".local_experts." in name or not getattr(parameter, "tensor_model_parallel", False):
        return draw(name, shape)
    shape[parameter.partition_dim] *= ranks
    return draw(name, shape).chunk(ranks, dim=parameter.partition_dim)[parallel_state.get_tensor_model_parallel_rank()]


def build_mixture(tensor_parallel: int, expert_parallel: int) -> Any:
    from megatron.core import parallel_state
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from megatron.core.transformer.transformer_config import TransformerConfig

    from nemo_kto.models.layers.norm import TorchNorm
    from nemo_kto.models.lora.layers import adapt_linear

    spec = get_gpt_layer_local_spec(EXPERTS, moe_grouped_gemm=False, normalization="RMSNorm")
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = TorchNorm
    config = TransformerConfig(
        num_layers=2,
        hidden_size=HIDDEN,
        tensor_model_parallel_size=tensor_parallel,
        sequence_parallel=tensor_parallel > 1,
        num_attention_heads=4,
        ffn_hidden_size=FFN,
        moe_ffn_hidden_size=FFN,
        num_moe_experts=EXPERTS,
        moe_router_topk=2,
        moe_aux_loss_coeff=0.0,
        moe_token_dispatcher_type="alltoall",
        expert_model_parallel_size=expert_parallel,
        expert_tensor_parallel_size=1,
        gated_linear_unit=True,
        activation_func=F.silu,
        bias_activation_fusion=False,
        add_bias_linear=False,
        normalization="RMSNorm",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        masked_softmax_fusion=False,
        calculate_per_token_loss=True,
        finalize_model_grads_func=finalize_model_grads,
    )
    model = GPTModel(
        config=config,
        transformer_layer_spec=TransformerBlockSubmodules(layer_specs=[spec] * 2, layer_norm=TorchNorm),
        vocab_size=lora_jobs.VOCABULARY + 1,
        parallel_output=False,
        max_sequence_length=lora_jobs.SEQUENCE,
        position_embedding_type="rope",
    )
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for name, module in list(model.named_modules()):
        if isinstance(module, ColumnParallelLinear | RowParallelLinear) and "decoder" in name:
            gated = name.endswith("linear_fc1")
            part_of_row = torch.arange(2).repeat_interleave(FFN) if gated else None
            adapt_linear(module, rank=RANK, scale=1.5, parts=2 if gated else 1, part_of_row=part_of_row)
    first_expert = parallel_state.get_expert_model_parallel_rank() * EXPERTS // expert_parallel
    with torch.no_grad():
        for name, parameter in global_names(model, first_expert):
            parameter.copy_(drawn(name, parameter))
    return model, first_expert


def train_mixture(
    tensor_parallel: int, expert_parallel: int, distributed: bool
) -> tuple[list[float], dict[str, Any], set[str], dict[str, Any]]:
    """On a rank: three steps.

    Returns:
        Norms of the gradient, adapters by global name, names in the experts' own group, and the values of the start.
    """
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer.moe import token_dispatcher

    from nemo_kto.models.engine.optimizer import wrap_data_parallel

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tensor_parallel,
        expert_model_parallel_size=expert_parallel,
        expert_tensor_parallel_size=1,
    )
    model_parallel_cuda_manual_seed(3)
    original = token_dispatcher.maybe_move_tensor_to_cpu

    def to_numpy(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        """gloo needs split sizes as integers; megatron-core converts them only if they are on a GPU."""
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else original(tensor)

    token_dispatcher.maybe_move_tensor_to_cpu = to_numpy
    try:
        model, first_expert = build_mixture(tensor_parallel, expert_parallel)
        chunks = wrap_data_parallel([model], use_distributed_optimizer=distributed)
        optimizer = lora_jobs.optimizer_of(chunks, distributed=distributed)
        mine = range(lora_jobs.ROWS)[
            parallel_state.get_data_parallel_rank() :: parallel_state.get_data_parallel_world_size()
        ]

        def forward(rows: Any, chunk: Any) -> Any:
            row = next(rows)
            logits = chunk(lora_jobs.tokens(row), torch.arange(lora_jobs.SEQUENCE)[None], None)
            loss = (logits[..., : lora_jobs.VOCABULARY] * lora_jobs.cotangent(row)).sum()
            return logits, lambda _: (loss, torch.tensor(1, dtype=torch.int), {})

        norms = []
        for _ in range(3):
            chunks[0].zero_grad_buffer()
            for parameter in chunks[0].parameters():
                parameter.grad = None
            get_forward_backward_func()(
                forward_step_func=forward,
                data_iterator=[iter(mine)],
                model=chunks,
                num_microbatches=len(mine),
                seq_length=lora_jobs.SEQUENCE,
                micro_batch_size=1,
                forward_only=False,
            )
            norms.append(float(optimizer.step()[1]))
        trained = {name: p for name, p in global_names(model, first_expert) if p.requires_grad}
        own_group = {name for name, parameter in trained.items() if not getattr(parameter, "allreduce")}  # noqa: B009
        start = {name: drawn(name, parameter).numpy() for name, parameter in trained.items()}
        return norms, {name: parameter.detach().numpy() for name, parameter in trained.items()}, own_group, start
    finally:
        token_dispatcher.maybe_move_tensor_to_cpu = original


@pytest.fixture(scope="module")
def one_rank(ranks: RankPool) -> tuple[list[float], dict[str, Any], set[str], dict[str, Any]]:
    return ranks.run(1, train_mixture, 1, 1, False)[0]


@pytest.mark.parametrize(
    ("tensor_parallel", "expert_parallel", "distributed"),
    [
        pytest.param(1, 2, True, id="ep2-distributed"),
        pytest.param(2, 2, False, id="tp2-ep2-replicated"),
        pytest.param(1, 1, False, id="replicated", marks=pytest.mark.full),
        pytest.param(1, 1, True, id="distributed", marks=pytest.mark.full),
        pytest.param(1, 2, False, id="ep2-replicated", marks=pytest.mark.full),
        pytest.param(2, 2, True, id="tp2-ep2-distributed", marks=pytest.mark.full),
    ],
)
def test_experts_divided_over_ranks(
    tensor_parallel: int, expert_parallel: int, distributed: bool, ranks: RankPool, one_rank: Any
) -> None:
    norms, expected, _, _ = one_rank
    results = ranks.run(2, train_mixture, tensor_parallel, expert_parallel, distributed)
    assert {name for _, trained, _, _ in results for name in trained} == expected.keys()
    assert sum(".local_experts." in name for name in expected) == 2 * EXPERTS * 4, "layers, experts, two layers' A and B"
    for our_norms, trained, own_group, start in results:
        assert our_norms == pytest.approx(norms, rel=1e-5)
        experts = {name for name in trained if ".local_experts." in name}
        assert len(experts) == 2 * EXPERTS * 4 // expert_parallel
        assert own_group == (experts if expert_parallel > 1 else set())
        for name, values in trained.items():
            assert abs(values - start[name]).max() > 1e-3, f"{name} must have moved"
            if values.shape == expected[name].shape:
                assert abs(values - expected[name]).max() < 1e-5, name


def merge_into_grouped(folder: Path) -> list[bool]:
    """On a rank: whether adapters change weights of experts under the names of Transformer Engine's layer as under ours."""
    from nemo_kto.architecture.architecture import read_architecture
    from nemo_kto.architecture.lora import LoRASettings
    from nemo_kto.distributed import state
    from nemo_kto.models.gpt import build_gpt
    from nemo_kto.models.lora import adapters
    from nemo_kto.models.lora.adapters import add_adapters, merge_adapters, share_weights

    state.init_distributed(layout=state.Layout(), seed=3)
    architecture = read_architecture(folder, tensor_parallel=1)
    carrier, model = (build_gpt(architecture, params_dtype=torch.float32, empty=empty) for empty in (True, False))
    add_adapters(carrier, LoRASettings(rank=2, alpha=4, target_modules=("mlp",)), architecture=architecture, seed=1)
    for name, parameter in carrier.named_parameters():
        if name.endswith("lora_b"):
            torch.nn.init.constant_(parameter, int(name.split(".experts.local_experts.")[1][0]) + 1)
    grouped = torch.nn.Module()
    names = {
        name: re.sub(r"local_experts\.(\d)\.(linear_fc\d)\.weight", r"\2.weight\1", name)
        for name, _ in model.named_parameters()
    }
    for name, parameter in model.named_parameters():
        *path, last = names[name].split(".")
        module = grouped
        for part in path:
            if not hasattr(module, part):
                module.add_module(part, torch.nn.Module())
            module = getattr(module, part)
        module.register_parameter(last, torch.nn.Parameter(parameter.detach().clone()))
    before = {name: weight.clone() for name, weight in grouped.named_parameters()}
    share_weights(carrier, model)
    merge_adapters([carrier])
    share_weights(carrier, grouped)
    for adapter in adapters._adapters([carrier]):
        adapter.adapter_is_merged = False
    merge_adapters([carrier])
    after = dict(grouped.named_parameters())
    same = all(torch.equal(weight, after[names[name]]) for name, weight in model.named_parameters())
    changed = {name for name, weight in after.items() if not torch.equal(weight, before[name])}
    return [same, changed == {name for name in before if ".experts." in name}]


def test_adapters_are_merged_into_grouped_experts(ranks: RankPool, tiny_checkpoint: Callable[..., Path]) -> None:
    assert ranks.run(1, merge_into_grouped, tiny_checkpoint("mixtral")) == [[True, True]]


def adapt_shared_out_expert() -> str:
    from types import SimpleNamespace

    from megatron.core.tensor_parallel.layers import ColumnParallelLinear
    from megatron.core.transformer.transformer_config import TransformerConfig

    from nemo_kto.distributed import state
    from nemo_kto.models.lora.layers import adapt_linear

    state.init_distributed(layout=state.Layout(), seed=3)
    config = TransformerConfig(num_layers=1, hidden_size=4, num_attention_heads=1)
    linear = ColumnParallelLinear(4, 4, config=config, init_method=torch.nn.init.zeros_, is_expert=True)
    linear.tp_group = SimpleNamespace(size=lambda: 2)
    try:
        adapt_linear(linear, rank=1, scale=1.0)
    except ValueError as error:
        return str(error)
    return ""


def test_sharded_experts_are_refused(ranks: RankPool) -> None:
    assert ranks.run(1, adapt_shared_out_expert) == [
        Message("adapters", "expert_tensor_parallel_size", "1", "2", "matrices")
    ]
