"""Two ranks that run the collectives of a training run.

python -m tests.gpu.collectives FILE
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from nemo_kto.device import device
from nemo_kto.distributed import state
from nemo_kto.processes import launcher, ranks


def talk() -> dict[str, object]:
    """What this rank hears; each says its number + 1."""
    here, rank = device.current_device(), state.rank()
    own = torch.tensor([rank + 1.0], device=here)
    total, first, heard = own.clone(), own.clone(), torch.zeros_like(own)
    dist.all_reduce(total)
    gathered = [torch.zeros_like(own) for _ in range(2)]
    dist.all_gather(gathered, own)
    dist.broadcast(first, src=0)
    moves = [dist.P2POp(dist.isend, own, 1 - rank), dist.P2POp(dist.irecv, heard, 1 - rank)]
    for move in dist.batch_isend_irecv(moves):
        move.wait()
    return {
        "backend": dist.get_backend(),
        "device": here.type,
        "sum": total.item(),
        "gathered": [one.item() for one in gathered],
        "first": first.item(),
        "other": heard.item(),
        "objects": state.gather(f"rank {rank}"),
    }


def main() -> None:
    if "RANK" not in os.environ:
        launcher.spawn_ranks(2, ["-u", "-m", "tests.gpu.collectives", *sys.argv[1:]], stop_signals=["SIGTERM"])
        return
    state.init_distributed(layout=state.Layout(), seed=1)
    heard = talk()
    Path(f"{sys.argv[1]}.{os.environ['RANK']}").write_text(json.dumps(heard))
    state.destroy()
    ranks.confirm_end()


if __name__ == "__main__":
    main()
