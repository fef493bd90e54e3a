"""Keys that must stay the same in a resumed run, and keys that may change.

`python -m nemo_kto.config.resume_policy` prints the table in docs/checkpoints.md; a test compares the two.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import NamedTuple


class Rule(NamedTuple):
    """Keys that are treated the same in a resumed run.

    Attributes:
        keys: dotted names or fnmatch patterns; NAME stands for the algorithm.
        meaning: what must stay the same, or the effect of a change.
    """

    keys: tuple[str, ...]
    meaning: str


# An exact name takes precedence over a pattern.
MUST_STAY = (
    Rule(("algorithm",), "the algorithm"),
    Rule(("pretrained_checkpoint.restore_from_path",), "weights, configuration, tokenizer and chat template, by content"),
    Rule(("model.reference.restore_from_path",), "weights and configuration, by content"),
    Rule(("model.reference.sync_interval", "model.reference.sync_alpha"), "the same; `sync_alpha` where it is used"),
    Rule(("model.peft.peft_scheme", "model.peft.lora_tuning.*"), "which adapters there are, however they are written"),
    Rule(("model.peft.restore_from_path",), "the adapters, by content"),
    Rule(("model.NAME.*",), "the loss, its weights and options; `null` is the same as the default of the loss"),
    Rule(
        ("model.data.data_prefix", "model.data.splits_string", "model.data.fields"),
        "tokens, labels, weights and order of the training and the validation rows, by content; names of validation sets",
    ),
    Rule(("trainer.NAME.limit_train_batches",), "the number of steps in an epoch"),
    Rule(("model.data.seq_length", "model.data.truncation_mode"), "the same"),
    Rule(("model.data.reset_attention_mask", "model.data.eod_mask_loss"), "the same"),
    Rule(("model.data.default_chosen_reward", "model.data.default_rejected_reward"), "the same"),
    Rule(("model.global_batch_size", "model.seed", "model.moe_aux_loss_coeff"), "the same"),
    Rule(("trainer.precision",), "the same; `auto` keeps it"),
    Rule(("model.optim.name", "model.optim.use_distributed_optimizer"), "the same"),
)
MAY_CHANGE = (
    Rule(
        (
            "trainer.num_nodes",
            "trainer.devices",
            "trainer.accelerator",
            "model.*_parallel_size",
            "model.sequence_parallel",
            *(f"model.num_layers_in_{end}_pipeline_stage" for end in ("first", "last")),
            *(f"model.account_for_{end}_in_pipeline_split" for end in ("embedding", "loss")),
        ),
        "the layout: results agree within rounding",
    ),
    Rule(
        (
            *("model.micro_batch_size", "model.micro_batch_tokens", "model.NAME.log_prob_forward_micro_batch_size"),
            "model.logprob_chunk_size",
            *(f"model.activations_checkpoint_{part}" for part in ("granularity", "method", "num_layers")),
            *("model.recompute_modules", "model.optim.overlap", "model.optim.offload_fraction"),
            *(
                "model.data.packing",
                "model.fp8",
                "model.data.num_workers",
                "model.data.preprocess_workers",
                "trainer.timeout_minutes",
            ),
        ),
        "speed and memory",
    ),
    Rule(("model.reference.mode",), "how the reference is held"),
    Rule(
        (
            *("model.optim.lr", "model.optim.weight_decay", "model.optim.betas", "model.optim.eps", "model.optim.sched.*"),
            *("model.optim.moments_dtype", "trainer.NAME.gradient_clip_val", "model.peft.lora_tuning.adapter_dropout"),
        ),
        "counts from the next step on",
    ),
    Rule(
        ("trainer.NAME.max_epochs", "trainer.NAME.max_steps"),
        "the run becomes longer or shorter, and its schedule is that of the new length",
    ),
    Rule(
        (
            *("trainer.NAME.val_check_interval", "trainer.NAME.val_before_training", "trainer.NAME.save_interval"),
            *("trainer.NAME.limit_val_batches", "trainer.max_time", "trainer.stop_signals", "trainer.requeue"),
            *("trainer.max_skipped_steps", "trainer.callbacks", "trainer.NAME.log_every_n_steps"),
            *("exp_manager.create_early_stopping_callback", "exp_manager.early_stopping_callback_params.*"),
        ),
        "when to log, validate, save and end, and what hangs on the loop",
    ),
    Rule(("exp_manager.*",), "logging, and which checkpoints are kept; another folder is another run"),
    Rule(("model.data.cache_dir", "model.data.cache_shared", "export.*"), "where files are written, and who may read them"),
)


def rule_of(key: str, *, name: str) -> tuple[Rule, bool] | None:
    """Return the rule for a key of the algorithm ``name``, and whether the key must stay; None if no rule matches."""
    rules = [(rule, True) for rule in MUST_STAY] + [(rule, False) for rule in MAY_CHANGE]
    for matches in (str.__eq__, fnmatchcase):
        for rule, stays in rules:
            if any(matches(key, pattern.replace("NAME", name)) for pattern in rule.keys):
                return rule, stays
    return None


def as_markdown() -> str:
    """Return the table in docs/checkpoints.md."""
    lines = ["| must stay | what is compared |", "|---|---|", *map(_line, MUST_STAY)]
    return "\n".join([*lines, "", "| may change | in a resumed run |", "|---|---|", *map(_line, MAY_CHANGE)])


def _line(rule: Rule) -> str:
    return f"| {', '.join(f'`{key}`' for key in rule.keys)} | {rule.meaning} |"


if __name__ == "__main__":
    print(as_markdown())
