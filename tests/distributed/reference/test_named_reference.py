"""A named reference: log-probs of adapters on their base model equal those of transformers and peft."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from nemo_kto.architecture.lora import LoRASettings
from nemo_kto.distributed.state import Layout
from tests.helpers import hf_models, lora_jobs
from tests.helpers.messages import Message, logged
from tests.helpers.rank_pool import RankPool
from tests.helpers.tiny_models import make_checkpoint
from tests.helpers.training_jobs import train, trajectory

SAVED = LoRASettings(rank=3, alpha=6, target_modules=("attention", "mlp_fc2"), dora=True)
LORA = [
    "model.peft.peft_scheme=lora",
    "model.peft.lora_tuning.adapter_dim=2",
    "model.peft.lora_tuning.target_modules=[mlp]",
    "model.peft.lora_tuning.dora=true",
]
TP2, PP2 = ["model.tensor_model_parallel_size=2"], ["model.pipeline_model_parallel_size=2"]
PP2_VP2 = [*PP2, "model.virtual_pipeline_model_parallel_size=2"]
Logps = dict[tuple[int, ...], float]


def run_a_step(model: Path, rows: Path, folder: Path, world_size: int, overrides: list[str]) -> Logps:
    """On a rank: a step of DPO; the reference's log-prob of each answer, by its tokens and the number of its prompt's."""
    from nemo_kto.models.nlp.gpt.megatron_gpt_dpo_model import MegatronGPTDPOModel

    seen: Logps = {}
    original = MegatronGPTDPOModel.get_ref_policy_logprobs

    def recorded(self: Any, batch: Any) -> Any:
        logps = original(self, batch)
        (answers,) = self.sequences(batch)
        for number, length in enumerate(answers.lengths_B.tolist()):
            prompt = int((answers.labels_BS[number] == -100).int()[:length].sum())
            seen[(prompt, *answers.tokens_BS[number, :length].tolist())] = logps[number].item()
        return logps

    settings = ["trainer.dpo.max_steps=1", "trainer.dpo.limit_val_batches=0", "trainer.dpo.limit_train_batches=1"]
    settings += ["model.global_batch_size=8", f"model.data.cache_dir={folder}/cache"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MegatronGPTDPOModel, "get_ref_policy_logprobs", recorded)
        train(model, rows, folder, world_size, [*settings, *overrides], "dpo")
    return seen


def expected_logps(sequences: Sequence[tuple[int, ...]], base: Path, adapter: Path | None) -> list[float]:
    """The same of transformers, with the adapters that peft merges into the base model."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    if adapter is not None:
        model = PeftModel.from_pretrained(model, adapter).merge_and_unload().eval()
    found = []
    with torch.no_grad():
        for prompt, *tokens in sequences:
            ids = torch.tensor([tokens])
            logps = model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
            found.append(logps[prompt - 1 :].sum().item())
    return found


@pytest.fixture(scope="module")
def folders(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two base models; adapters on each by peft; a checkpoint of adapters, and the same in PEFT's format."""
    root = tmp_path_factory.mktemp("named")
    for name, seed in (("base", 0), ("other", 3)):
        make_checkpoint(root / name, "llama", seed=seed)
        modules, dora = ["q_proj", "v_proj", "up_proj"], name == "other"
        config = LoraConfig(r=4, lora_alpha=12, target_modules=modules, use_dora=dora, task_type="CAUSAL_LM")
        model = get_peft_model(AutoModelForCausalLM.from_pretrained(root / name, dtype=torch.float32), config)
        draw = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in (parameter for parameter in model.parameters() if parameter.requires_grad):
                drawn = torch.randn(parameter.shape, generator=draw) * 0.1
                parameter.copy_(drawn if parameter.dim() > 1 else parameter * (1 + drawn))
        model.save_pretrained(str(root / f"on_{name}"))
    ranks.run(1, lora_jobs.train_and_save, Layout(), root / "base", SAVED, root / "run", 1)
    return {
        **{name: root / name for name in ("base", "other", "on_base", "on_other")},
        "checkpoint": root / "run" / "step_000001",
        "of_checkpoint": root / "run" / "adapter-1",
    }


@pytest.mark.parametrize(
    ("reference", "policy", "mode", "layout"),
    [
        pytest.param(reference, policy, mode, layout, id=f"{reference}-{policy}-{mode}-{name}", marks=marks)
        for reference, policy, mode, name, layout, marks in [
            ("on_other", "full", "cached", "tp2", TP2, []),
            ("checkpoint", "lora", "swap", "pp2", PP2, []),
            ("on_other", "full", "swap", "pp2_vp2", PP2_VP2, [pytest.mark.full]),
            ("on_base", "trained_adapters", "swap", "one_rank", [], [pytest.mark.full]),
            ("checkpoint", "full", "swap", "tp2", TP2, [pytest.mark.full]),
            ("checkpoint", "trained_adapters", "cached", "tp2", TP2, [pytest.mark.full]),
            ("on_other", "lora", "swap", "tp2", TP2, [pytest.mark.full]),
            ("on_other", "lora", "cached", "pp2", PP2, [pytest.mark.full]),
            ("on_base", "full", "swap", "pp2", PP2, [pytest.mark.full]),
        ]
    ],
)
def test_log_probs_are_those_of_transformers_and_peft(
    reference: str,
    policy: str,
    mode: str,
    layout: list[str],
    ranks: RankPool,
    folders: dict[str, Path],
    dpo_rows: Path,
    tmp_path: Path,
) -> None:
    own = {
        "full": [],
        "lora": LORA,
        "trained_adapters": [LORA[0], f"model.peft.restore_from_path={folders['of_checkpoint']}"],
    }
    named = [f"model.reference.restore_from_path={folders[reference]}", f"model.reference.mode={mode}"]
    world_size = 2 if layout else 1
    overrides = [*named, *own[policy], *layout]
    seen, *_ = ranks.run(world_size, run_a_step, folders["base"], dpo_rows, tmp_path, world_size, overrides)
    adapter = {"checkpoint": "of_checkpoint"}.get(reference, reference)
    base = "other" if reference == "on_other" else "base"
    assert len(seen) >= 14
    expected = expected_logps([*seen], folders[base], folders[adapter])
    assert [*seen.values()] == pytest.approx(expected, rel=1e-5, abs=1e-4)
    plain = expected_logps([*seen], folders[base], None)
    assert max(abs(one - two) for one, two in zip(expected, plain, strict=True)) > 0.1, "the adapters must change the logits"
    # and the policy does not depend on the reference
    its_own = expected_logps([*seen], folders["base"], folders["of_checkpoint"] if policy == "trained_adapters" else None)
    (step,) = trajectory(tmp_path)
    mean = (step["train/logps_chosen_mean"] + step["train/logps_rejected_mean"]) / 2
    assert mean == pytest.approx(sum(its_own) / len(its_own), rel=1e-4)


def test_adapters_on_sharded_experts(
    ranks: RankPool, tiny_checkpoint: Callable[..., Path], dpo_rows: Path, tmp_path: Path
) -> None:
    """They are not trained, and become part of the weights: any layout will do."""
    base, settings = tiny_checkpoint("mixtral"), LoRASettings(rank=2, alpha=4, target_modules=("q_proj", "mlp"))
    merged = hf_models.write_adapters(base, tmp_path / "adapters", settings)
    named = [f"model.reference.restore_from_path={tmp_path / 'adapters'}", "model.reference.mode=swap"]
    layout = [*TP2, "model.sequence_parallel=true"]
    seen, *_ = ranks.run(2, run_a_step, base, dpo_rows, tmp_path / "run", 2, [*named, *layout])
    (tmp_path / "merged").mkdir()
    shutil.copy(base / "config.json", tmp_path / "merged")
    save_file(merged, tmp_path / "merged" / "model.safetensors", metadata={"format": "pt"})
    expected, plain = (expected_logps([*seen], folder, None) for folder in (tmp_path / "merged", base))
    assert [*seen.values()] == pytest.approx(expected, rel=1e-5, abs=1e-4)
    assert max(abs(one - two) for one, two in zip(expected, plain, strict=True)) > 0.1, "the adapters must change the logits"


def run_with_warnings(model: Path, rows: Path, folder: Path, overrides: list[str]) -> tuple[Logps, list[str]]:
    """On a rank: a step, and the warnings about loaded files."""
    with logged("nemo_kto.run.policy") as warned:
        return run_a_step(model, rows, folder, 1, overrides), warned


@pytest.mark.full
def test_trained_adapters_on_another_base_model(
    ranks: RankPool, folders: dict[str, Path], dpo_rows: Path, tmp_path: Path
) -> None:
    """The configuration names both, so both are used; a warning says that they were not made for each other."""
    overrides = [LORA[0], f"model.peft.restore_from_path={folders['of_checkpoint']}"]
    ((seen, warned),) = ranks.run(1, run_with_warnings, folders["other"], dpo_rows, tmp_path, overrides)
    expected = expected_logps([*seen], folders["other"], folders["of_checkpoint"])
    assert [*seen.values()] == pytest.approx(expected, rel=1e-5, abs=1e-4)
    assert warned == [Message("adapters", f"{folders['of_checkpoint']}", f"{folders['base']}", f"{folders['other']}")]


def test_the_policy_itself_as_the_named_reference(
    ranks: RankPool, folders: dict[str, Path], dpo_rows: Path, tmp_path: Path
) -> None:
    """Its adapters are not merged then, so that the log-ratios are exactly zero."""
    checkpoint, tuning = folders["checkpoint"], "model.peft.lora_tuning"
    its_own = [
        f"{tuning}.adapter_dim=3",
        f"{tuning}.alpha=6",
        f"{tuning}.target_modules=[attention,mlp_fc2]",
        f"{tuning}.dora=true",
    ]
    overrides = [LORA[0], *its_own, f"model.reference.restore_from_path={checkpoint}"]
    (seen,) = ranks.run(1, run_a_step, checkpoint, dpo_rows, tmp_path, 1, overrides)
    expected = expected_logps([*seen], folders["base"], folders["of_checkpoint"])
    assert [*seen.values()] == pytest.approx(expected, rel=1e-5, abs=1e-4)
    (step,) = trajectory(tmp_path)
    assert (step["train/rewards_all_mean"], step["train/rewards_all_std"]) == (0.0, 0.0)
