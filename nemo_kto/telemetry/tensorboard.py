"""TensorBoard event files: metrics, histograms of rewards, a page with the essential curves, and hyperparameters."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from nemo_kto.telemetry.evaluations import RewardHistogram, Sample, markdown

# Settings in the table of hyperparameters, by the beginning of their keys; NAME stands for the algorithm.
_VARIED = (
    "pretrained_checkpoint.restore_from_path", "trainer.NAME.max_", "trainer.NAME.gradient_clip_val", "model.NAME.",
    "model.optim.", "model.peft.", "model.reference.", "model.global_batch_size", "model.seed", "model.data.data_prefix",
    "model.data.seq_length", "model.data.apply_chat_template",
)  # fmt: skip
_RANKING = {"kto": "auc", "dpo": "acc"}  # algorithm -> metric that says how well rewards tell good from bad answers
_OF_RANKS = re.compile(r"timing/(.*_max(?:_rank)?)")  # times of the slowest rank, and its number


class TensorBoard:
    """TensorBoard event files, by the writer of torch: the import of Lightning's logger takes a third of a second.

    Times of the slowest rank (timing/PHASE_max, timing/PHASE_max_rank) have the prefix ranks/ in place of timing/, so that
    they are on a page of their own. ``val_prefixes`` are those of the metrics of the validation sets.
    """

    def __init__(self, *, folder: Path, resumed_step: int | None, val_prefixes: Sequence[str] = ("val/",)) -> None:
        """Open a new event file in ``folder`` and purge events after ``resumed_step``, because those steps are repeated."""
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=None if resumed_step is None else resumed_step + 1)
        self._val_prefixes, self._end = val_prefixes, None
        self._writer.add_custom_scalars({"essentials": essential_charts(val_prefixes)})

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(_OF_RANKS.sub(r"ranks/\1", name), value, step)

    def log_rewards(self, histograms: Sequence[RewardHistogram], step: int) -> None:
        """Write a histogram of the rewards of each class; the sums, which TensorBoard does not show, are of bin centres."""
        for each in histograms:
            edges, prefix = each.edges, f"{each.set_name}_" if each.set_name else ""
            centers = [edge - each.width / 2 for edge in edges]
            for name, counts in each.counts.items():
                self._writer.add_histogram_raw(
                    f"val/{prefix}rewards_{name}",
                    min=each.first * each.width,
                    max=edges[-1],
                    num=sum(counts),
                    sum=sum(count * center for count, center in zip(counts, centers, strict=True)),
                    sum_squares=sum(count * center**2 for count, center in zip(counts, centers, strict=True)),
                    bucket_limits=edges,
                    bucket_counts=counts,
                    global_step=step,
                )

    def log_samples(self, samples: Sequence[Sample], step: int) -> None:
        """Write a text for each prompt, whose versions at the different steps TensorBoard shows with a slider."""
        for sample in samples:
            self._writer.add_text(f"samples/{sample.index}", markdown(sample), step)

    def log_hyperparams(self, params: dict[str, object]) -> None:
        """Write the configuration as text, and the settings that runs differ in as hyperparameters.

        TensorBoard shows with them the newest values of the training loss, and of loss, margin and AUC or accuracy of each
        validation set.
        """
        from torch.utils.tensorboard.summary import hparams

        self._writer.add_text("hyperparameters", f"```json\n{json.dumps(params, indent=2, default=str)}\n```")
        algorithm = str(params.get("algorithm"))
        names = ["loss", "rewards_margin", *([_RANKING[algorithm]] if algorithm in _RANKING else [])]
        metrics = ["train/loss", *(f"{prefix}{name}" for prefix in self._val_prefixes for name in names)]
        beginnings = tuple(key.replace("NAME", algorithm) for key in _VARIED)
        varied = {key: value for key, value in _leaves(params) if key.startswith(beginnings)}
        experiment, begin, self._end = hparams(varied, dict.fromkeys(metrics, 0.0))  # of the metrics only the names are used
        for summary in (experiment, begin):
            self._writer._get_file_writer().add_summary(summary)

    def finalize(self, status: str) -> None:
        if status == "success" and self._end is not None:
            self._writer._get_file_writer().add_summary(self._end)
        self._writer.close()


def essential_charts(val_prefixes: Sequence[str]) -> dict[str, list[object]]:
    """Return the charts of the page "essentials" in the form of ``SummaryWriter.add_custom_scalars``, in their order."""
    charts: dict[str, list[str]] = {"loss": ["train/loss"], "rewards": [], "margin": ["train/rewards_margin"]}
    charts |= {"kl": ["train/kl", "train/delta"], "auc or accuracy": ["train/acc"]}
    charts["rewards"] += ["train/rewards_chosen_mean", "train/rewards_rejected_mean"]
    for prefix in val_prefixes:
        charts["loss"].append(f"{prefix}loss")
        charts["rewards"] += [f"{prefix}rewards_chosen_mean", f"{prefix}rewards_rejected_mean"]
        charts["margin"].append(f"{prefix}rewards_margin")
        charts["kl"] += [f"{prefix}kl", f"{prefix}delta"]
        charts["auc or accuracy"] += [f"{prefix}auc", f"{prefix}acc"]
    charts |= {"gradient norm": ["train/grad_norm"], "learning rate": ["train/lr"], "tokens/s": ["perf/tokens_per_sec"]}
    return {title: ["Multiline", [f"{re.escape(name)}$" for name in names]] for title, names in charts.items()}


def _leaves(values: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, bool | int | float | str]]:
    """Yield each key of a nested mapping as SECTION.KEY, with its value; lists and other values become text."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value if isinstance(value, bool | int | float | str) else json.dumps(value, default=str)
