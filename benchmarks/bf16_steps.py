"""Three KTO steps of a tiny model in bf16, compared with the same steps of transformers' model, for several seeds.

    python benchmarks/bf16_steps.py [FAMILY] [--seeds 12] [--lr 5e-4]

FAMILY is one of tests/helpers/tiny_models.py, by default gpt_oss. Each seed gives other weights and rows. The same steps are
taken by nemo_kto in bf16, by transformers in bf16, and by transformers in fp64 with weights rounded to bf16; all keep main
weights and moments in fp32, and take logits in fp32 or wider. At the first step policy and reference are equal. Printed is
the standard deviation of the rewards of the eight examples of steps 2 and 3, as differences between two of the three: mean
over the seeds, its standard error, and the range.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent.parent
STEPS, BATCH, BETA, BETAS, EPS, CLIP = 3, 8, 0.1, (0.9, 0.98), 1e-8, 1.0
OURS, THEIRS, EXACT = "nemo_kto", "transformers", "fp64"
Batches = Sequence[Mapping[str, Any]]


def make_batches(model: Path, seed: int) -> Batches:
    """Collated batches of random rows."""
    import numpy as np
    from transformers import AutoTokenizer

    from nemo_kto.data.batches.collate import kto_custom_collate
    from nemo_kto.data.batches.dataset import KTOExample
    from tests.helpers.tiny_models import make_rows

    tokenizer = AutoTokenizer.from_pretrained(model)
    examples = [
        KTOExample(
            prompt_ids=np.array(tokenizer(row["prompt"])["input_ids"]),
            response_ids=np.array(tokenizer(f" {row['response']}")["input_ids"]),
            desirable=row["preference"] == "chosen",
        )
        for row in make_rows(STEPS * BATCH, seed=seed)
    ]
    starts = range(0, len(examples), BATCH)
    return [kto_custom_collate(examples[k : k + BATCH], tokenizer.eos_token_id, with_kl=True) for k in starts]


def our_steps(folder: Path, batches: Batches, lr: float) -> list[float]:
    """The standard deviation of the rewards at each step of nemo_kto."""
    import torch

    from nemo_kto.architecture.architecture import read_architecture
    from nemo_kto.huggingface.hf_weights import load_weights
    from nemo_kto.models.engine.optimizer import build_optimizer, wrap_data_parallel
    from nemo_kto.models.engine.reference import SwappedWeights
    from nemo_kto.models.gpt import build_gpt
    from tests.helpers.engines import engine, kto_model

    architecture, dtype = read_architecture(folder, tensor_parallel=1), torch.bfloat16
    chunks = wrap_data_parallel([build_gpt(architecture, params_dtype=dtype)], use_distributed_optimizer=False)
    load_weights(chunks, architecture, folder)
    frozen = SwappedWeights(parameters=chunks[0].parameters())
    runs = engine(chunks, architecture, micro_batch_size=4, logprob_chunk_size=64)
    runs.forward_micro_batch_size = None
    model = kto_model(runs, frozen.active, beta=BETA, weights=(1.0, 1.0))
    rates: dict[str, Any] = {"lr": lr, "min_lr": lr, "weight_decay": 0.0, "betas": BETAS, "eps": EPS, "clip_grad": CLIP}
    optimizer = build_optimizer(chunks=chunks, params_dtype=dtype, use_distributed_optimizer=False, **rates)
    found = []
    for batch in batches:
        model.zero_grad()
        optimizer.zero_grad()
        samples, kl_samples = model.get_ref_policy_logprobs(batch).chunk(2)
        reference = {"ref_policy_log_probs_samples": samples, "ref_policy_log_probs_kl_samples": kl_samples}
        found.append(model.get_loss_and_metrics({**batch, **reference}, forward_only=False)[1]["rewards_all_std"])
        optimizer.step()
    return found


def their_steps(folder: Path, batches: Batches, lr: float, *, dtype: str) -> list[float]:
    """The same of transformers' model, whose weights are those of the optimizer rounded to bf16, computed in ``dtype``."""
    import torch
    from transformers import AutoModelForCausalLM

    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **eager)
    mains = [torch.nn.Parameter(weight.detach().clone()) for weight in model.parameters()]
    model = model.to(getattr(torch, dtype))
    wide = torch.promote_types(torch.float32, getattr(torch, dtype))
    optimizer = torch.optim.AdamW(mains, lr=lr, betas=BETAS, eps=EPS, weight_decay=0.0)

    def log_probs(batch: Mapping[str, Any], kind: str) -> torch.Tensor:
        tokens, labels = batch[kind], batch[f"{kind[:-1]}_labels"][:, 1:]
        mask = torch.arange(tokens.shape[1]) < batch[f"{kind[:-1]}_lengths"][:, None]
        hidden = model.model(input_ids=tokens, attention_mask=mask.long()).last_hidden_state.to(wide)
        logps = (hidden @ model.lm_head.weight.to(wide).T)[:, :-1].log_softmax(-1)
        return (logps.gather(-1, labels.clamp(min=0)[..., None])[..., 0] * (labels >= 0)).sum(-1)

    with torch.no_grad():
        references = [[log_probs(batch, kind) for kind in ("samples", "kl_samples")] for batch in batches]
    found = []
    for batch, (reference, kl_reference) in zip(batches, references, strict=True):
        with torch.no_grad():
            z0 = (log_probs(batch, "kl_samples") - kl_reference).mean().clamp(min=0)
        ratios = log_probs(batch, "samples") - reference
        signs = torch.where(batch["preference"].bool(), 1.0, -1.0)
        model.zero_grad()
        (1 - torch.sigmoid(signs * BETA * (ratios - z0))).mean().backward()
        for main, weight in zip(mains, model.parameters(), strict=True):
            main.grad = torch.zeros_like(main) if weight.grad is None else weight.grad.float()
        torch.nn.utils.clip_grad_norm_(mains, CLIP)
        optimizer.step()
        with torch.no_grad():
            for main, weight in zip(mains, model.parameters(), strict=True):
                weight.copy_(main.bfloat16())
        found.append(float((BETA * ratios.detach().double()).std()))
    return found


def compare(family: str, *, seeds: int, lr: float, scratch: Path) -> None:
    """Take the steps of every seed, and print the differences."""
    import torch

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{scratch}/store", rank=0, world_size=1)
    from nemo_kto.distributed import state
    from tests.helpers.tiny_models import make_checkpoint

    state.init_distributed(layout=state.Layout(), seed=3)
    found: dict[str, list[list[float]]] = {OURS: [], THEIRS: [], EXACT: []}
    for seed in range(seeds):
        model = make_checkpoint(scratch / f"{seed}", family, seed=seed, dtype="bfloat16")
        batches = make_batches(model, seed)
        found[OURS].append(our_steps(model, batches, lr))
        found[THEIRS].append(their_steps(model, batches, lr, dtype="bfloat16"))
        found[EXACT].append(their_steps(model, batches, lr, dtype="float64"))
        print(f"seed {seed}:", {name: [f"{std:.4f}" for std in runs[-1]] for name, runs in found.items()}, flush=True)
    print("\n| step | compared | mean | standard error | range |\n|---|---|---|---|---|")
    for step in range(1, STEPS):
        for first, second in ((OURS, THEIRS), (OURS, EXACT), (THEIRS, EXACT)):
            parts = [a[step] / b[step] - 1 for a, b in zip(found[first], found[second], strict=True)]
            error, ends = statistics.stdev(parts) / len(parts) ** 0.5, f"{min(parts):+.1%} to {max(parts):+.1%}"
            print(f"| {step + 1} | {first} with {second} | {statistics.mean(parts):+.1%} | {error:.1%} | {ends} |")


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare KTO steps in bf16 with those of transformers.")
    parser.add_argument("family", nargs="?", default="gpt_oss")
    parser.add_argument("--seeds", type=int, default=12)
    parser.add_argument("--lr", type=float, default=5e-4)
    arguments = parser.parse_args()
    sys.path.insert(0, str(HERE))
    os.environ["NEMO_KTO_FORCE_CPU"] = "1"
    with tempfile.TemporaryDirectory() as scratch:
        compare(arguments.family, seeds=arguments.seeds, lr=arguments.lr, scratch=Path(scratch))


if __name__ == "__main__":
    main()
