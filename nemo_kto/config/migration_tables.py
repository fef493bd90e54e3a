"""Tables: keys that only NeMo-Aligner has, and our names for keys of TRL, Hugging Face, Megatron-LM and NeMo-RL."""

from __future__ import annotations

from typing import NamedTuple


class AlignerKey(NamedTuple):
    """A key or section of NeMo-Aligner's files that this package does not have.

    Attributes:
        key: dotted name; {algorithm} stands for the name of the algorithm.
        why: why the key is not needed, or what to do instead.
        agrees: values that request the behavior of this package, which are accepted silently.
        same_as: our key whose value is accepted silently as well.
        ignored: whether other values are accepted, with a line that prints ``why``; otherwise they are errors.
    """

    key: str
    why: str
    agrees: tuple[object, ...] = ()
    same_as: str | None = None
    ignored: bool = False

    def of(self, algorithm: str) -> AlignerKey:
        """Return the entry with {algorithm} replaced by the name of an algorithm."""
        same_as = None if self.same_as is None else self.same_as.format(algorithm=algorithm)
        key, why = (text.format(algorithm=algorithm) for text in (self.key, self.why))
        return self._replace(key=key, why=why, same_as=same_as)


ALIGNER = (
    AlignerKey("precision", "set trainer.precision", same_as="trainer.precision"),
    AlignerKey("trainer.logger", "exp_manager.create_tensorboard_logger and the like choose the loggers", agrees=(False,)),
    AlignerKey("trainer.enable_checkpointing", "checkpoints are always written, see exp_manager", agrees=(False,)),
    AlignerKey("trainer.use_distributed_sampler", "the ranks always share each global batch", agrees=(False,)),
    AlignerKey(
        "trainer.max_epochs", "set trainer.{algorithm}.max_epochs", same_as="trainer.{algorithm}.max_epochs"
    ),
    AlignerKey("trainer.max_steps", "set trainer.{algorithm}.max_steps", same_as="trainer.{algorithm}.max_steps"),
    AlignerKey(
        "trainer.gradient_clip_val",
        "set trainer.{algorithm}.gradient_clip_val",
        same_as="trainer.{algorithm}.gradient_clip_val",
    ),
    AlignerKey("exp_manager.max_time_per_run", "set trainer.max_time", same_as="trainer.max_time"),
    AlignerKey(
        "exp_manager.resume_from_checkpoint",
        "a run resumes in its own folder (exp_manager.explicit_log_dir); a new one starts from "
        "pretrained_checkpoint.restore_from_path",
        agrees=(None,),
    ),
    AlignerKey(
        "exp_manager.resume_ignore_no_checkpoint", "a run without a checkpoint starts from the beginning", agrees=(True,)
    ),
    AlignerKey(
        "exp_manager.create_checkpoint_callback",
        "the last step is always saved; trainer.{algorithm}.save_interval=0 saves no other",
        agrees=(True,),
    ),
    AlignerKey(
        "exp_manager.checkpoint_callback_params.always_save_nemo",
        "no .nemo files are written; checkpoints are exported with `nemo-kto export`",
        agrees=(False,),
    ),
    AlignerKey(
        "exp_manager.checkpoint_callback_params.save_nemo_on_train_end",
        "the export in Hugging Face format takes its place, set export.enabled=false",
        agrees=(True,),
    ),
    AlignerKey(
        "exp_manager.checkpoint_callback_params.filename",
        "checkpoints are named after their step, and what they resume from is inside them",
        ignored=True,
    ),
    AlignerKey(
        "exp_manager.checkpoint_callback_params.model_parallel_size",
        "checkpoints can be loaded at any parallel size",
        agrees=(1,),
        ignored=True,
    ),
    AlignerKey("model.mcore_gpt", "every model is one of megatron-core", agrees=(True,)),
    AlignerKey(
        "model.megatron_amp_O2",
        "in bf16 the weights are in bf16 and the optimizer keeps fp32 copies",
        agrees=(True,),
        ignored=True,
    ),
    AlignerKey(
        "model.encoder_seq_length",
        "rows have at most model.data.seq_length tokens",
        same_as="model.data.seq_length",
        ignored=True,
    ),
    AlignerKey("model.max_position_embeddings", "the model's config.json says it", ignored=True),
    AlignerKey("model.precision", "set trainer.precision", same_as="trainer.precision"),
    AlignerKey("model.ub_tp_comm_overlap_cfg", "communication is not overlapped", agrees=(None,), ignored=True),
    AlignerKey("model.overwrite_base_config", "no configuration of a checkpoint is merged with this one", ignored=True),
    AlignerKey("model.peft.restore_from_ckpt", "name a PEFT folder in model.peft.restore_from_path", agrees=(None,)),
    AlignerKey("model.peft.lora_tuning.column_init_method", "A is drawn as PEFT draws it", ignored=True),
    AlignerKey("model.peft.lora_tuning.row_init_method", "B starts at zero, as the reference does", agrees=("zero",)),
    AlignerKey("model.peft.lora_tuning.weight_tying", "every layer has adapters of its own", agrees=(False,)),
    AlignerKey("model.peft.lora_tuning.position_embedding_strategy", "it is for weight_tying", agrees=(None,)),
    AlignerKey("model.optim.bucket_cap_mb", "megatron-core chooses the size of its buckets", agrees=(200,), ignored=True),
    AlignerKey("model.optim.overlap_grad_sync", "model.optim.overlap says it", agrees=(False,), ignored=True),
    AlignerKey("model.optim.overlap_param_sync", "model.optim.overlap says it", agrees=(False,), ignored=True),
    AlignerKey(
        "model.optim.contiguous_grad_buffer", "gradients always lie in one buffer", agrees=(True,), ignored=True
    ),
    AlignerKey("model.data.data_impl", "rows are read from jsonl files", agrees=("jsonl",)),
    AlignerKey("model.data.skip_warmup", "files are not read ahead", agrees=(True,), ignored=True),
    AlignerKey(
        "model.data.dataloader_type", "training rows are shuffled in every epoch", agrees=("single", "cyclic"), ignored=True
    ),
    AlignerKey(
        "model.data.reset_position_ids",
        "rotary embeddings only see distances; model.data.reset_attention_mask=true separates documents",
        agrees=(False,),
        ignored=True,
    ),
    AlignerKey(
        "model.data.index_mapping_dir", "tokenised rows are kept in model.data.cache_dir", agrees=(None,), ignored=True
    ),
    AlignerKey(
        "model.data.pad_length_to_multiple_of", "rows are padded to what the layout needs", agrees=(None,), ignored=True
    ),
    AlignerKey(
        "model.data.validation_drop_last", "the last validation batch is used although it is not full", ignored=True
    ),
    AlignerKey("model.data.append_eod", "answers end with the EOS token unless they have been cut", agrees=(True,)),
    AlignerKey("model.data.apply_ftfy", "clean the file first, e.g. with ftfy", agrees=(False,)),
)  # fmt: skip

# Name in another trainer -> our key; a hint about the value may follow a space.
_LOOP = "trainer.{algorithm}"
_LOSS = "model.{algorithm}"
_SCHEDULES = "CosineAnnealing, CosineWithRestarts, LinearAnnealing, WSD or constant"
_TRL = {
    "beta": f"{_LOSS}.ref_policy_kl_penalty",
    "loss_type": f"{_LOSS}.preference_loss",
    "rpo_alpha": f"{_LOSS}.sft_loss_weight (with sft_average_log_probs=true; for pairs sft_token_mean=true is TRL's mean)",
    "max_length": "model.data.seq_length",
    "max_prompt_length": "model.data.seq_length (of prompt and answer; model.data.truncation_mode says what is cut)",
    "max_completion_length": "model.data.seq_length (of prompt and answer)",
    "dataset_name": "model.data.data_prefix",
    "dataset_path": "model.data.data_prefix",
    "dataset_train_split": "model.data.data_prefix (a mapping with train and validation)",
    "dataset_test_split": "model.data.data_prefix (a mapping with train and validation)",
    "eval_dataset": "model.data.data_prefix (a mapping; its validation may be a mapping too, from names to files)",
    "train_file": "model.data.data_prefix",
    "data_files": "model.data.data_prefix",
    "data_dir": "model.data.data_prefix",
    "reference_free": f"{_LOSS}.preference_loss (of a loss that needs no reference)",
    "dataset_num_proc": "model.data.preprocess_workers",
    "precompute_ref_log_probs": "model.reference.mode (cached)",
    "precompute_ref_batch_size": f"{_LOSS}.log_prob_forward_micro_batch_size",
    "sync_ref_model": "model.reference.sync_interval (above 0)",
    "ref_model_sync_steps": "model.reference.sync_interval",
    "ref_model_mixup_alpha": "model.reference.sync_alpha",
    "ref_model": "model.reference.restore_from_path",
    "model_name_or_path": "pretrained_checkpoint.restore_from_path",
    "model_name": "pretrained_checkpoint.restore_from_path",
    "use_peft": "model.peft.peft_scheme (lora)",
    "lora_r": "model.peft.lora_tuning.adapter_dim",
    "lora_rank": "model.peft.lora_tuning.adapter_dim",
    "lora_alpha": "model.peft.lora_tuning.alpha",
    "use_rslora": "model.peft.lora_tuning.rslora",
    "use_dora": "model.peft.lora_tuning.dora",
    "lora_dropout": "model.peft.lora_tuning.adapter_dropout",
    "lora_target_modules": "model.peft.lora_tuning.target_modules",
    "layers_to_transform": "model.peft.lora_tuning.layer_selection (counted from 1)",
    "adapter_name_or_path": "model.peft.restore_from_path",
}
_HUGGING_FACE = {
    "output_dir": "exp_manager.explicit_log_dir",
    "logging_dir": "exp_manager.explicit_log_dir",
    "run_name": "exp_manager.name",
    "report_to": "exp_manager.create_wandb_logger (true; or create_tensorboard_logger, create_mlflow_logger)",
    "learning_rate": "model.optim.lr",
    "optim": "model.optim.name (adam)",
    "lr_scheduler_type": f"model.optim.sched.name ({_SCHEDULES})",
    "warmup_ratio": "model.optim.sched.warmup_ratio (with model.optim.sched.warmup_steps=0)",
    "num_warmup_steps": "model.optim.sched.warmup_steps",
    "num_decay_steps": "model.optim.sched.wsd_decay_steps",
    "adam_beta1": "model.optim.betas (a list of two)",
    "adam_beta2": "model.optim.betas (a list of two)",
    "adam_epsilon": "model.optim.eps",
    "max_grad_norm": f"{_LOOP}.gradient_clip_val",
    "num_train_epochs": f"{_LOOP}.max_epochs",
    "max_train_steps": f"{_LOOP}.max_steps",
    "per_device_train_batch_size": "model.micro_batch_size (model.global_batch_size is that of a step, over all ranks)",
    "per_device_eval_batch_size": f"{_LOSS}.log_prob_forward_micro_batch_size",
    "train_batch_size": "model.global_batch_size",
    "batch_size": "model.global_batch_size",
    "gradient_accumulation_steps": "model.global_batch_size (rows of a step: micro-batch * accumulation * ranks)",
    "gradient_checkpointing_kwargs": "model.activations_checkpoint_granularity (selective or full)",
    "activation_checkpointing_kwargs": "model.activations_checkpoint_granularity (selective or full)",
    "gradient_checkpointing": "model.activations_checkpoint_granularity (selective or full)",
    "activation_checkpointing": "model.activations_checkpoint_granularity (selective or full)",
    "save_strategy": f"{_LOOP}.save_interval (steps, or a fraction of an epoch)",
    "eval_strategy": f"{_LOOP}.val_check_interval (steps, or a fraction of an epoch)",
    "evaluation_strategy": f"{_LOOP}.val_check_interval (steps, or a fraction of an epoch)",
    "deepspeed": "model.optim.use_distributed_optimizer (ZeRO-1; model.tensor_model_parallel_size shards the weights)",
    "fsdp": "model.optim.use_distributed_optimizer (ZeRO-1; model.tensor_model_parallel_size shards the weights)",
    "use_liger_kernel": "model.logprob_chunk_size (tokens whose logits exist at the same time)",
    "logging_steps": f"{_LOOP}.log_every_n_steps",
    "logging_strategy": f"{_LOOP}.log_every_n_steps",
    "save_steps": f"{_LOOP}.save_interval",
    "eval_steps": f"{_LOOP}.val_check_interval",
    "eval_on_start": f"{_LOOP}.val_before_training",
    "save_total_limit": "exp_manager.checkpoint_callback_params.save_top_k",
    "load_best_model_at_end": "export.which (best)",
    "metric_for_best_model": "exp_manager.checkpoint_callback_params.monitor",
    "greater_is_better": "exp_manager.checkpoint_callback_params.mode (max or min)",
    "early_stopping_patience": "exp_manager.early_stopping_callback_params.patience",
    "early_stopping_threshold": "exp_manager.early_stopping_callback_params.min_delta",
    "resume_from_checkpoint": "exp_manager.resume_if_exists (a run resumes in its exp_manager.explicit_log_dir)",
    "overwrite_output_dir": "exp_manager.resume_if_exists",
    "bf16": "trainer.precision (bf16)",
    "fp16": "trainer.precision (bf16 or 32)",
    "dtype": "trainer.precision (bf16 or 32)",
    "torch_dtype": "trainer.precision (bf16 or 32)",
    "use_cpu": "trainer.accelerator (cpu)",
    "data_seed": "model.seed",
    "dataloader_num_workers": "model.data.num_workers",
    "ddp_timeout": "trainer.timeout_minutes (in minutes)",
    "max_eval_samples": f"{_LOOP}.limit_val_batches (in global batches)",
    "max_train_samples": f"{_LOOP}.limit_train_batches (in global batches)",
    "push_to_hub": "export.path (a folder, to be uploaded with `hf upload`)",
    "hub_model_id": "export.path (a folder, to be uploaded with `hf upload`)",
    "max_shard_size": "export.max_shard_size_gb",
}
_MEGATRON = {
    "tp": "model.tensor_model_parallel_size",
    "tp_size": "model.tensor_model_parallel_size",
    "tensor_parallel_size": "model.tensor_model_parallel_size",
    "pp": "model.pipeline_model_parallel_size",
    "pp_size": "model.pipeline_model_parallel_size",
    "pipeline_parallel_size": "model.pipeline_model_parallel_size",
    "vpp": "model.virtual_pipeline_model_parallel_size",
    "num_virtual_stages_per_pipeline_rank": "model.virtual_pipeline_model_parallel_size",
    "decoder_first_pipeline_num_layers": "model.num_layers_in_first_pipeline_stage",
    "decoder_last_pipeline_num_layers": "model.num_layers_in_last_pipeline_stage",
    "cp": "model.context_parallel_size",
    "ep": "model.expert_model_parallel_size",
    "expert_parallel_size": "model.expert_model_parallel_size",
    "etp": "model.expert_tensor_parallel_size",
    "aux_loss_coef": "model.moe_aux_loss_coeff",
    "router_aux_loss_coef": "model.moe_aux_loss_coeff (of each sequence by itself, docs/experts.md)",
    "max_seq_length": "model.data.seq_length",
    "max_seq_len": "model.data.seq_length",
    "train_iters": f"{_LOOP}.max_steps",
    "log_interval": f"{_LOOP}.log_every_n_steps",
    "eval_interval": f"{_LOOP}.val_check_interval",
    "eval_iters": f"{_LOOP}.limit_val_batches",
    "lr_decay_style": f"model.optim.sched.name ({_SCHEDULES})",
    "lr_warmup_iters": "model.optim.sched.warmup_steps",
    "lr_warmup_fraction": "model.optim.sched.warmup_ratio (with model.optim.sched.warmup_steps=0)",
    "lr_wsd_decay_iters": "model.optim.sched.wsd_decay_steps",
    "lr_wsd_decay_style": "model.optim.sched.wsd_decay_style",
    "clip_grad": f"{_LOOP}.gradient_clip_val",
    "recompute_granularity": "model.activations_checkpoint_granularity",
    "recompute_method": "model.activations_checkpoint_method",
    "recompute_modules": "model.recompute_modules",
    "recompute_num_layers": "model.activations_checkpoint_num_layers",
    "data_path": "model.data.data_prefix",
    "split": "model.data.splits_string",
    "load": "pretrained_checkpoint.restore_from_path",
    "save": "exp_manager.explicit_log_dir",
    "distributed_timeout_minutes": "trainer.timeout_minutes",
}
_NEMO_RL = {
    "reference_policy_kl_penalty": f"{_LOSS}.ref_policy_kl_penalty",
    "preference_average_log_prob": f"{_LOSS}.preference_average_log_probs",
    "sft_average_log_prob": f"{_LOSS}.sft_average_log_probs",
    "max_num_steps": f"{_LOOP}.max_steps",
    "max_num_epochs": f"{_LOOP}.max_epochs",
    "val_period": f"{_LOOP}.val_check_interval",
    "val_batches": f"{_LOOP}.limit_val_batches",
    "val_at_start": f"{_LOOP}.val_before_training",
    "save_period": f"{_LOOP}.save_interval",
    "keep_top_k": "exp_manager.checkpoint_callback_params.save_top_k",
    "metric_name": "exp_manager.checkpoint_callback_params.monitor",
    "checkpoint_dir": "exp_manager.explicit_log_dir",
    "log_dir": "exp_manager.explicit_log_dir",
    "wandb_enabled": "exp_manager.create_wandb_logger",
    "tensorboard_enabled": "exp_manager.create_tensorboard_logger",
    "mlflow_enabled": "exp_manager.create_mlflow_logger",
    "train_global_batch_size": "model.global_batch_size",
    "train_micro_batch_size": "model.micro_batch_size",
    "logprob_batch_size": f"{_LOSS}.log_prob_forward_micro_batch_size",
    "max_total_sequence_length": "model.data.seq_length",
    "max_input_seq_length": "model.data.seq_length",
    "gpus_per_node": "trainer.devices",
    "train_data_path": "model.data.data_prefix",
}
_OTHERS = {
    "average_log_probs": f"{_LOSS}.preference_average_log_probs",
    "preference_avg_log_probs": f"{_LOSS}.preference_average_log_probs",
    "sft_avg_log_probs": f"{_LOSS}.sft_average_log_probs",
    "gpus": "trainer.devices",
    "num_gpus": "trainer.devices",
    "nproc_per_node": "trainer.devices",
    "nnodes": "trainer.num_nodes",
    "epochs": f"{_LOOP}.max_epochs",
    "num_epochs": f"{_LOOP}.max_epochs",
    "steps": f"{_LOOP}.max_steps",
    "val_interval": f"{_LOOP}.val_check_interval",
    "warmup": "model.optim.sched.warmup_steps",
    "lr_scheduler": "model.optim.sched.name",
    "optimizer": "model.optim.name",
    "chat_template": "pretrained_checkpoint.restore_from_path (the template of its tokenizer is used)",
}

# Names without an equivalent in this package, and the reason.
WITHOUT = {
    "logging_first_step": "it is logged with those after it (log_every_n_steps)",
    "ld_alpha": "no loss weighs the tokens of a response by their place",
    "f_divergence_type": "the losses have the reverse KL divergence",
    "f_alpha_divergence_coef": "the losses have the reverse KL divergence",
    "use_weighting": "no loss weighs pairs by their probability",
    "prompt_sample_size": "BCO has no density-ratio weights; a row may have a weight (docs/data.md)",
    "min_density_ratio": "BCO has no density-ratio weights; a row may have a weight (docs/data.md)",
    "max_density_ratio": "BCO has no density-ratio weights; a row may have a weight (docs/data.md)",
    "loss_weights": "one loss is trained with at a time, and an SFT loss beside it",
    "disable_dropout": "only adapters have dropout",
    "padding_free": "sequences are sorted by length, so that there is little padding",
    "pad_to_multiple_of": "rows are padded to what the layout needs",
    "optim_target_modules": "there is one optimizer, for all weights that are trained",
    "load_in_4bit": "weights are not quantised",
    "load_in_8bit": "weights are not quantised",
    "trust_remote_code": "no code that comes with a model is run",
    "attn_implementation": "the fastest attention of the installed libraries is taken",
    "remove_unused_columns": "other columns do no harm",
    "ddp_find_unused_parameters": "every weight that is trained is used",
}
ALIASES: dict[str, str] = _TRL | _HUGGING_FACE | _MEGATRON | _NEMO_RL | _OTHERS
