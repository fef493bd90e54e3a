"""NeMo-Aligner's files compose, and names of other trainers suggest the keys of this project."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from nemo_kto.algorithms.recipes import KTO, RECIPES, Recipe
from nemo_kto.cli.job import Job
from nemo_kto.config import compose, migration
from nemo_kto.config.schema import RunConfig, config_type
from nemo_kto.utils.fields import names
from tests.helpers.messages import Message
from tests.unit.conftest import composed, mistakes

REPOSITORY = Path(__file__).resolve().parents[3]
FILES = REPOSITORY / "tests/data/nemo_aligner"  # names and values of the files of NeMo-Aligner
LAPTOP = ["trainer.num_nodes=1", "trainer.devices=1"]


ALWAYS = [
    Message("exp_manager.checkpoint_callback_params.filename"),
    Message("model.overwrite_base_config.data.data_prefix"),
    Message("model.peft.lora_tuning.column_init_method", "PEFT"),
]


def of_aligner(recipe: Recipe) -> compose.Source:
    return compose.Source(config_name=f"gpt_{recipe.name}", config_dir=str(FILES))


def aligner(recipe: Recipe, *overrides: str) -> tuple[RunConfig | None, list[str], list[str]]:
    """The typed configuration, the messages at the start, and the errors."""
    config = compose.load([*LAPTOP, *overrides], source=of_aligner(recipe))
    cfg, wrong = compose.to_config(config, recipe=recipe)
    return cfg, compose.notes(config), [str(mistake) for mistake in wrong]


def test_aligner_files_run_unchanged(recipe: Recipe, good: list[str]) -> None:
    job = Job(recipe=recipe, source=of_aligner(recipe), world=None)
    assert job.checker(sweep=False).errors([*good, *LAPTOP]) == []
    cfg, notes, wrong = aligner(recipe, *good)
    assert wrong == []
    assert cfg is not None
    assert sorted(notes) == ALWAYS
    optim, data, loop = cfg.model.optim, cfg.model.data, cfg.loop
    assert (optim.name, optim.lr, optim.betas, optim.weight_decay) == ("adam", 9e-6, [0.9, 0.98], 0.1)
    assert (optim.sched.warmup_steps, optim.sched.constant_steps, optim.sched.min_lr) == (10, 1000, 9e-7)
    assert (data.splits_string, data.seq_length) == (None, composed([], recipe).model.data.seq_length)
    assert (loop.max_epochs, loop.max_steps, loop.val_check_interval, loop.gradient_clip_val) == (1, -1, 0.1, 1.0)
    assert cfg.exp_manager.explicit_log_dir == "/results"
    assert cfg.exp_manager.exp_dir == "results", "null stands for our default"
    assert cfg.exp_manager.wandb_logger_kwargs.project == f"nemo_aligner_{recipe.name}"
    assert cfg.loss.ref_policy_kl_penalty == 0.2
    assert cfg.loss.log_prob_forward_micro_batch_size == (2 if recipe is KTO else 1)


def test_overrides_of_an_aligner_file(good: list[str]) -> None:
    given = ["+model.tensor_model_parallel_size=2", "++model.seed=7", "model.encoder_seq_length=512", "hardware=cpu"]
    cfg, notes, wrong = aligner(
        KTO, *good[:2], *given, "model.megatron_amp_O2=false", "+model.optim.overlap_param_sync=true"
    )
    assert wrong == []
    assert cfg is not None
    assert (cfg.model.tensor_model_parallel_size, cfg.model.seed, cfg.model.data.seq_length) == (2, 7, 512)
    assert (cfg.trainer.accelerator, cfg.trainer.precision) == ("cpu", "32"), "hardware= comes after the file"
    assert sorted(line for line in notes if line not in ALWAYS) == [
        Message("exp_manager.checkpoint_callback_params.model_parallel_size"),
        Message("model.megatron_amp_O2", "bf16", "fp32"),
        Message("model.optim.overlap_param_sync", "model.optim.overlap"),
    ]
    cfg, _, wrong = aligner(KTO, *good, "recipe=qwen3_8b_lora")
    assert wrong == []
    assert cfg is not None
    assert (cfg.model.global_batch_size, cfg.model.peft.peft_scheme) == (32, "lora"), "and so does recipe="


def test_required_overrides_of_an_aligner_file(recipe: Recipe) -> None:
    assert aligner(recipe)[2] == [
        Message("pretrained_checkpoint.restore_from_path", "nothing", "folder"),
        Message("model.data.data_prefix", "nothing", "file", "folder", "list"),
    ]


def test_aligner_values_without_equivalent_are_refused_with_the_reason(good: list[str]) -> None:
    asked = {
        "model.mcore_gpt=false": Message("model.mcore_gpt", "true", "false", "megatron-core"),
        "trainer.max_steps=5": Message("trainer.max_steps", "trainer.kto.max_steps", "-1", "5", "set"),
        "model.data.data_impl=packed_jsonl": Message("model.data.data_impl", "packed_jsonl", "content"),
        "exp_manager.create_checkpoint_callback=false": Message(
            "exp_manager.create_checkpoint_callback", "true", "false", "last", "trainer.kto.save_interval=0"
        ),
        "model.ub_tp_comm_overlap=true": Message("model.ub_tp_comm_overlap", "false", "Transformer Engine", "optimizer.md"),
        "precision=16": Message("trainer.precision", "bf16", "16", "set"),
    }
    job = Job(recipe=KTO, source=of_aligner(KTO), world=None)
    assert [str(wrong) for wrong in job.checker(sweep=False).errors([*good, *LAPTOP, *asked])] == [*asked.values()]


def test_all_wrong_keys_of_a_file_are_listed_with_their_lines(tmp_path: Path, good: list[str]) -> None:
    file = tmp_path / "mine.yaml"
    wrong = "model:\n  optim:\n    lrr: 3\n  foo: {a: 1}\n  seed: x\ntrainer:\n  stps: 3\n  beta: 1\nbar: 1\n"
    file.write_text(f"defaults:\n  - gpt_kto\n  - _self_\n{wrong}")
    job = Job(recipe=KTO, source=compose.Source(config_name="mine", config_dir=str(tmp_path)), world=None)
    assert [str(mistake) for mistake in job.checker(sweep=False).errors([*good, "model.sed=1"])] == [
        Message("model.sed", "model.sed=1", "model.seed"),
        Message("trainer.stps", f"{file}:10", "3", "kto", "--help", "all"),
        Message("trainer.beta", f"{file}:11", "model.kto.ref_policy_kl_penalty", "1"),
        Message("model.seed", f"{file}:8", "integer", "x"),
        Message("model.optim.lrr", f"{file}:6", "3", "model.optim.lr"),
        Message("model.foo", f"{file}:7", "model.foo.a=1", "kto", "--help", "all"),
        Message(f"{file}:12", "1", "kto", "--help", "all"),
    ]


# As the users of other trainers write them, with KTO's command.
NAMES = {
    "loss_type": ["model.kto.preference_loss"],
    "desirable_weight": ["model.kto.desirable_loss_weight"],
    "max_length": ["model.data.seq_length"],
    "max_prompt_length": ["model.data.seq_length", "prompt", "response", "model.data.truncation_mode"],
    "learning_rate": ["model.optim.lr"],
    "gradient_accumulation_steps": ["model.global_batch_size", "step"],
    "num_train_epochs": ["trainer.kto.max_epochs"],
    "warmup_ratio": ["model.optim.sched.warmup_ratio", "model.optim.sched.warmup_steps=0"],
    "lr_scheduler_type": ["model.optim.sched.name", "CosineAnnealing", "CosineWithRestarts", "LinearAnnealing", "WSD"],
    "bf16": ["trainer.precision", "bf16"],
    "torch_dtype": ["trainer.precision", "bf16", "32"],
    "precompute_ref_log_probs": ["model.reference.mode"],
    "sync_ref_model": ["model.reference.sync_interval", "0"],
    "output_dir": ["exp_manager.explicit_log_dir"],
    "eval_strategy": ["trainer.kto.val_check_interval"],
    "metric_for_best_model": ["exp_manager.checkpoint_callback_params.monitor"],
    "max_grad_norm": ["trainer.kto.gradient_clip_val"],
    "model_name_or_path": ["pretrained_checkpoint.restore_from_path"],
    "dataset_name": ["model.data.data_prefix"],
    "lora_r": ["model.peft.lora_tuning.adapter_dim"],
    "lora_target_modules": ["model.peft.lora_tuning.target_modules"],
    "use_peft": ["model.peft.peft_scheme", "lora"],
    "model.kto.average_log_probs": ["model.kto.preference_average_log_probs"],
    "tp": ["model.tensor_model_parallel_size"],
    "model.tensor_parallel_size": ["model.tensor_model_parallel_size"],
    "train-iters": ["trainer.kto.max_steps"],
    "recompute-granularity": ["model.activations_checkpoint_granularity"],
    "dpo.reference_policy_kl_penalty": ["model.kto.ref_policy_kl_penalty"],
    "policy.train_global_batch_size": ["model.global_batch_size"],
    "policy.model_name": ["pretrained_checkpoint.restore_from_path"],
    "checkpointing.keep_top_k": ["exp_manager.checkpoint_callback_params.save_top_k"],
    "cluster.gpus_per_node": ["trainer.devices"],
}
# Those that have our last name, and slips of the pen.
MEANT = {
    "seed": ["model.seed"],
    "max_steps": ["trainer.kto.max_steps"],
    "micro-batch-size": ["model.micro_batch_size"],
    "tensor-model-parallel-size": ["model.tensor_model_parallel_size"],
    "pipeline_model_parallel_size": ["model.pipeline_model_parallel_size"],
    "policy.megatron_cfg.sequence_parallel": ["model.sequence_parallel"],
    "weight_decay": ["model.optim.weight_decay"],
    "save-interval": ["trainer.kto.save_interval"],
    "warmup_steps": ["model.optim.sched.warmup_steps"],
    "cluster.num_nodes": ["trainer.num_nodes"],
    "model.data.splits_strings": ["model.data.splits_string"],
    "model.optim.weight_decy": ["model.optim.weight_decay"],
}


def test_names_of_other_trainers_suggest_our_keys() -> None:
    expected = [Message(name, f"{name}=1", *ours) for name, ours in (NAMES | MEANT).items()]
    without = {"moe_router_load_balancing_type": ("seq_aux_loss", "docs/scale/experts.md")}
    expected += [Message(name, f"{name}=1", *reason) for name, reason in without.items()]
    expected += [Message("learning_rat", "learning_rate", "model.optim.lr", "learning_rat=1")]
    assert len(expected) >= 40
    assert mistakes([f"{name}=1" for name in (*NAMES, *MEANT, *without, "learning_rat")]) == expected


def test_every_key_in_the_tables_exists() -> None:
    known = {recipe.name: set(names(config_type(recipe))) for recipe in RECIPES.values()}
    for name, keys in known.items():
        aliases = {**migration.aliases(), **RECIPES[name].aliases}
        assert len(aliases) > 150
        assert not {target.replace("NAME", name).split()[0] for target in aliases.values()} - keys
        entries = migration.aligner_keys(name).values()
        assert len(entries) >= 40
        assert not [entry.same_as for entry in entries if entry.same_as is not None and entry.same_as not in keys]
        assert not [entry.key for entry in entries if entry.key in keys], "ours needs no entry"


def test_the_table_has_every_key_of_the_aligner_files(recipe: Recipe) -> None:
    theirs: Any = OmegaConf.load(FILES / f"gpt_{recipe.name}.yaml")
    del theirs["defaults"]
    ours = names(config_type(recipe))
    known = [key for key in compose.known_keys(theirs) if key in ours or migration.aligner_key(key)]
    assert known == compose.known_keys(theirs)
