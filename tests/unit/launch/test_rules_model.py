"""The rules of the model's part: sizes, recomputation, optimizer, losses, reference and adapters.

ALGORITHM stands for the name of each algorithm, ADAPTER and MODEL for folders that exist.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import pytest

from nemo_kto.launch.schema import ScheduleConfig
from nemo_kto.losses import kto as kto_losses
from nemo_kto.losses import preference as pair_losses
from nemo_kto.models.lora_settings import TARGET_MODULES
from nemo_kto.models.optimizer import SCHEDULES
from nemo_kto.recipes import KTO, Recipe
from tests.tiny import write_stub_model
from tests.unit.launch.conftest import Said, of

TUNING = "model.peft.lora_tuning"
SCHEDULE = "model.optim.sched"
LORA = "model.peft.peft_scheme=lora"
MODULES = (
    "attention_qkv, attention_dense, mlp_fc1, mlp_fc2, attention, mlp, all, q_proj, k_proj, v_proj, o_proj, gate_proj, "
    "up_proj, down_proj or embed_tokens"
)

# Overrides and what is said, of every algorithm.
BROKEN = [
    (["model.micro_batch_size=0"], ["model.micro_batch_size must be at least 1, got 0"]),
    (["model.global_batch_size=-1", "model.micro_batch_size=2"], ["model.global_batch_size must be at least 1, got -1"]),
    (["model.logprob_chunk_size=0"], ["model.logprob_chunk_size must be at least 1, got 0"]),
    (
        ["model.context_parallel_size=2"],
        [
            "model.tensor_model_parallel_size * pipeline_model_parallel_size * context_parallel_size = 1 * 1 * 2 = 2 must "
            "divide the number of ranks, got 1; use a multiple of 2 ranks (trainer.devices) or smaller sizes",
        ],
    ),
    (
        ["model.context_parallel_size=2", "trainer.devices=2", "model.data.reset_attention_mask=true"],
        [
            "model.data.reset_attention_mask must be false with model.context_parallel_size above 1, whose ranks see a part "
            "of a row each, got true; set one or the other",
        ],
    ),
    (
        ["model.context_parallel_size=2", "trainer.devices=4", "model.global_batch_size=9"],
        [
            "model.global_batch_size must be divisible by the number of data-parallel ranks = 2, got 9; use 8 or 10",
        ],
    ),
    (
        ["model.fp8=true"],
        ["model.fp8 must be hybrid, e4m3 or null, got true"],
    ),
    (
        ["model.activations_checkpoint_granularity=some"],
        ["model.activations_checkpoint_granularity must be selective, full or null, got some"],
    ),
    (
        ["model.activations_checkpoint_granularity=full", "model.activations_checkpoint_method=uniform"],
        [
            "model.activations_checkpoint_num_layers must be given with "
            "model.activations_checkpoint_granularity=full, got null; "
            "e.g. model.activations_checkpoint_num_layers=1"
        ],
    ),
    (
        [
            "model.activations_checkpoint_granularity=full",
            "model.activations_checkpoint_method=each",
            "model.activations_checkpoint_num_layers=0",
        ],
        [
            "model.activations_checkpoint_method must be uniform, block or null, got each",
            "model.activations_checkpoint_num_layers must be at least 1, got 0",
        ],
    ),
    (
        ["model.recompute_modules=[mlp,core_attn]"],
        [
            "model.recompute_modules must be null unless model.activations_checkpoint_granularity=selective, "
            "got mlp, core_attn; set one or the other"
        ],
    ),
    (
        ["model.activations_checkpoint_granularity=selective", "model.recompute_modules=[attention]"],
        ["model.recompute_modules must be mlp or core_attn, got attention"],
    ),
    (
        ["model.activations_checkpoint_method=block"],
        [
            "model.activations_checkpoint_method must be null unless "
            "model.activations_checkpoint_granularity=full, got block; "
            "set one or the other"
        ],
    ),
    (
        ["model.optim.name=sgd"],
        [
            "model.optim.name must be adam, adamw, fused_adam, distributed_fused_adam or mcore_distributed_optim, got sgd",
        ],
    ),
    (["model.optim.lr=0"], ["model.optim.lr must be above 0, got 0; e.g. model.optim.lr=1e-5"]),
    (["model.optim.lr=-1"], ["model.optim.lr must be above 0, got -1; e.g. model.optim.lr=1e-5"]),
    (["model.optim.eps=0"], ["model.optim.eps must be above 0, got 0; e.g. model.optim.eps=1e-8"]),
    (["model.optim.weight_decay=-0.1"], ["model.optim.weight_decay must be at least 0, got -0.1"]),
    (
        ["model.optim.moments_dtype=fp16", "model.optim.offload_fraction=1.5"],
        [
            "model.optim.moments_dtype must be fp32 or bf16, got fp16",
            "model.optim.offload_fraction must be from 0 to 1, got 1.5; 0.0 offloads nothing",
        ],
    ),
    (
        ["model.optim.betas=[0.9,1.0]"],
        ["model.optim.betas must be two numbers from 0 to below 1, got [0.9, 1.0]; e.g. model.optim.betas=[0.9,0.98]"],
    ),
    (
        ["model.optim.betas=[0.9]"],
        ["model.optim.betas must be two numbers from 0 to below 1, got [0.9]; e.g. model.optim.betas=[0.9,0.98]"],
    ),
    (
        ["model.optim.sched.name=cosine"],
        ["model.optim.sched.name must be CosineAnnealing, CosineWithRestarts, LinearAnnealing, WSD or constant, got cosine"],
    ),
    (
        ["model.optim.sched.warmup_ratio=0.1"],
        [
            "model.optim.sched.warmup_steps must be 0 where model.optim.sched.warmup_ratio=0.1 is given, got 10; "
            "set one or the other"
        ],
    ),
    (
        ["model.optim.sched.warmup_ratio=1"],
        ["model.optim.sched.warmup_ratio must be from 0 to below 1, got 1; e.g. 0.1"],
    ),
    (
        ["model.optim.sched.name=WSD"],
        [
            "model.optim.sched.wsd_decay_steps must be given with model.optim.sched.name=WSD, got null; "
            "e.g. model.optim.sched.wsd_decay_steps=100",
            "model.optim.sched.wsd_decay_style must be given with model.optim.sched.name=WSD, got null; "
            "e.g. model.optim.sched.wsd_decay_style=cosine",
        ],
    ),
    (
        ["model.optim.sched.name=CosineWithRestarts", "model.optim.sched.wsd_decay_steps=4"],
        [
            "model.optim.sched.wsd_decay_steps must be null unless model.optim.sched.name=WSD, got 4; set one or the other",
            "model.optim.sched.num_cycles must be given with model.optim.sched.name=CosineWithRestarts, got null; "
            "e.g. model.optim.sched.num_cycles=2",
        ],
    ),
    (
        ["model.optim.sched.num_cycles=2"],
        [
            "model.optim.sched.num_cycles must be null unless model.optim.sched.name=CosineWithRestarts, got 2; "
            "set one or the other"
        ],
    ),
    (["model.optim.sched.wsd_decay_steps=0"], ["model.optim.sched.wsd_decay_steps must be at least 1, got 0"]),
    (["model.optim.sched.warmup_steps=-1"], ["model.optim.sched.warmup_steps must be at least 0, got -1"]),
    (
        ["model.optim.lr=1e-7"],
        [
            "model.optim.sched.min_lr must be from 0 to model.optim.lr = 1e-07, got 9e-07; "
            "set both, or model.optim.sched.min_lr=0"
        ],
    ),
    (
        ["model.ALGORITHM.ref_policy_kl_penalty=0"],
        ["model.ALGORITHM.ref_policy_kl_penalty must be above 0, got 0; e.g. model.ALGORITHM.ref_policy_kl_penalty=0.1"],
    ),
    (
        ["model.ALGORITHM.ref_policy_kl_penalty=nan"],
        ["model.ALGORITHM.ref_policy_kl_penalty must be above 0, got nan; e.g. model.ALGORITHM.ref_policy_kl_penalty=0.1"],
    ),
    (
        ["model.ALGORITHM.preference_loss_weight=-1", "model.ALGORITHM.sft_loss_weight=nan"],
        [
            "model.ALGORITHM.preference_loss_weight must be at least 0, got -1",
            "model.ALGORITHM.sft_loss_weight must be at least 0, got nan",
        ],
    ),
    (
        ["model.ALGORITHM.preference_loss_weight=0"],
        [
            "model.ALGORITHM.preference_loss_weight and model.ALGORITHM.sft_loss_weight must not both be 0, "
            "got 0.0 and 0.0; nothing would be learned"
        ],
    ),
    (
        ["model.ALGORITHM.log_prob_forward_micro_batch_size=0"],
        ["model.ALGORITHM.log_prob_forward_micro_batch_size must be at least 1, got 0"],
    ),
    (["model.reference.mode=disk"], ["model.reference.mode must be auto, swap, adapter or cached, got disk"]),
    (
        ["model.reference.restore_from_path=/nowhere"],
        [
            "model.reference.restore_from_path must be a Hugging Face folder (with config.json), one of our checkpoints "
            "(with trainer.json) or adapters in PEFT format (with adapter_config.json), got /nowhere; download it or "
            "correct the path"
        ],
    ),
    (
        ["model.reference.sync_interval=-1"],
        ["model.reference.sync_interval must be at least 0, got -1; 0: the reference stays"],
    ),
    (
        ["model.reference.sync_alpha=0"],
        ["model.reference.sync_alpha must be above 0 and at most 1, got 0; e.g. 0.6"],
    ),
    (
        ["model.reference.sync_alpha=1.5"],
        ["model.reference.sync_alpha must be above 0 and at most 1, got 1.5; e.g. 0.6"],
    ),
    (
        ["model.reference.mode=adapter"],
        [
            "model.reference.mode must be auto, swap or cached without adapters, got adapter; "
            "or set model.peft.peft_scheme=lora"
        ],
    ),
    (
        ["model.reference.mode=adapter", "model.reference.sync_interval=5", LORA],
        [
            "model.reference.sync_interval must be 0 with mode adapter, where the reference is the model without adapters, "
            "got 5; use model.reference.mode=swap"
        ],
    ),
    (
        ["model.reference.mode=adapter", "model.reference.restore_from_path=MODEL", LORA],
        [
            "model.reference.restore_from_path must be null with mode adapter, where the reference is the model itself, "
            "got MODEL; use model.reference.mode=cached"
        ],
    ),
    (
        ["model.reference.mode=cached", "model.reference.sync_interval=1"],
        [
            "model.reference.sync_interval must be 0 with mode cached, whose log-probs are computed once, got 1; "
            "use model.reference.mode=swap"
        ],
    ),
    (
        ["pretrained_checkpoint.restore_from_path=ADAPTER"],
        [
            "pretrained_checkpoint.restore_from_path must be a model, got ADAPTER, which holds adapters in PEFT format; "
            "name it in model.peft.restore_from_path, and here the model that they belong to"
        ],
    ),
    (["model.peft.peft_scheme=dora"], ["model.peft.peft_scheme must be none or lora, got dora"]),
    (
        ["model.peft.restore_from_path=ADAPTER"],
        ["model.peft.restore_from_path must be null without adapters, got ADAPTER; set model.peft.peft_scheme=lora"],
    ),
    (
        ["model.peft.restore_from_path=MODEL", LORA],
        [
            "model.peft.restore_from_path must be a folder in PEFT format (with adapter_config.json), got MODEL; "
            "correct the path"
        ],
    ),
    (
        [f"{TUNING}.target_modules=[q_proj,qkv,k_proj,lm_head]"],
        [f"{TUNING}.target_modules must be {MODULES}, got qkv", f"{TUNING}.target_modules must be {MODULES}, got lm_head"],
    ),
    (
        [f"{TUNING}.target_modules=[]"],
        [f"{TUNING}.target_modules must not be empty, got none; e.g. [attention_qkv]"],
    ),
    ([f"{TUNING}.adapter_dim=0"], [f"{TUNING}.adapter_dim must be at least 1, got 0"]),  # and not alpha, which is made of it
    (
        [f"{TUNING}.alpha=0", f"{TUNING}.adapter_dim=1"],
        [f"{TUNING}.alpha must be above 0 and at most 1000000, got 0; e.g. {TUNING}.alpha=32"],
    ),
    (
        [f"{TUNING}.adapter_dropout=1"],
        [f"{TUNING}.adapter_dropout must be from 0 to below 1, got 1; e.g. 0.05"],
    ),
    (
        [f"{TUNING}.layer_selection=[0,3]"],
        [f"{TUNING}.layer_selection must be at least 1, got 0; layers are counted from 1"],
    ),
    (
        [f"{TUNING}.layer_selection=[]"],
        [f"{TUNING}.layer_selection must not be empty, got none; null adapts all"],
    ),
]


def with_folders(texts: Sequence[str], folder: Path) -> list[str]:
    return [text.replace("ADAPTER", f"{folder}/adapter").replace("MODEL", f"{folder}/model") for text in texts]


@pytest.mark.parametrize(("overrides", "texts"), BROKEN, ids=lambda value: str(value)[:50])
def test_a_rule_that_is_broken(said: Said, tmp_path: Path, overrides: list[str], texts: list[str]) -> None:
    assert said(*with_folders(of(KTO, overrides), tmp_path)) == with_folders(of(KTO, texts), tmp_path)


def test_the_other_algorithms_have_the_same_rules(said: Said, tmp_path: Path, other: Recipe) -> None:
    found = [said(*with_folders(of(other, overrides), tmp_path), recipe=other) for overrides, _ in BROKEN]
    assert found == [with_folders(of(other, texts), tmp_path) for _, texts in BROKEN]


# Overrides of which nothing is said.
RIGHT = [
    [
        "model.activations_checkpoint_granularity=full",
        "model.activations_checkpoint_method=block",
        "model.activations_checkpoint_num_layers=2",
    ],
    ["model.optim.sched.warmup_steps=20", "trainer.ALGORITHM.max_steps=2"],  # shortened where the run begins
    ["model.optim.sched.warmup_ratio=0.1", "model.optim.sched.warmup_steps=0"],
    [f"{SCHEDULE}.name=WSD", f"{SCHEDULE}.wsd_decay_steps=9", f"{SCHEDULE}.wsd_decay_style=minus_sqrt"],
    [f"{SCHEDULE}.name=CosineWithRestarts", f"{SCHEDULE}.num_cycles=3"],
    ["model.optim.sched.min_lr=0", "model.optim.betas=[0,0]"],
    ["model.optim.sched.min_lr=1e-5", "model.optim.lr=1e-5"],
    ["model.ALGORITHM.preference_loss_weight=0", "model.ALGORITHM.sft_loss_weight=0.5"],
    ["model.ALGORITHM.sft_loss_weight=0.5", "model.ALGORITHM.sft_average_log_probs=true"],
    ["model.reference.mode=swap", "model.reference.sync_interval=5", "model.reference.sync_alpha=1"],
    ["model.reference.mode=auto", "model.reference.sync_interval=5"],
    ["model.reference.mode=cached", "model.reference.restore_from_path=MODEL"],
    ["model.reference.mode=adapter", LORA],
    ["model.reference.mode=adapter", "model.reference.sync_interval=5", LORA, "model.peft.restore_from_path=ADAPTER"],
    ["model.reference.mode=cached", LORA],
    ["model.reference.restore_from_path=MODEL", LORA],
    ["model.reference.restore_from_path=ADAPTER", LORA],
    ["model.reference.restore_from_path=ADAPTER"],
    ["model.reference.restore_from_path=MODEL", "model.peft.restore_from_path=ADAPTER", LORA],
    [LORA, f"{TUNING}.target_modules=[all,q_proj]", f"{TUNING}.layer_selection=[1,30]", f"{TUNING}.alpha=0.5"],
]


@pytest.mark.parametrize("overrides", RIGHT, ids=lambda value: str(value)[:50])
def test_what_is_right_passes(said: Said, tmp_path: Path, overrides: list[str]) -> None:
    assert said(*with_folders(of(KTO, overrides), tmp_path)) == []


def test_what_is_right_passes_with_the_other_algorithms(said: Said, tmp_path: Path, other: Recipe) -> None:
    wrong = {
        str(overrides): given
        for overrides in RIGHT
        if (given := said(*with_folders(of(other, overrides), tmp_path), recipe=other))
    }
    assert wrong == {}


def test_a_checkpoint_of_ours_can_be_the_reference(said: Said, recipe: Recipe, tmp_path: Path) -> None:
    write_stub_model(tmp_path / "step=3" / "hf")
    (tmp_path / "step=3" / "trainer.json").write_text('{"dtype": "float32", "files": {}}')
    assert said(f"model.reference.restore_from_path='{tmp_path}/step=3'", recipe=recipe) == []


def checkpoint_of_adapters(folder: Path, base: Path) -> Path:
    write_stub_model(folder / "hf")
    adapters = {"base_model": str(base), "settings": {"rank": 1, "alpha": 1.0}}
    (folder / "trainer.json").write_text(json.dumps({"dtype": "float32", "files": {}, "adapters": adapters}))
    return folder


def test_a_policy_whose_adapters_would_not_be_used_is_refused(said: Said, recipe: Recipe, tmp_path: Path) -> None:
    key = "pretrained_checkpoint.restore_from_path"
    trained = checkpoint_of_adapters(tmp_path / "step", tmp_path / "model")
    named, adapter = f"{key}={trained}", f"model.peft.restore_from_path={tmp_path}/adapter"
    assert said(named, LORA, recipe=recipe) == []
    assert said(named, recipe=recipe) == [
        f"{key} must be a whole model without adapters, got {trained}, which holds only adapters; set "
        f"model.peft.peft_scheme=lora, or merge them first: nemo-kto export {trained} FOLDER"
    ]
    assert said(named, LORA, adapter, recipe=recipe) == [
        f"model.peft.restore_from_path must be null where {key} brings adapters of its own, got {tmp_path}/adapter; give "
        "one of them"
    ]


def test_adapters_without_their_base_model_are_refused(said: Said, recipe: Recipe, tmp_path: Path) -> None:
    lost = checkpoint_of_adapters(tmp_path / "step", tmp_path / "gone")
    for key in ("pretrained_checkpoint.restore_from_path", "model.reference.restore_from_path"):
        assert said(f"{key}={lost}", LORA, recipe=recipe) == [
            f"{key} must have the base model of its adapters where trainer.json names it, got {lost} with {tmp_path}/gone, "
            "which is no model on this machine; put it there, or correct trainer.json"
        ]


def test_a_reference_of_another_shape_is_refused(said: Said, recipe: Recipe, tmp_path: Path) -> None:
    for name, size in (("model", 64), ("other", 32)):
        write_stub_model(tmp_path / name)
        config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": size}
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    trained = checkpoint_of_adapters(tmp_path / "step", tmp_path / "other")
    for reference in (tmp_path / "other", trained):
        assert said(f"model.reference.restore_from_path={reference}", recipe=recipe) == [
            f"model.reference.restore_from_path must be a model of the same shape as the policy in {tmp_path}/model, got "
            f"{tmp_path}/other with hidden_size 32 instead of 64; name another model, or train one of its shape"
        ]
    assert said(f"model.reference.restore_from_path={tmp_path}/model", recipe=recipe) == []


def test_every_target_that_is_offered_is_taken(said: Said) -> None:
    assert f"{', '.join(TARGET_MODULES[:-1])} or {TARGET_MODULES[-1]}" == MODULES
    assert said(LORA, f"{TUNING}.target_modules=[{','.join(TARGET_MODULES)}]") == []


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"layer_selection": "[1]"}, "where only some layers are adapted: it lies in none"),
        ({"dora": "true"}, "with DoRA"),
    ],
)
def test_an_embedding_is_adapted_whole_and_alike(said: Said, changes: dict[str, str], why: str) -> None:
    given = [LORA, *(f"{TUNING}.{key}={value}" for key, value in changes.items())]
    targets = f"{TUNING}.target_modules"
    assert said(*given, f"{targets}=[embed_tokens,o_proj]") == [
        f"{targets} must leave out embed_tokens {why}, got embed_tokens, o_proj"
    ]
    assert said(*given, f"{targets}=[o_proj]") == []


def test_an_embedding_that_is_the_output_layer_too_is_not_adapted(said: Said, tmp_path: Path) -> None:
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    assert said(LORA, f"{TUNING}.target_modules=[embed_tokens]") == [
        f"{TUNING}.target_modules must leave out embed_tokens where it is the output layer too, which peft would not adapt "
        "with it, got embed_tokens"
    ]


def test_a_layer_that_cannot_be_is_told_of_and_no_more(said: Said) -> None:
    """Rules that look at the adapters are not asked about values that are wrong by themselves."""
    (told,) = said(LORA, f"{TUNING}.target_modules=[embed_tokens]", f"{TUNING}.layer_selection=[0]")
    assert told.startswith(f"{TUNING}.layer_selection")


def test_names_are_those_of_the_modules_that_use_them() -> None:
    assert set(get_args(ScheduleConfig.model_fields["name"].annotation)) == set(SCHEDULES)
    assert set(kto_losses.LOSSES) == {"kto", "apo_zero_unpaired", "bco"}
    difference = {
        "dpo",
        "ipo",
        "hinge",
        "robust",
        "exo_pair",
        "discopop",
        "rpo_sq",
        "rpo_bwd_kl",
        "rpo_fwd_kl",
        "simpo",
        "orpo",
    }
    anchored = {"nca_pair", "bco_pair", "sppo_hard", "apo_zero", "apo_down"}
    assert set(pair_losses.LOSSES) == difference | anchored | {"aot", "aot_unpaired"}
