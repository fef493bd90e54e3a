"""Options of losses: names and weights, terms of single losses, label smoothing, divergences, updates of the reference."""

from __future__ import annotations

from collections.abc import Sequence

from nemo_kto.algorithms.recipes import RECIPES, Recipe
from nemo_kto.tools.translate.trainer_options import Options, as_list, read_value, set_texts, table, texts


def convert_loss(options: Options, recipe: Recipe) -> None:
    """Set the losses with their weights and options, and the updates of the reference."""
    section, losses = f"model.{recipe.name}", texts(as_list(options.get("loss_type")))
    weights = [read_value(weight) for weight in as_list(options.get("loss_weights"))] or [1.0] * len(losses)
    terms = [(loss, weight) for loss, weight in zip(losses, weights, strict=False) if loss != "sft"]
    if options.implied_loss == "cpo" and {"hinge", "ipo"} & {*losses}:  # of CPOTrainer: DPO's losses without a reference
        options.set("model.dpo.reference_free", True, "loss_type")
        if weight := options.get("cpo_alpha"):
            _sft_term(options, "model.dpo", weight, name="cpo_alpha")
    if losses and (wrong := _wrong_losses(recipe.name, losses, weights)) is not None:
        options.set(f"{section}.preference_loss", "???", "loss_type")  # the command has no loss until the user names one
        options.reject(*wrong)
    elif losses:
        named = [overrides_of(loss, recipe.name) for loss, _ in terms]
        if further := list(dict.fromkeys(text for texts in named for text in texts[1:])):
            set_texts(options, further, "loss_type")
        names_of = [texts[0].partition("=")[2] for texts in named]
        if len(terms) > 1:
            mixed = {name: weight for name, (_, weight) in zip(names_of, terms, strict=True)}
            options.set(f"{section}.preference_losses", mixed, "loss_type", "loss_weights")
        else:
            options.set(f"{section}.preference_loss", names_of[0], "loss_type")
            if terms[0][1] != 1:
                options.set(f"{section}.preference_loss_weight", terms[0][1], "loss_weights")
            options.settled.update(("loss_weights",) if len(losses) > 1 else ())
        if "sft" in losses:
            _sft_term(options, section, weights[losses.index("sft")], name="loss_type")
    if options.get("rpo_alpha"):
        _sft_term(options, section, options.get("rpo_alpha"), name="rpo_alpha")
    _own_terms(options, losses)
    _smoothing(options, losses)
    if section == "model.dpo":
        _divergence(options, losses)
    updates = {"ref_model_sync_steps": ("sync_interval", 512), "ref_model_mixup_alpha": ("sync_alpha", 0.6)}
    for name, (key, default) in updates.items():
        if options.get("sync_ref_model") is True:
            options.set(f"model.reference.{key}", options.get(name, default), "sync_ref_model", name)
        options.reject(name, "sync_ref_model is off") if name not in options.settled else None


def overrides_of(loss: str, algorithm: str) -> list[str]:
    """Return the overrides for TRL's name of a loss; none if the algorithm has no such loss."""
    same = [f"model.{algorithm}.preference_loss={loss}"] if loss in RECIPES[algorithm].losses else []
    return [text for text in table()["losses"].get(loss, same) if text.startswith(f"model.{algorithm}.")]


def _wrong_losses(algorithm: str, losses: Sequence[str], weights: Sequence[object]) -> tuple[str, str] | None:
    """Return the option that names losses that a run cannot have, and the reason; None if it can have them."""
    named = [loss for loss in losses if loss != "sft"]
    known = [overrides_of(loss, algorithm) for loss in named]
    means = {any("average_log_probs" in text for text in texts) for texts in known}
    if len(weights) != len(losses):
        return "loss_weights", "it must have a number for each loss"
    if not named:
        return "loss_type", f"a run has a preference loss besides the SFT loss; set model.{algorithm}.preference_loss"
    if len({*losses}) < len(losses):
        return "loss_type", "each of its losses must occur once, not twice"
    if not all(known):
        return "loss_type", f"`nemo-kto {algorithm}` has no such loss"
    if len(named) > 1 and (algorithm != "dpo" or len(means) > 1):
        reason = "they are not for pairs, or take sums and means of tokens"
        return "loss_type", f"these losses cannot be mixed: {reason}"
    return None


def _divergence(options: Options, losses: Sequence[str]) -> None:
    """Translate the options of f-DPO, LD-DPO and WPO where they mean something else in the other trainer."""
    swift = options.trainer != "trl"
    divergence, alpha = options.get("f_divergence_type"), options.get("f_alpha_divergence_coef")
    if divergence not in (None, "reverse_kl") and {"ipo", "sigmoid_norm"} & {*losses}:
        reason = "it divides the score of the sum by the number of tokens; here it is that of the mean"
        options.reject("f_divergence_type", reason)
    if alpha is not None and divergence == "alpha_divergence":
        value = 1 - alpha if swift else alpha  # ms-swift has the alpha of the paper
        options.set("model.dpo.f_alpha_divergence_coef", value, "f_alpha_divergence_coef")
    elif alpha is not None:
        options.reject("f_alpha_divergence_coef", "only f_divergence_type=alpha_divergence uses it")
    if swift and options.has("ld_alpha"):
        options.notes.append("model.dpo.ld_alpha: the reference is weighted as well, and not in ms-swift")
    if options.get("use_weighting") and "sft" in losses:
        options.notes.append("model.dpo.use_weighting: the SFT loss is not weighted, and is in TRL")


def _own_terms(options: Options, losses: Sequence[str]) -> None:
    """Set the options that belong to single losses, and the SFT terms that TRL has in CPO, SimPO and ORPO."""
    if {"cpo", "simpo"} & {*losses} and options.get("cpo_alpha"):
        _sft_term(options, "model.dpo", options.get("cpo_alpha"), name="cpo_alpha")
    elif {"cpo", "simpo"} & {*losses}:
        options.agree("cpo_alpha")
    if "cpo" in losses:  # its own SFT term is a sum over tokens
        options.set("model.dpo.cpo_alpha", 0, "loss_type")
    for name, users, title in (
        ("simpo_gamma", {"simpo", "alphapo"}, "SimPO has"),
        ("cpo_alpha", {"cpo", "simpo"}, "CPO and SimPO have"),
        ("alpha", {"alphapo"}, "AlphaPO has"),
    ):
        if not users & {*losses}:
            if name not in options.settled:
                options.reject(name, f"only {title} it")
            options.agree(name)
            options.settled.add(name)  # its default too
    if "orpo" in losses:  # TRL's first term covers the prompt and is a mean over tokens
        _sft_term(options, "model.dpo", 1.0, name="loss_type")
        options.set("model.dpo.orpo_sft_weight", 0, "loss_type")
        options.set("model.dpo.sft_completion_only", False, "loss_type")


def _smoothing(options: Options, losses: Sequence[str]) -> None:
    """Set the label smoothing of each loss that has it, which is one option in the other trainers."""
    value, name = options.get("label_smoothing"), "label_smoothing"
    if not value:
        options.agree(name)
        return
    unsmoothed = {"sigmoid", "sigmoid_norm"} if options.trainer == "trl" else set[str]()
    smoothed = {*"robust aot aot_pair aot_unpaired cpo simpo alphapo sigmoid sigmoid_norm".split()} - unsmoothed
    given = {*losses} or {"sigmoid"}
    if "exo_pair" in given:
        options.set("model.dpo.exo_label_smoothing", value, name)
    if smoothed & given:
        options.set("model.dpo.label_smoothing", value, name)
        if both := sorted(unsmoothed & given):
            options.notes.append(f"model.dpo.label_smoothing: {both[0]} is smoothed as well, and not in TRL")
    if name not in options.settled:
        remedy = "; set model.dpo.label_smoothing to smooth it" if unsmoothed & given else ""
        options.reject(name, f"{options.title} ignores it with this loss{remedy}")


def _sft_term(options: Options, section: str, weight: object, *, name: str) -> None:
    """Set the weight of an SFT loss that is a mean over tokens."""
    options.set(f"{section}.sft_loss_weight", weight, name)
    options.set(f"{section}.{'sft_token_mean' if section == 'model.dpo' else 'sft_average_log_probs'}", True, name)
