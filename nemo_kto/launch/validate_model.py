"""What the model's part of a configuration must fulfil: its losses, reference, adapters and optimizer."""

from __future__ import annotations

import math

from nemo_kto.launch.problem import Found, Problem, at_least, either, one_of
from nemo_kto.launch.schema import DPOConfig, KTOConfig, RunConfig
from nemo_kto.losses import kto as kto_losses
from nemo_kto.losses import preference as pair_losses
from nemo_kto.models.lora_settings import TARGET_MODULES

# As in nemo_kto/models/optimizer.py, which is not imported here: it takes megatron-core along, and a test compares the two.
SCHEDULES = ("CosineAnnealing", "LinearAnnealing", "constant")
# Keys of model.dpo that only some of its losses take, with the value that they have where they mean nothing.
_OPTIONS = {"label_smoothing": 0.0, "gt_reward_scale": 1.0, "simpo_gamma": 0.5}
# The same of model.data, for losses that take the rewards of the rows.
_REWARDS = {"default_chosen_reward": 1.0, "default_rejected_reward": 0.0}


def _model(cfg: RunConfig) -> Found:
    model = cfg.model
    for name in ("micro_batch_size", "global_batch_size", "logprob_chunk_size"):
        yield from at_least(f"model.{name}", getattr(model, name), 1)
    if model.global_batch_size == 1 and cfg.loss.preference_loss == "kto":
        text = "must be at least 2: the reference point pairs each row with the answer of another, got 1"
        yield Problem("model.global_batch_size", f"{text}; use a larger batch", ("model.kto.preference_loss",))
    if model.virtual_pipeline_model_parallel_size is not None:
        got = model.virtual_pipeline_model_parallel_size
        text = f"must be null, got {got}: virtual pipelines are not supported in this version"
        yield Problem("model.virtual_pipeline_model_parallel_size", text)
    for name, what in (("context", "context"), ("expert", "expert")):
        key = f"{name}_{'model_' if name == 'expert' else ''}parallel_size"
        if getattr(model, key) != 1:
            text = f"must be 1, got {getattr(model, key)}: {what} parallelism is not supported in this version"
            yield Problem(f"model.{key}", text)
    if model.fp8 is not None:
        text = f"must be null, got {model.fp8}: fp8 needs Transformer Engine and is not supported in this version"
        yield Problem("model.fp8", text)


def _recompute(cfg: RunConfig) -> Found:
    prefix, model = "model.activations_checkpoint", cfg.model
    granularity, method = model.activations_checkpoint_granularity, model.activations_checkpoint_method
    layers = model.activations_checkpoint_num_layers
    if granularity is not None:
        yield from one_of(f"{prefix}_granularity", granularity, ("null", "selective", "full"))
    if method is not None:
        yield from one_of(f"{prefix}_method", method, ("null", "uniform", "block"))
    if layers is not None:
        yield from at_least(f"{prefix}_num_layers", layers, 1)
    reads = (f"{prefix}_granularity",)
    for name, value, example in (("method", method, "uniform"), ("num_layers", layers, 1)):
        if granularity == "full" and value is None:
            text = f"must be given with {prefix}_granularity=full, got null; e.g. {prefix}_{name}={example}"
            yield Problem(f"{prefix}_{name}", text, reads)
        if granularity != "full" and value is not None:
            text = f"must be null unless {prefix}_granularity=full, got {value}; set one or the other"
            yield Problem(f"{prefix}_{name}", text, reads)


def _optim(cfg: RunConfig) -> Found:
    optim, sched, prefix = cfg.model.optim, cfg.model.optim.sched, "model.optim"
    known = "distributed_fused_adam is adam with use_distributed_optimizer=true"
    yield from one_of(f"{prefix}.name", optim.name, ("adam",), known)
    if not optim.lr > 0:
        yield Problem(f"{prefix}.lr", f"must be above 0, got {optim.lr}; e.g. {prefix}.lr=1e-5")
    if not optim.eps > 0:
        yield Problem(f"{prefix}.eps", f"must be above 0, got {optim.eps}; e.g. {prefix}.eps=1e-8")
    yield from at_least(f"{prefix}.weight_decay", optim.weight_decay, 0)
    if len(optim.betas) != 2 or not all(0 <= beta < 1 for beta in optim.betas):
        text = f"must be two numbers from 0 to below 1, got {list(optim.betas)}; e.g. {prefix}.betas=[0.9,0.98]"
        yield Problem(f"{prefix}.betas", text)
    yield from one_of(f"{prefix}.sched.name", sched.name, SCHEDULES)
    yield from at_least(f"{prefix}.sched.warmup_steps", sched.warmup_steps, 0)
    if optim.lr > 0 and not 0 <= sched.min_lr <= optim.lr:
        text = f"must be from 0 to model.optim.lr = {optim.lr}, got {sched.min_lr}; set both, or {prefix}.sched.min_lr=0"
        yield Problem(f"{prefix}.sched.min_lr", text, (f"{prefix}.lr",))


def _loss(cfg: RunConfig) -> Found:
    loss, section = cfg.loss, f"model.{cfg.algorithm.name}"
    names = tuple(pair_losses.LOSSES if isinstance(cfg, DPOConfig) else kto_losses.LOSSES)
    yield from one_of(f"{section}.preference_loss", loss.preference_loss, names)
    if not loss.ref_policy_kl_penalty > 0:
        text = f"must be above 0, got {loss.ref_policy_kl_penalty}; e.g. {section}.ref_policy_kl_penalty=0.1"
        yield Problem(f"{section}.ref_policy_kl_penalty", text)
    weights = {f"{section}.{name}_loss_weight": getattr(loss, f"{name}_loss_weight") for name in ("preference", "sft")}
    yield from _weights(weights)
    if cfg.model.micro_batch_size >= 1:  # its default is twice that
        yield from at_least(f"{section}.log_prob_forward_micro_batch_size", loss.log_prob_forward_micro_batch_size, 1)


def _weights(weights: dict[str, float]) -> Found:
    """Two weights of which one at least must count."""
    for key, weight in weights.items():
        yield from at_least(key, weight, 0)
    first, second = weights
    if set(weights.values()) == {0}:
        yield Problem(first, f"and {second} must not both be 0, got 0.0 and 0.0; nothing would be learned", (second,))


def _kto(cfg: RunConfig) -> Found:
    if isinstance(cfg, KTOConfig):
        kto = cfg.model.kto
        yield from _weights({f"model.kto.{name}_loss_weight": getattr(kto, f"{name}_loss_weight") for name in _KINDS})


_KINDS = ("desirable", "undesirable")


def _dpo(cfg: RunConfig) -> Found:
    if not isinstance(cfg, DPOConfig) or (loss := pair_losses.LOSSES.get(cfg.model.dpo.preference_loss)) is None:
        return
    dpo, reads = cfg.model.dpo, ("model.dpo.preference_loss",)
    for name, unused in _OPTIONS.items():
        if name not in loss.options and getattr(dpo, name) != unused:
            takers = [other for other, its in pair_losses.LOSSES.items() if name in its.options]
            text = f"must be {unused} with {dpo.preference_loss}, which does not take it, got {getattr(dpo, name)}"
            yield Problem(f"model.dpo.{name}", f"{text}; it is for {either(takers)}", reads)
    for name, unused in _REWARDS.items():
        value = getattr(cfg.model.data, name)
        if not math.isfinite(value):
            yield Problem(f"model.data.{name}", f"must be a finite number, got {value}; e.g. {unused}")
        elif not loss.needs_rewards and value != unused:
            takers = [other for other, its in pair_losses.LOSSES.items() if its.needs_rewards]
            text = f"must be {unused} with {dpo.preference_loss}, which takes no rewards, got {value}"
            yield Problem(f"model.data.{name}", f"{text}; it is for {either(takers)}", reads)
    if not 0 <= dpo.label_smoothing < 0.5:
        yield Problem("model.dpo.label_smoothing", f"must be from 0 to below 0.5, got {dpo.label_smoothing}; e.g. 0.1")
    if not dpo.gt_reward_scale > 0:
        yield Problem("model.dpo.gt_reward_scale", f"must be above 0, got {dpo.gt_reward_scale}; e.g. 1.0")
    yield from at_least("model.dpo.simpo_gamma", dpo.simpo_gamma, 0)
    if not loss.needs_reference:
        held = cfg.model.reference
        given = {
            "mode": held.mode != "auto",
            "restore_from_path": held.restore_from_path,
            "sync_interval": held.sync_interval,
        }
        for name in (name for name, value in given.items() if value):
            text = f"must be left out with {dpo.preference_loss}, which has no reference, got {getattr(held, name)}"
            yield Problem(f"model.reference.{name}", text, reads)


def _reference(cfg: RunConfig) -> Found:
    held, peft, prefix = cfg.model.reference, cfg.model.peft, "model.reference"
    yield from one_of(f"{prefix}.mode", held.mode, ("auto", "swap", "adapter", "cached"))
    yield from at_least(f"{prefix}.sync_interval", held.sync_interval, 0, "0: the reference stays")
    if not 0 < held.sync_alpha <= 1:
        yield Problem(f"{prefix}.sync_alpha", f"must be above 0 and at most 1, got {held.sync_alpha}; e.g. 0.6")
    adapted, moves = peft.peft_scheme != "none", held.sync_interval > 0
    scheme, sync, path = "model.peft.peft_scheme", f"{prefix}.sync_interval", f"{prefix}.restore_from_path"
    if held.mode == "adapter" and not adapted:
        text = "must be auto, swap or cached without adapters, got adapter; or set model.peft.peft_scheme=lora"
        yield Problem(f"{prefix}.mode", text, (scheme,))
    if held.mode == "adapter" and moves and peft.restore_from_path is None:
        text = f"must be 0 with mode adapter, where the reference is the model without adapters, got {held.sync_interval}"
        yield Problem(sync, f"{text}; use {prefix}.mode=swap", (f"{prefix}.mode",))
    if held.mode == "adapter" and held.restore_from_path is not None:
        text = f"must be null with mode adapter, where the reference is the model itself, got {held.restore_from_path}"
        yield Problem(path, f"{text}; use {prefix}.mode=cached", (f"{prefix}.mode",))
    if held.mode == "cached" and moves:
        text = f"must be 0 with mode cached, whose log-probs are computed once, got {held.sync_interval}"
        yield Problem(sync, f"{text}; use {prefix}.mode=swap", (f"{prefix}.mode",))
    if held.restore_from_path is not None and peft.restore_from_path is not None:
        text = f"must be null where model.peft.restore_from_path names the reference, got {held.restore_from_path}"
        yield Problem(path, f"{text}; give one of them", ("model.peft.restore_from_path",))


def _peft(cfg: RunConfig) -> Found:
    peft, tuning, prefix = cfg.model.peft, cfg.model.peft.lora_tuning, "model.peft.lora_tuning"
    yield from one_of("model.peft.peft_scheme", peft.peft_scheme, ("none", "lora"))
    if peft.restore_from_path is not None and peft.peft_scheme == "none":
        text = f"must be null without adapters, got {peft.restore_from_path}; set model.peft.peft_scheme=lora"
        yield Problem("model.peft.restore_from_path", text, ("model.peft.peft_scheme",))
    if not tuning.target_modules:
        yield Problem(f"{prefix}.target_modules", "must name at least one module, got none; e.g. [attention_qkv]")
    for name in tuning.target_modules:
        yield from one_of(f"{prefix}.target_modules", name, TARGET_MODULES)
    yield from at_least(f"{prefix}.adapter_dim", tuning.adapter_dim, 1)
    if not tuning.alpha > 0 and tuning.adapter_dim >= 1:  # its default is that
        yield Problem(f"{prefix}.alpha", f"must be above 0, got {tuning.alpha}; e.g. {prefix}.alpha=32")
    if not 0 <= tuning.adapter_dropout < 1:
        yield Problem(f"{prefix}.adapter_dropout", f"must be from 0 to below 1, got {tuning.adapter_dropout}; e.g. 0.05")
    for number in tuning.layer_selection or ():
        yield from at_least(f"{prefix}.layer_selection", number, 1, "layers are counted from 1")
    if tuning.layer_selection == []:
        yield Problem(f"{prefix}.layer_selection", "must name at least one layer, got none; null adapts all")


MODEL_CHECKS = (_model, _recompute, _optim, _loss, _kto, _dpo, _reference, _peft)
