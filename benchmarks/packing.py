"""Packed rows compared with micro-batches of padded rows: tokens a second of a KTO step on reviews of their natural length.

    python benchmarks/packing.py MODEL [--reviews 32] [--rounds 2] [--threads 2] [--hardware cpu] [--work-only]

MODEL is a Hugging Face folder. The reviews are those of the quickstart's package, of all lengths, cut to 1024 tokens. One
process takes each way of cutting in turn, round after round: the KL examples forward, the samples forward and backward,
without the optimizer and with the reference's log-probs known. Loss and KL are shown: if they agree, all computed the same.
Speeds are compared by CPU seconds where there is no GPU, which other work on the machine changes less.

First, and alone with --work-only, it counts what each rank would be given: padding, and the work of the rank with the most
over the mean, for global batches of 256.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "quickstart"))

SEQ_LENGTH, SEED = 1024, 1234
PADDED = {f"{count} rows": {"prompts": count, "tokens": None} for count in (1, 2, 4, 8)}
PADDED |= {f"up to {count} tokens": {"prompts": None, "tokens": count} for count in (512, 1024, 2048, 8192)}
PACKED = {f"packed, {count} tokens": {"prompts": None, "tokens": count, "packed": True} for count in (512, 1024, 2048, 8192)}
WAYS: dict[str, dict[str, Any]] = {**PADDED, **PACKED}
RANKS, GLOBAL_BATCH = (2, 4, 8, 16), 256


@dataclass
class Figures:
    """Of one way of cutting: seconds of each round, and what shows that it computed the same."""

    padding: float = 0.0
    seconds: list[float] = field(default_factory=list)
    loss: float = 0.0
    kl: float = 0.0


def review_rows(count: int, folder: Path) -> list[dict[str, Any]]:
    """So many reviews, half of them positive, drawn from all of the package."""
    from prepare import REVIEWS, extract

    text = extract(REVIEWS, folder).read_text(encoding="utf-8")
    draw = random.Random(SEED)
    reviews = list(csv.DictReader(io.StringIO(text)))
    good, bad = ([row["text"] for row in reviews if row["label"] == label] for label in ("1", "0"))
    drawn = [(text, True) for text in draw.sample(good, count // 2)] + [
        (text, False) for text in draw.sample(bad, count // 2)
    ]
    draw.shuffle(drawn)
    return [
        {"prompt": f"Review film {number}.\n", "completion": text, "label": label}
        for number, (text, label) in enumerate(drawn)
    ]


def build(model: Path, rows: Sequence[dict[str, Any]], *, hardware: str, folder: str) -> tuple[Any, Any]:
    """The trainer, and its batch of all rows with log-probs of a reference."""
    from nemo_kto.config import compose
    from nemo_kto.config.resolved import ResolvedRun
    from nemo_kto.distributed import state
    from nemo_kto.run.build_trainer import build_trainer
    from nemo_kto.run.policy import build_policy
    from nemo_kto.run.prepare import Placement, prepare

    rows_file = Path(folder) / "rows.jsonl"
    rows_file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    overrides = [
        *([f"hardware={hardware}"] if hardware == "cpu" else []),
        f"pretrained_checkpoint.restore_from_path={model}",
        f"model.data.data_prefix={rows_file}",
        "model.data.splits_string=null",
        f"model.data.seq_length={SEQ_LENGTH}",
        f"model.data.cache_dir={folder}/cache",
        f"exp_manager.explicit_log_dir={folder}/run",
        "exp_manager.create_tensorboard_logger=false",
        "export.report=false",
        f"trainer.precision={'32' if hardware == 'cpu' else 'bf16'}",
        f"model.global_batch_size={len(rows)}",
        "model.reference.mode=swap",
    ]
    cfg, problems = compose.to_config(compose.load(overrides))
    assert cfg is not None, problems
    state.init_distributed(layout=state.Layout(), seed=cfg.model.seed)
    run = ResolvedRun.of(cfg)
    trainer = build_trainer(run, build_policy(run), prepare(run), Placement.of(run))
    batch = next(iter(trainer.train_dataloader))
    # a little less likely than the policy has them: of equal or of far values, loss and KL would say nothing
    reference = 1.01 * trainer.model.get_ref_policy_logprobs(batch)
    batch["ref_policy_log_probs_samples"], batch["ref_policy_log_probs_kl_samples"] = reference.chunk(2)
    return trainer, batch


def measure(trainer: Any, batch: Any, way: dict[str, Any], figures: Figures) -> None:
    """One round of one way of cutting."""
    from nemo_kto.device import device

    engine, clock = trainer.model.engine, time.perf_counter if device.on_gpu() else time.process_time
    engine.limits = replace(engine.limits, **{"packed": False, "share_prompts": False, **way})
    samples, kl_samples = trainer.model.sequences(batch)
    carried = sum(each.padded_tokens(engine.limits) for each in (samples, kl_samples))
    figures.padding = 1 - int(samples.lengths_B.sum() + kl_samples.lengths_B.sum()) / carried
    trainer.model.zero_grad()
    device.synchronize()
    started = clock()
    figures.loss, metrics = trainer.model.get_loss_and_metrics(batch, forward_only=False)
    device.synchronize()
    figures.seconds.append(clock() - started)
    figures.kl = metrics["kl"]


def table(found: dict[str, Figures], tokens: int) -> str:
    """The figures as a Markdown table; ratios are to the fastest padded way."""
    speeds = {name: tokens / statistics.median(figures.seconds) for name, figures in found.items()}
    best = max(speeds[name] for name in found if name in PADDED)
    lines = ["| micro-batches | padding | tokens / s | of the best padded | loss | KL |", "|---|---|---|---|---|---|"]
    lines += [
        f"| {name} | {each.padding:.1%} | {speeds[name]:.1f} | {speeds[name] / best:.2f} | {each.loss:.6f} | {each.kl:.5f} |"
        for name, each in found.items()
    ]
    return "\n".join(lines)


def work_table(rows: Sequence[dict[str, Any]], model: Path) -> str:
    """Padding and imbalance of what ranks get, as a Markdown table; the mean over the global batches."""
    from transformers import AutoTokenizer

    from nemo_kto.architecture.architecture import read_architecture
    from nemo_kto.data.batches.dataset import KTOExample
    from nemo_kto.data.batches.loader import KTOCosts, balanced_shares, every_nth
    from nemo_kto.layers.packing import pack_lengths
    from nemo_kto.models.flops import ModelFlops, Passes

    tokenizer, flops = (
        AutoTokenizer.from_pretrained(model),
        ModelFlops.of_model(read_architecture(model, tensor_parallel=1)),
    )
    prompts, answers = (tokenizer([row[name] for row in rows])["input_ids"] for name in ("prompt", "completion"))
    cost, kl_cost = (
        operations.of_tokens for operations in map(flops.of_passes, (Passes(forward=2, backward=1), Passes(forward=2)))
    )
    costs = KTOCosts(cost=cost, kl_cost=kl_cost, seq_length=SEQ_LENGTH)
    examples = [
        KTOExample(prompt_ids=prompt, response_ids=answer[: SEQ_LENGTH - len(prompt)], desirable=True)
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    lines = [
        "| ranks | work of the busiest over the mean | shared out by number | padding of rows of 8192, on a GPU |",
        "|---|---|---|---|",
    ]
    for ranks in RANKS:
        by_cost: list[float] = []
        by_number: list[float] = []
        padding: list[float] = []
        for start in range(0, len(examples) - GLOBAL_BATCH + 1, GLOBAL_BATCH):
            batch = examples[start : start + GLOBAL_BATCH]
            costs_N = costs(batch)
            shares = balanced_shares(costs_N, ranks=ranks)
            for kept, into in ((shares, by_cost), (every_nth(batch, ranks=ranks), by_number)):
                sums = [sum(costs_N[number] for number in share) for share in kept]
                into.append(max(sums) / statistics.mean(sums) - 1)
            lengths = [
                [len(batch[number].prompt_ids) + len(batch[number].response_ids) for number in share] for share in shares
            ]
            widths = [sum(own[k] for k in row) for own in lengths for row in pack_lengths(own, tokens=8192)]
            padding.append(1 - sum(widths) / sum(-(-width // 64) * 64 for width in widths))
        means = [statistics.mean(each) for each in (by_cost, by_number, padding)]
        lines.append(f"| {ranks} | {means[0]:.2%} | {means[1]:.1%} | {means[2]:.2%} |")
    return "\n".join(lines)


def main() -> None:
    """Count, then measure each way in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--reviews", type=int, default=32, help="of the batch that is measured; even")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--hardware", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--only", choices=WAYS, action="append", help="measure this one; may be given more than once")
    parser.add_argument("--work-only", action="store_true", help="count, and measure nothing")
    arguments = parser.parse_args()
    import torch

    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as folder:
        print(work_table(review_rows(4096, Path(folder)), arguments.model), flush=True)
        if arguments.work_only:
            return
        rows = review_rows(arguments.reviews, Path(folder))
        trainer, batch = build(arguments.model, rows, hardware=arguments.hardware, folder=folder)
        ways = {name: WAYS[name] for name in arguments.only or WAYS}
        found = {name: Figures() for name in ways}
        measure(trainer, batch, next(iter(ways.values())), Figures())  # the first one of a process is slower
        for name in list(ways) * arguments.rounds:
            measure(trainer, batch, ways[name], found[name])
            print(f"{name}: {found[name].seconds[-1]:.1f} s", file=sys.stderr)
        samples, _ = trainer.model.sequences(batch)
        told = f"{arguments.reviews} reviews, {arguments.hardware}, {arguments.threads} threads"
        print(f"\n{told}, medians of {arguments.rounds} rounds\n")
        print(table(found, int(samples.lengths_B.sum())))


if __name__ == "__main__":
    main()
