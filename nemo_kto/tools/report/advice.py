"""Advice about a run: rules over its curves and its data, each of which names the figures that it is based on.

A problem is reported once: where the rule for a cause applies, those for its consequences are silent (``_CONSEQUENCES``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from nemo_kto.config.learning_rates import LR_RANGES, is_outlier
from nemo_kto.errors import plural
from nemo_kto.records.curves import Curve
from nemo_kto.records.run_record import FINISHED, RunRecord
from nemo_kto.tools.report.comparison import differing_rows
from nemo_kto.tools.report.facts import data_text
from nemo_kto.utils.intervals import MIN_VALIDATION_ROWS
from nemo_kto.utils.text import number_text

_MIN_POINTS = 10  # of a training curve; fewer show nothing
_TAIL = 0.2  # fraction of a curve whose mean is its final value
_NOTICEABLE = 0.1  # reward, in nats: a change of the loss by a fortieth
_MOSTLY_COMMON = 0.5  # rewards of the better answers fall at least this fraction as far as those of the worse ones
_COLLAPSE = 1.5  # ratio of the final to the first log-probs
_DESTROYED = 3.0  # the same ratio of a model that no longer writes text
_LOSS_ROSE = 1.05  # ratio of the final to the first loss
_SPIKE, _SPIKES = 10.0, 3  # ratio of a gradient norm to the median around it, and number of such steps
_MAX_NEGATIVE_KL = 0.25  # of the log-prob of an answer; a KL estimate below 0 is normal, also for a long time (kto.md)
_MAX_Z0_NOISE = 0.5  # reward; it changes the weight of an example by up to an eighth
_MIN_STEPS = 10  # of an epoch with a larger batch
_MIN_BATCH, _MAX_BATCH = 16, 128  # advised by docs/guides/settings.md
_FEW_STEPS = 10  # fewer are too few for a run
_OVERFIT = 0.1  # fraction of the best improvement of the validation loss that was lost again
_MIN_VALIDATIONS_AFTER = 2  # the best one, all of which must be worse
_NO_MARGIN, _NO_CHANGE = 0.05, 0.02  # final margin, and relative change of the loss, of a run that learned nothing
_MIN_BALANCE, _MAX_BALANCE = 0.8, 1.6  # beyond 1 to 4/3, which Ethayarajh et al. 2024 (arXiv 2402.01306) recommend
_MAX_TRUNCATED = 0.05  # fraction of the rows
_LOGPS = ("logps_chosen_mean", "logps_rejected_mean")
_CURVES = "tutorials/curves.md#{}"


@dataclass(frozen=True, kw_only=True)
class Advice:
    """A likely problem of a run, the figures that show it, what to change, and a page of docs/ about it."""

    title: str
    reason: str
    remedy: str
    page: str


Rule = Callable[[RunRecord], Advice | None]


def different_data(runs: Mapping[str, RunRecord]) -> Advice | None:
    """Runs that are compared, given by name, have different training or validation rows."""
    if not (which := differing_rows(runs)):
        return None
    of_runs = "; ".join(f"{name}: {data_text(run)}" for name, run in runs.items())
    remedy = "Differences between their figures may come from the rows instead of the settings."
    if "validation" in which:
        remedy = "Compare figures of validation only between runs with the same validation rows."
    return Advice(
        title="The runs used different data",
        reason=f"The {' and '.join(which)} rows differ. {of_runs}.",
        remedy=remedy,
        page="guides/data.md#files-splits-and-blends",
    )


def advice_for(run: RunRecord) -> list[Advice]:
    """Return the advice of the rules that apply, except for consequences of others, the most important first."""
    found = {rule: advice for rule in RULES if (advice := rule(run)) is not None}
    consequences = {each for rule in found for each in _CONSEQUENCES.get(rule, ())}
    return [advice for rule, advice in found.items() if rule not in consequences]


def finding_lines(run: RunRecord) -> list[str]:
    """Return the title of each advice, with its page, the most important first."""
    return [f"{advice.title} (docs/{advice.page})" for advice in advice_for(run)]


def model_destroyed(run: RunRecord) -> Advice | None:
    """The answers of both classes have become so improbable that the model cannot write text any more."""
    for prefix in (*run.validations.values(), "train/"):
        curves = [run.curves.get(f"{prefix}logps_{name}_mean") for name in ("chosen", "rejected")]
        found = [curve for curve in curves if curve is not None and len(curve) > 1 and curve.first < 0]
        if not found or min(curve.last / curve.first for curve in found) <= _DESTROYED:
            continue
        fell = " and ".join(f"from {number_text(curve.first)} to {number_text(curve.last)}" for curve in found)
        return Advice(
            title="The model is probably destroyed",
            reason=f"Between steps {int(found[0].steps[0]):,} and {found[0].last_step:,} the mean log-prob of answers fell "
            f"{fell}, whatever their label: the model gives almost no probability to text like that of the data. Neither a "
            "margin nor an AUC shows this.",
            remedy=f"Do not use it. Try {_other_lr(run, 'a lower', 0.2)}.",
            page=_CURVES.format("learning-rate-too-high"),
        )
    return None


def learning_rate_too_high(run: RunRecord) -> Advice | None:
    """The log-probs of both classes collapse, the loss ends above its start, or the gradient norm has spikes."""
    found = []
    better, worse = (_long(run, f"train/logps_{name}_mean") for name in ("chosen", "rejected"))
    if better is not None and worse is not None and _final(better) < 0 and _final(worse) < 0:
        ratios = [_final(curve) / _start(curve) for curve in (better, worse) if _start(curve) < 0]
        if len(ratios) == 2 and min(ratios) > _COLLAPSE:
            found.append(
                f"the mean log-prob of {run.classes[0]} answers fell from {number_text(_start(better))} to "
                f"{number_text(_final(better))}, that of {run.classes[1]} ones from {number_text(_start(worse))} to "
                f"{number_text(_final(worse))}"
            )
    loss = _long(run, "train/loss")
    if loss is not None and _start(loss) > 0:
        error = 2 * _noise(loss) * math.sqrt(1 / len(loss.tail(_TAIL)) + 1 / max(1, len(loss) // 20))
        if _final(loss) > max(_LOSS_ROSE * _start(loss), _start(loss) + error):
            found.append(f"the training loss rose from {number_text(_start(loss))} to {number_text(_final(loss))}")
    if (norms := _long(run, "train/grad_norm")) is not None and (spikes := _spikes(norms)) is not None:
        largest = int(spikes.values.argmax())
        found.append(
            f"the gradient norm exceeded {_SPIKE:g} times the median of the steps around it in {len(spikes)} steps, most at "
            f"step {int(spikes.steps[largest]):,} with {number_text(spikes.values[largest])}"
        )
    if not found:
        return None
    return Advice(
        title="The learning rate is probably too high",
        reason=f"{found[0][0].upper()}{'; '.join(found)[1:]}.",
        remedy=f"Try {_other_lr(run, 'a lower', 0.2)}, or a longer model.optim.sched.warmup_steps.",
        page=_CURVES.format("learning-rate-too-high"),
    )


def skipped_steps(run: RunRecord) -> Advice | None:
    """Steps were skipped because a loss or a gradient was not finite."""
    skipped = run.curves.get("train/skipped_steps")
    if skipped is None or not skipped.last:
        return None
    return Advice(
        title="Steps were skipped",
        reason=f"The loss or the gradient was not finite in {skipped.last:.0f} of {run.step:,} steps.",
        remedy="Look at the rows that the warnings name, or lower model.optim.lr.",
        page="guides/training.md#non-finite-values",
    )


def no_learning(run: RunRecord) -> Advice | None:
    """Neither the rewards nor the loss moved."""
    loss, margin = _long(run, "train/loss"), _long(run, "train/rewards_margin")
    if loss is None or margin is None or not _start(loss):
        return None
    if any(abs(_final(curve) - _start(curve)) >= _NOTICEABLE for curve in _rewards(run, "train/")):
        return None
    change = _final(loss) / _start(loss) - 1
    reached = [_final(margin)]
    reached += [run.curves[name].last for p in run.validations.values() if (name := f"{p}rewards_margin") in run.curves]
    if max(map(abs, reached)) >= _NO_MARGIN or abs(change) >= _NO_CHANGE:
        return None
    return Advice(
        title="The model has hardly changed",
        reason=f"After {run.step:,} steps the margin is {number_text(reached[-1], 2)}, and the training loss has changed by "
        f"{100 * change:.1f} %.",
        remedy=f"Try {_other_lr(run, 'a higher', 5.0)}, or train longer.",
        page="guides/settings.md#learning-rate",
    )


def both_rewards_fall(run: RunRecord) -> Advice | None:
    """The rewards of both classes fall together, so that probability moves to answers that are in neither class."""
    prefix = next(iter(run.validations.values()), "train/")
    better, worse = (run.curves.get(f"{prefix}rewards_{name}_mean") for name in ("chosen", "rejected"))
    if better is None or worse is None or _long(run, "train/loss") is None:
        return None
    good, bad = (curve.last if prefix.startswith("val/") else _final(curve) for curve in (better, worse))
    if good > -_NOTICEABLE or bad > -_NOTICEABLE or good > _MOSTLY_COMMON * bad:
        return None
    where = "held-out" if prefix.startswith("val/") else "training"
    first, second = run.classes
    return Advice(
        title=f"The rewards of {first} and {second} answers fall together",
        reason=f"At step {better.last_step:,} the mean {where} reward of {first} answers is {number_text(good, 3)} and that "
        f"of {second} ones {number_text(bad, 3)}: both have become less likely than under the reference.",
        remedy=f"Try a lower model.optim.lr, a larger model.{run.algorithm}.ref_policy_kl_penalty, or an SFT term "
        f"(model.{run.algorithm}.sft_loss_weight).",
        page=_CURVES.format("in-short"),
    )


def kl_falls(run: RunRecord) -> Advice | None:
    """The estimate of the KL divergence falls far below 0; one that stays somewhat below 0 is normal."""
    kl, better, worse = (_long(run, f"train/{name}") for name in ("kl_unclamped", *_LOGPS))
    if kl is None or better is None or worse is None:
        return None
    length, final = -(_start(better) + _start(worse)) / 2, _final(kl)
    if final > -_MAX_NEGATIVE_KL * length or final >= float(kl.tail(0.5).values[: len(kl) // 4 + 1].mean()):
        return None
    return Advice(
        title="The KL estimate keeps falling",
        reason=f"The estimate fell to {number_text(final, 3)}, where the first log-probs of answers were "
        f"{number_text(-length, 3)}: answers to other prompts have become far less likely than under the reference.",
        remedy=f"Try a lower model.optim.lr, or a larger model.{run.algorithm}.ref_policy_kl_penalty.",
        page=_CURVES.format("learning-rate-too-high"),
    )


def batch_too_small(run: RunRecord) -> Advice | None:
    """The reference point z0 varies from step to step by more than its own size."""
    kl, size = _long(run, "train/kl_unclamped"), run.config.get("model.global_batch_size")
    if kl is None or run.beta is None or not isinstance(size, int):
        return None
    late = kl.tail(2 / 3)
    noise, mean = _noise(late), float(late.values.mean())
    if noise < abs(mean) or run.beta * noise < _MAX_Z0_NOISE:
        return None
    rows = run.data.get("sets", {}).get("train", {}).get("rows")
    larger = size * 2 ** math.ceil(2 * math.log2(run.beta * noise / (_MAX_Z0_NOISE / 2)))
    larger = min(max(larger, _MIN_BATCH), max(_MAX_BATCH, size))
    while larger > size and rows and rows < _MIN_STEPS * larger:
        larger //= 2
    remedy = f"Try model.global_batch_size={larger}; the noise falls with the square root of the batch."
    if larger <= size or larger < _MIN_BATCH:
        reason = f"{rows:,} rows leave too few steps with a larger batch" if size < _MAX_BATCH else "the batch is large"
        remedy = f"Try a loss without z0 (model.kto.preference_loss=apo_zero_unpaired): {reason}."
    return Advice(
        title="The batch is small for an estimate of z0",
        reason=f"From step to step the KL estimate of {size} examples varies by {number_text(noise, 3)} (standard "
        f"deviation) around a mean of {number_text(mean, 3)}, which moves the reference point of all rewards by "
        f"{number_text(run.beta * noise, 2)}.",
        remedy=remedy,
        page=_CURVES.format("batch-too-small"),
    )


def too_few_steps(run: RunRecord) -> Advice | None:
    """A finished run had too few steps to learn from."""
    if run.state.word != FINISHED or not 0 < run.step < _FEW_STEPS:
        return None
    size, rows = run.config.get("model.global_batch_size"), run.data.get("sets", {}).get("train", {}).get("rows")
    can_shrink = isinstance(size, int) and size > _MIN_BATCH
    smaller = f"a smaller model.global_batch_size, of at least {_MIN_BATCH}" if can_shrink else "more rows"
    return Advice(
        title="The run is too short",
        reason=f"{run.step} step{'s' * (run.step != 1)} of {size} examples"
        + (f", from {rows:,} rows," if rows else "")
        + " are too few for Adam and the learning-rate schedule to have an effect that one could measure.",
        remedy=f"Try more epochs (trainer.{run.algorithm}.max_epochs), or {smaller}.",
        page="guides/settings.md#by-number-of-rows",
    )


def validation_worsened(run: RunRecord) -> Advice | None:
    """The validation loss rises again, with a falling training loss or without."""
    train = _long(run, "train/loss")
    for title, prefix in run.validations.items() if train is not None else ():
        loss = run.curves[f"{prefix}loss"]
        if run.is_small(prefix):
            continue
        best = int(loss.values.argmin())
        later, lowest = loss.values[best + 1 :], float(loss.values[best])
        gained, lost = loss.first - lowest, loss.last - lowest
        if len(later) < _MIN_VALIDATIONS_AFTER or lost <= max(_OVERFIT * gained, _NO_CHANGE * abs(lowest)):
            continue
        best_step = int(loss.steps[best])
        assert train is not None
        before = train.up_to(best_step).tail(_TAIL)
        if not (later > lowest).all():
            continue
        overfits = len(before) and _final(train) < float(before.values.mean())
        meanwhile = ""
        if overfits:
            meanwhile = f", while the training loss fell from {number_text(float(before.values.mean()))} to "
            meanwhile += number_text(_final(train))
        if overfits or best_step == 0 or loss.last > loss.first:
            return Advice(
                title="The model overfits" if overfits else f"The {title} loss has risen since step {best_step:,}",
                reason=f"The {title} loss was lowest at step {best_step:,} ({number_text(lowest)}) and is now "
                f"{number_text(loss.last)}{meanwhile}.",
                remedy="Export the best checkpoint (nemo-kto export RUN OUT --best), or stop the next run earlier "
                "(exp_manager.create_early_stopping_callback=true, or fewer steps).",
                page="guides/training.md#early-stopping",
            )
    return None


def small_validation(run: RunRecord) -> Advice | None:
    """A validation has too few rows for its figures to say anything."""
    for title, prefix in run.validations.items():
        if run.is_small(prefix):
            rows = int(run.curves[f"{prefix}rows"].last)
            return Advice(
                title=f"The {title} has too few rows",
                reason=f"It has {plural(rows, 'row')}, where at least {MIN_VALIDATION_ROWS} are needed to judge a model or "
                "choose a checkpoint.",
                remedy='Raise the second number of model.data.splits_string, as in "80,20", or add rows.',
                page="guides/data.md#files-splits-and-blends",
            )
    return None


def one_class_dominates(run: RunRecord) -> Advice | None:
    """The examples of one class, times their loss weight, outweigh those of the other."""
    balance = run.data.get("balance", {})
    try:
        (good, bad), (good_weight, bad_weight) = balance["examples"], balance["weights"]
        if bool(good) != bool(bad):
            return _one_class("desirable" if good else "undesirable", good or bad)
        ratio = good * good_weight / (bad * bad_weight)
    except (LookupError, TypeError, ValueError, ZeroDivisionError):
        return None
    if not ratio or _MIN_BALANCE <= ratio <= _MAX_BALANCE:
        return None
    which = "desirable" if ratio > 1 else "undesirable"
    return Advice(
        title=f"The {which} examples dominate the loss",
        reason=f"{good:,.10g} desirable examples of weight {good_weight:.4g} against {bad:,.10g} undesirable ones of weight "
        f"{bad_weight:.4g}: a ratio of {number_text(ratio, 3)}, where 1 to 4/3 is recommended.",
        remedy=f"Set model.{run.algorithm}.auto_balance=true.",
        page="algorithms/kto.md#balance",
    )


def _one_class(which: str, count: float) -> Advice:
    return Advice(
        title=f"All training examples are {which}",
        reason=f"With {count:,.10g} {which} examples and no others, the model learns to make every answer "
        f"{'more' if which == 'desirable' else 'less'} likely.",
        remedy="Collect examples of the other class.",
        page=_CURVES.format("one-class-only"),
    )


def truncated_rows(run: RunRecord) -> Advice | None:
    """Many prompts or answers do not fit into the maximum length."""
    train = run.data.get("sets", {}).get("train", {})
    rows, prompts, responses = (train.get(name, 0) for name in ("rows", "cut_prompts", "cut_responses"))
    if not rows or max(prompts, responses) / rows <= _MAX_TRUNCATED:
        return None
    length = run.data.get("seq_length", run.config.get("model.data.seq_length"))
    return Advice(
        title="Many rows are truncated",
        reason=f"{prompts:,} prompts and {responses:,} answers of {rows:,} training rows are truncated at {length} tokens"
        + (" (an answer without its end does not teach the model to stop)." if responses else "."),
        remedy="Raise model.data.seq_length, or leave these rows out.",
        page="guides/data.md#tokenisation-and-truncation",
    )


RULES: tuple[Rule, ...] = (
    model_destroyed,
    learning_rate_too_high,
    skipped_steps,
    too_few_steps,
    no_learning,
    both_rewards_fall,
    kl_falls,
    validation_worsened,
    small_validation,
    one_class_dominates,
    batch_too_small,
    truncated_rows,
)
_TOO_FAST: tuple[Rule, ...] = (no_learning, both_rewards_fall, kl_falls, validation_worsened, batch_too_small)
# Rule -> rules that say the same of such a run in other words, or give advice that contradicts its own.
_CONSEQUENCES: Mapping[Rule, tuple[Rule, ...]] = {
    model_destroyed: (learning_rate_too_high, too_few_steps, *_TOO_FAST),
    learning_rate_too_high: (too_few_steps, *_TOO_FAST),
    too_few_steps: (no_learning, batch_too_small),
    both_rewards_fall: (no_learning, kl_falls),
    kl_falls: (no_learning,),
}


def _long(run: RunRecord, name: str) -> Curve | None:
    """Return a curve that is long enough to show something; None if there is none."""
    curve = run.curves.get(name)
    return curve if curve is not None and len(curve) >= _MIN_POINTS else None


def _final(curve: Curve) -> float:
    """Return the mean over the last fifth of a curve."""
    return float(curve.tail(_TAIL).values.mean())


def _start(curve: Curve) -> float:
    """Return the mean over the first twentieth of a curve."""
    return float(curve.values[: max(1, len(curve) // 20)].mean())


def _spikes(curve: Curve) -> Curve | None:
    """Return the points far above the median around them; None if there are few."""
    size = max(_MIN_POINTS, len(curve) // 20)
    blocks = [curve.values[begin : begin + size] for begin in range(0, len(curve), size)]
    above = np.concatenate([block > _SPIKE * max(float(np.median(block)), 1e-12) for block in blocks])
    is_alive = float(np.median(curve.values)) > 0.01 * float(curve.values.max())  # else the norm has collapsed to 0
    return curve.at(above) if above.sum() >= _SPIKES and is_alive else None


def _noise(curve: Curve) -> float:
    """Return the standard deviation of a curve around its trend, from the differences of neighbours."""
    return float(np.diff(curve.values).std()) / math.sqrt(2)


def _rewards(run: RunRecord, prefix: str) -> list[Curve]:
    found = (run.curves.get(f"{prefix}rewards_{name}_mean") for name in ("chosen", "rejected"))
    return [curve for curve in found if curve is not None]


def _other_lr(run: RunRecord, words: str, factor: float) -> str:
    """Return an override with ``factor`` times the learning rate, or the nearest usual rate if that is far from usual.

    Return only ``words`` if the rate of the run is not known.
    """
    lr, scheme = run.config.get("model.optim.lr"), str(run.config.get("model.peft.peft_scheme"))
    if not isinstance(lr, float) or scheme not in LR_RANGES:
        return f"{words} model.optim.lr"
    other, (low, high) = lr * factor, LR_RANGES[scheme]
    if is_outlier(other, scheme):
        other = high if factor < 1 else low
    return f"model.optim.lr={other:.2g} instead of {lr:g}"
