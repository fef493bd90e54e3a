"""The planned memory of a GPU, compared with the measured peak of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_kto.architecture.architecture import read_architecture
from nemo_kto.config.resolved import ResolvedRun
from nemo_kto.device import device
from nemo_kto.device.kernels import uses_transformer_engine, varlen_attention
from nemo_kto.layers.attention import PackedSequences, RepeatedHeads
from nemo_kto.memory.activations import Activations
from nemo_kto.memory.rank_memory import CONTEXT
from nemo_kto.models.engine.optimizer import wrap_data_parallel
from nemo_kto.models.gpt import build_gpt
from tests.helpers.tiny_models import make_checkpoint, make_rows, write_rows
from tests.helpers.training_jobs import train

pytestmark = pytest.mark.skipif(not device.on_gpu(), reason="needs a GPU")


LATENTS: dict[str, Any] = {
    "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 96, "kv_lora_rank": 80, "qk_nope_head_dim": 44,
    "qk_rope_head_dim": 16, "v_head_dim": 40, "first_k_dense_replace": 4,
}  # fmt: skip
MISALIGNED = LATENTS | {"qk_nope_head_dim": 12, "qk_rope_head_dim": 4, "v_head_dim": 16}  # values after 12 channels of keys
LENGTHS = (60, 68)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.skipif(varlen_attention(torch.bfloat16) is None, reason="needs torch 2.11 or newer")
@pytest.mark.skipif(uses_transformer_engine(torch.bfloat16), reason="needs layers without Transformer Engine")
@pytest.mark.parametrize("repeats", [False, True])
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {}),
        ("llama", {"head_dim": 20}),
        ("qwen3", {"head_dim": 36}),
        ("deepseek_v3", LATENTS),
        ("deepseek_v3", MISALIGNED),
    ],
    ids=["llama", "padded", "normed", "latents", "misaligned"],
)
def test_a_pack_saves_the_planned_bytes(family: str, changes: dict[str, Any], repeats: bool, tmp_path: Path) -> None:
    """Of one layer whose attention is torch's kernel, with heads that it pads, or keys that are repeated for it."""
    model = make_checkpoint(tmp_path, family, **{"hidden_size": 256, "intermediate_size": 640, **changes})
    architecture = read_architecture(model, tensor_parallel=1)
    gpt = build_gpt(architecture, params_dtype=torch.bfloat16)
    wrap_data_parallel([gpt], use_distributed_optimizer=False)
    of_weights = {each.untyped_storage().data_ptr() for each in [*gpt.parameters(), *gpt.buffers()]}
    layer, core = gpt.decoder.layers[1], gpt.decoder.layers[1].self_attention.core_attention
    assert core.packed_kernel is not None
    core.packed_kernel = RepeatedHeads(core.packed_kernel) if repeats else core.packed_kernel
    kept, inside = dict[int, int](), list[bool]()
    layer.register_forward_pre_hook(lambda *_: inside.append(True))
    layer.register_forward_hook(lambda *_: inside.clear())

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if inside and storage.data_ptr() not in of_weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    tokens, positions = device.upload([torch.arange(sum(LENGTHS))[None] % 200, torch.arange(sum(LENGTHS))[None]])
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        hidden = gpt(tokens, positions, None, packed_seq_params=PackedSequences.of([LENGTHS])[0])
    formula = Activations(architecture=architecture, element_bytes=2, on_gpu=True, packed=True, repeats_keys=repeats)
    assert hidden.requires_grad  # so that what is saved exists
    assert sum(kept.values()) / sum(LENGTHS) == pytest.approx(formula.layer() + formula.tables(), rel=0.01)


def test_a_run_uses_the_planned_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from nemo_kto.memory.hardware import Machines
    from nemo_kto.memory.run_plan import make_plan

    plans = []

    def planned(run: ResolvedRun, machines: Machines, *, longest: int | None = None) -> None:
        plans.append(make_plan(run, machines))

    monkeypatch.setattr("nemo_kto.run.prepare.check_memory", planned)
    sizes: dict[str, Any] = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 8, "vocab_size": 32768}
    model = make_checkpoint(tmp_path / "model", "llama", **sizes)
    rows = write_rows(tmp_path / "rows.jsonl", [{**row, "response": "a" * 4096} for row in make_rows(16)])
    overrides = ["trainer.accelerator=gpu", "trainer.precision=bf16", "model.data.seq_length=2048"]
    overrides += ["model.global_batch_size=8", "model.micro_batch_size=4", f"model.data.cache_dir={tmp_path / 'cache'}"]
    overrides += ["model.reference.mode=cached"]
    train(model, rows, tmp_path / "run", 1, overrides)
    plan = plans[0]
    assert device.peak_memory_bytes() == pytest.approx(plan.largest.device - CONTEXT, rel=0.15)
