"""Time and host memory of a checkpoint at several numbers of data-parallel ranks, on the CPU with the distributed optimizer.

    python benchmarks/checkpoints.py [--tree PATH] [--ranks 2,4] [--hidden 640] [--layers 10] [--folder FOLDER]

PATH is another checkout, so that two can be compared. The model is a random Llama in fp32, whose checkpoint has 16 bytes for
each parameter: the weight, the optimizer's main weight, and two moments. A step of training is a few short texts. What is
shown is the largest over the ranks:

    wrote    seconds from the request to the complete checkpoint, while training goes on where it can
    stall    of these, how long training waited, and its share; of the first save too, which gets the memory for its copies
    memory   most that the process held during the save, beyond what it held before
    step     seconds of a step, without a save and during one
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent.parent
SAVES, STEPS_BETWEEN = 4, 2


def memory(what: str) -> int:
    """VmRSS or VmHWM of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(what))


def timed(action: Callable[[], Any]) -> float:
    began = time.monotonic()
    action()
    return time.monotonic() - began


def on_rank(rank: int, world_size: int, scratch: Path, queue: Any) -> None:
    """Save a few times during training, and tell how it went."""
    os.environ.update(LOCAL_RANK=str(rank), OMP_NUM_THREADS="1", NEMO_KTO_FORCE_CPU="1")
    import torch

    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{scratch}/store{world_size}", rank=rank, world_size=world_size
    )
    from nemo_kto.distributed import state
    from tests.helpers import lora_jobs

    state.init_distributed(layout=state.Layout(), seed=3)
    chunks, _ = lora_jobs.build(scratch / "model", state.Layout(), None)
    optimizer = lora_jobs.optimizer_of(chunks)
    manager = lora_jobs.manager_of(chunks, optimizer, scratch / f"run{world_size}", scratch / "model")
    manager.save_top_k = 0
    goes_on = hasattr(manager, "async_save")
    if goes_on:
        manager.async_save = True

    def step() -> None:
        lora_jobs.backward(chunks)
        optimizer.step()

    step()
    gc.collect()
    gc.freeze()  # as the command does, so that no collection goes through all that was imported
    alone = statistics.median(timed(step) for _ in range(4))
    for number in range(1, SAVES + 1):
        for _ in range(STEPS_BETWEEN):
            step()
        torch.distributed.barrier()
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        before, during, written = memory("VmRSS"), [], None
        wrote = stall = timed(lambda number=number: manager.save({"step": number}, {}))  # type: ignore[misc]
        while goes_on and written is None:
            during.append(timed(step))
            written = manager.poll()
        if written is not None:
            wrote, stall = written.seconds, written.stall_seconds
        queue.put((rank, number, wrote, stall, memory("VmHWM") - before, alone, statistics.median(during or [0.0])))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def measure(world_size: int, scratch: Path) -> None:
    import torch.multiprocessing as mp

    queue = mp.get_context("spawn").Queue()
    context = mp.spawn(on_rank, (world_size, scratch, queue), nprocs=world_size, join=False)
    rows = [queue.get() for _ in range(world_size * SAVES)]
    while not context.join():
        pass
    newest = scratch / f"run{world_size}" / f"step_{SAVES:06d}"
    size = sum(file.stat().st_size for file in newest.rglob("*") if file.is_file())
    saves = [[row for row in rows if row[1] == number] for number in range(1, SAVES + 1)]
    first = max(row[3] for row in saves[0]) / max(row[2] for row in saves[0])
    wrote, stall, held, alone, during = (
        statistics.median(max(row[at] for row in save) for save in saves[1:]) for at in range(2, 7)
    )
    print(
        f"{world_size} ranks  {size / 1e9:.2f} GB  wrote {wrote:.2f} s  stall {stall:.2f} s ({stall / wrote:.1%}; "
        f"of the first save {first:.1%})  "
        f"memory {held / 1e9:.2f} GB  step {alone:.2f} s, during a save {f'{during:.2f} s' if during else 'none'}",
        flush=True,
    )


def make_model(folder: Path, *, hidden: int, layers: int) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=8192, hidden_size=hidden, intermediate_size=4 * hidden, num_hidden_layers=layers, num_attention_heads=8
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure checkpoints.")
    parser.add_argument("--tree", type=Path, default=HERE, help="checkout to measure; this one if not given")
    parser.add_argument("--ranks", default="2,4", help="numbers of ranks")
    parser.add_argument("--hidden", type=int, default=640)
    parser.add_argument("--layers", type=int, default=10)
    parser.add_argument("--folder", type=Path, help="where to write; a temporary folder if not given")
    arguments = parser.parse_args()
    if os.environ.get("PYTHONPATH", "").split(os.pathsep)[0] != str(arguments.tree.resolve()):
        environment = {**os.environ, "PYTHONPATH": str(arguments.tree.resolve())}
        sys.exit(subprocess.run([sys.executable, *sys.argv], env=environment, check=False).returncode)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        make_model(Path(name) / "model", hidden=arguments.hidden, layers=arguments.layers)
        for world_size in map(int, arguments.ranks.split(",")):
            measure(world_size, Path(name))


if __name__ == "__main__":
    main()
