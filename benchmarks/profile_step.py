"""What a forward and backward pass on the CPU spends its time on, by operator.

    python benchmarks/profile_step.py MODEL [--tree PATH] [--rows 4] [--tokens 240] [--threads 2] [--passes 4]
        [--dtype fp32]

MODEL is a Hugging Face folder. PATH is another checkout, so that two can be compared: run them in turn, more than once. The
rows are random tokens, of which two thirds are responses, in micro-batches of one, in fp32 or bf16. Printed are the CPU
seconds of each pass, and the operators of one more, with the share of matrix products.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent.parent
PRODUCTS = ("aten::mm", "aten::addmm", "aten::addmm_", "aten::bmm")
SHOWN = 15
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


def measure(model: Path, *, rows: int, tokens: int, threads: int, passes: int, dtype: str, scratch: str) -> None:
    """Pass the rows through the model, timed and then profiled."""
    import torch

    torch.set_num_threads(threads)
    torch.distributed.init_process_group("gloo", init_method=f"file://{scratch}/store", rank=0, world_size=1)
    from nemo_kto.distributed import state
    from nemo_kto.models.engine.engine import LogProbs, MicroBatchLoss
    from nemo_kto.models.engine.sequences import SequenceBatch
    from tests.helpers import lora_jobs
    from tests.helpers.engines import engine

    state.init_distributed(layout=state.Layout(), seed=3)
    chunks, architecture = lora_jobs.build(model, state.Layout(), None, dtype=getattr(torch, DTYPES[dtype]))
    runs = engine(chunks, architecture, micro_batch_size=1, logprob_chunk_size=1024)
    tokens_BS = torch.randint(0, architecture.vocab_size, (rows, tokens), generator=torch.Generator().manual_seed(1))
    labels_BS = tokens_BS.clone()
    labels_BS[:, : tokens // 3] = -100
    sequences = SequenceBatch.of(tokens_BS, labels_BS, torch.full((rows,), tokens))

    def loss(_: torch.Tensor, logprobs: LogProbs) -> MicroBatchLoss:
        return MicroBatchLoss.of(
            {"loss_sum": -logprobs.response_b.sum(), "rows": torch.tensor(float(len(logprobs.response_b)))}
        )

    def one_pass() -> None:
        runs.zero_grad()
        runs.forward_backward(sequences, loss, forward_only=False)

    one_pass()
    seconds = []
    for _ in range(passes):
        began = time.process_time()
        one_pass()
        seconds.append(time.process_time() - began)
    print("CPU seconds of a pass:", *(f"{each:.2f}" for each in sorted(seconds)))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        one_pass()
    found = sorted(profile.key_averages(), key=lambda each: -each.self_cpu_time_total)
    total = sum(each.self_cpu_time_total for each in found)
    products = sum(each.self_cpu_time_total for each in found if each.key in PRODUCTS)
    print("\n| operator | share | milliseconds | calls |\n|---|---|---|---|")
    print(f"| matrix products | {products / total:.1%} | {products / 1000:.0f} | |")
    for each in found[:SHOWN]:
        milliseconds = each.self_cpu_time_total / 1000
        print(f"| `{each.key}` | {each.self_cpu_time_total / total:.1%} | {milliseconds:.0f} | {each.count} |")


def main() -> None:
    parser = argparse.ArgumentParser(description="Profile a forward and backward pass on the CPU.")
    parser.add_argument("model", type=Path, help="Hugging Face folder")
    parser.add_argument("--tree", type=Path, default=HERE, help="checkout to measure; this one if not given")
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=240, help="of a row")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--passes", type=int, default=4)
    parser.add_argument("--dtype", choices=DTYPES, default="fp32")
    arguments = parser.parse_args()
    wanted = {"PYTHONPATH": str(arguments.tree.resolve()), "NEMO_KTO_FORCE_CPU": "1"}
    if any(os.environ.get(name) != value for name, value in wanted.items()):
        sys.exit(subprocess.run([sys.executable, *sys.argv], env={**os.environ, **wanted}, check=False).returncode)
    with tempfile.TemporaryDirectory() as scratch:
        sizes = {name: getattr(arguments, name) for name in ("rows", "tokens", "threads", "passes", "dtype")}
        measure(arguments.model, **sizes, scratch=scratch)


if __name__ == "__main__":
    main()
