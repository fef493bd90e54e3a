"""The formula for activation memory, compared with the tensors that autograd saves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nemo_kto.architecture.lora import LoRASettings
from tests.families import ACTIVATIONS, WIDE
from tests.families.family import TP2, Activations, adapters
from tests.helpers.rank_pool import RankPool

SEQUENCES, LENGTH = 2, 64


def saved_by_layer(model: Path, options: dict[str, Any], dtype: str, adapters: LoRASettings | None) -> float:
    """Bytes that one layer saves; a storage that several tensors share counts once, weights do not count."""
    import torch

    from nemo_kto.architecture.architecture import read_architecture
    from nemo_kto.distributed import state
    from nemo_kto.layers.attention import PackedSequences
    from nemo_kto.models.engine.optimizer import wrap_data_parallel
    from nemo_kto.models.gpt import build_gpt
    from nemo_kto.models.lora.adapters import add_adapters

    tensor, context, recompute = options.get("tensor", 1), options.get("context", 1), options.get("recompute")
    layout = state.Layout(tensor=tensor, context=context, sequence_parallel=options.get("sequence_parallel", False))
    state.init_distributed(layout=layout, seed=1)
    architecture = read_architecture(model, tensor_parallel=tensor)
    gpt = build_gpt(
        architecture,
        params_dtype=getattr(torch, dtype),
        context_parallel=context,
        sequence_parallel=layout.sequence_parallel,
        recompute_granularity=recompute,
        recompute_modules=options.get("modules", ["mlp"]),
        recompute_method="uniform" if recompute == "full" else None,
        recompute_num_layers=1 if recompute == "full" else None,
    )
    if adapters is not None:
        add_adapters(gpt, adapters, architecture=architecture, seed=1)
    chunk = wrap_data_parallel([gpt], use_distributed_optimizer=False)[0]
    of_weights = {each.untyped_storage().data_ptr() for each in [*gpt.parameters(), *gpt.buffers()]}
    # Only the input of a recomputed layer is saved, before its forward pass.
    measured = layers_of(model)
    kept: dict[int, Any] = {}
    inside: list[int | None] = [None]
    for layer in measured:
        gpt.decoder.layers[layer].register_forward_pre_hook(lambda *_, layer=layer: inside.__setitem__(0, layer))
        gpt.decoder.layers[layer].register_forward_hook(lambda *_: inside.__setitem__(0, None))

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if inside[0] is not None and storage.data_ptr() not in of_weights:
            kept[storage.data_ptr()] = storage
        return tensor

    length = LENGTH // context
    shape = (1, SEQUENCES * length) if options.get("packed") else (SEQUENCES, length)
    row = PackedSequences.of([(LENGTH,) * SEQUENCES])[0] if options.get("packed") else None
    if options.get("prompts"):  # half of the tokens are a prompt of two answers
        row = PackedSequences.of([(LENGTH, LENGTH // 2, LENGTH // 2)], [(None, 0, 0)])[0]
    tokens = torch.randint(0, 200, shape)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        chunk(tokens, torch.arange(shape[1]).expand_as(tokens), None, packed_seq_params=row)
    return sum(storage.nbytes() for storage in kept.values()) / len(measured)


def peak_of_backward(model: Path, lengths: tuple[int, ...]) -> tuple[float, float]:
    """Largest memory that the backward pass of a mixer with states allocates, in bytes per token, and the formula's."""
    import torch

    from nemo_kto.architecture.architecture import read_architecture
    from nemo_kto.distributed import state
    from nemo_kto.layers.attention import PackedSequences
    from nemo_kto.layers.mixer_module import RecurrentModule
    from nemo_kto.memory.activations import Activations
    from nemo_kto.models.gpt import build_gpt

    state.init_distributed(layout=state.Layout(), seed=1)
    architecture = read_architecture(model, tensor_parallel=1)
    gpt = build_gpt(architecture, params_dtype=torch.float32).requires_grad_(False)
    module = next(each for each in gpt.modules() if isinstance(each, RecurrentModule))
    tokens = sum(lengths)
    hidden = torch.randn(tokens, 1, architecture.hidden_size, requires_grad=True)
    output, _ = module(hidden, packed_seq_params=PackedSequences.of([lengths])[0])
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        torch.autograd.grad(output, hidden, torch.randn_like(output))
    assert profile.profiler is not None
    found = [each for each in profile.profiler.kineto_results.events() if each.name() == "[memory]"]
    changes = torch.tensor([each.nbytes() for each in sorted(found, key=lambda each: each.start_ns())])
    saving = Activations(
        architecture=architecture, element_bytes=4, sequence_parallel=False, context_parallel=1, adapters=None, packed=True
    )
    mixer = next(each for each in architecture.mixers if each.kind in ("Mamba-2", "gated delta net", "short convolution"))
    return float(changes.cumsum(0).max()) / tokens, mixer.backward_bytes(saving)


def layers_of(model: Path) -> tuple[int, ...]:
    """One layer with each mixer; not the first layer, whose input needs no gradient where only adapters are trained."""
    text = (model / "config.json").read_text()
    if "mamba" in text:
        return (4, 5, 6, 7)
    several = ("linear_attention", "conv_L", "per_layer_config")
    return (1, 2) if any(part in text for part in several) else (1,)


def expected(model: Path, options: dict[str, Any], dtype: str, adapters: LoRASettings | None) -> float:
    from nemo_kto.architecture.architecture import read_architecture
    from nemo_kto.memory.activations import Activations

    saved = Activations(
        architecture=read_architecture(model, tensor_parallel=options.get("tensor", 1)),
        element_bytes={"float32": 4, "bfloat16": 2}[dtype],
        sequence_parallel=options.get("sequence_parallel", False),
        context_parallel=options.get("context", 1),
        adapters=adapters,
        packed=options.get("packed", False),
    )
    length = LENGTH // options.get("context", 1)
    tokens = SEQUENCES * length
    if options.get("recompute") == "full":
        return 0.0
    recomputed = options.get("modules", ["mlp"]) if options.get("recompute") == "selective" else ()
    return (
        saved.layer(recomputed) * tokens
        + saved.tables() * (tokens if options.get("packed") else length)
        + saved.adapter_matrices(recomputed)
    )


@pytest.fixture(scope="module")
def wide_model(tiny_checkpoint: Callable[..., Path]) -> Callable[[str], Path]:
    wide = {"hidden_size": 256, "intermediate_size": 640}
    return lambda family: tiny_checkpoint(family, **{**wide, **WIDE.get(family, {})})


ALL, QUERIES = adapters("all", rank=4), adapters(rank=8, alpha=8)
CASES = [
    Activations("llama", TP2, lora=replace(ALL, dora=True), quick=True),
    Activations("llama", {"packed": True, "context": 2}, quick=True),
    Activations("llama", {"recompute": "selective"}, quick=True),
    Activations("llama", {"recompute": "full"}, quick=True),
    Activations("llama", {"context": 2}),
    Activations("llama", {"tensor": 2}, lora=replace(ALL, dropout=0.1, dora=True)),
    Activations("llama", {"recompute": "selective"}, lora=replace(QUERIES, dora=True)),
    Activations("llama", {"context": 2}, lora=QUERIES),
    Activations("llama", {"recompute": "selective", "modules": ["core_attn"]}),
    *ACTIVATIONS,
]


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=f"{case.family}-{number}", marks=[pytest.mark.full] * (not case.quick))
        for number, case in enumerate(CASES)
    ],
)
def test_saved_activations_equal_the_formula(ranks: RankPool, wide_model: Callable[[str], Path], case: Activations) -> None:
    model, options = wide_model(case.family), dict(case.options)
    world_size = options.get("tensor", 1) * options.get("context", 1)
    found = ranks.run(world_size, saved_by_layer, model, options, case.dtype, case.lora)
    wanted = expected(model, options, case.dtype, case.lora)
    assert found == [pytest.approx(wanted, rel=0.015)] * len(found)


@pytest.mark.parametrize("lengths", [(256,) * 4, (100,) * 8], ids=["whole chunks", "padded chunks"])
@pytest.mark.parametrize("family", ["nemotron_h", "qwen3_5_text", "lfm2"])
def test_backward_passes_of_mixers_with_states_need_no_more_than_the_formula(
    ranks: RankPool, wide_model: Callable[[str], Path], family: str, lengths: tuple[int, ...]
) -> None:
    """The formula exceeds the peak for whole chunks, because it does not count the padding of others."""
    ((found, wanted),) = ranks.run(1, peak_of_backward, wide_model(family), lengths)
    assert 1.0 < wanted / found < 1.5


@pytest.mark.parametrize(
    ("family", "dtype"),
    [("llama", "float32"), *(pytest.param(each, "bfloat16", marks=pytest.mark.full) for each in ("llama", "gpt_oss"))],
)
def test_tokens_of_shared_prompts_save_no_more_than_the_formula(
    ranks: RankPool, wide_model: Callable[[str], Path], family: str, dtype: str
) -> None:
    """The keys and values of a prompt are copied for each answer, instead of the view of the fused tensor that is kept."""
    options = {"packed": True, "prompts": True}
    (found,) = ranks.run(1, saved_by_layer, wide_model(family), options, dtype, None)
    assert 0.8 < found / expected(wide_model(family), {"packed": True}, dtype, None) <= 1.0
