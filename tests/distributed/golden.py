"""Three steps of every preference loss, on one rank in fp32, as they were when tests/data/golden.json was written.

    python -m tests.distributed.golden     runs them again and rewrites the file

To be run only when a change is meant to change numbers; the diff of the file then shows which ones.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from nemo_kto.losses import kto, preference
from tests.helpers.rank_pool import RankPool
from tests.helpers.tiny_models import make_checkpoint, make_pairs, make_rows, write_rows
from tests.helpers.training_jobs import train, trajectory

FILE = Path(__file__).parents[1] / "data" / "golden.json"
LOSSES = [*(("kto", loss) for loss in kto.LOSSES), *(("dpo", loss) for loss in preference.LOSSES)]
STEPS, DIGITS = 3, 7
# Small, so that a run takes half a second. A step clips its gradients, and the second has another learning rate.
SIZES: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
OVERRIDES = [
    "model.global_batch_size=8",
    "model.micro_batch_size=4",
    "model.optim.lr=2e-3",
    "model.optim.sched.min_lr=9e-7",
    "model.optim.sched.name=CosineAnnealing",
    "model.optim.sched.warmup_steps=1",
    "model.seed=5",
]
Trajectory = list[dict[str, float]]


def make_model(folder: Path) -> Path:
    """A llama with weights from NumPy's legacy generator, whose numbers no version and no processor changes."""
    from safetensors.numpy import load_file, save_file

    make_checkpoint(folder, "llama", **SIZES)
    (file,) = folder.glob("*.safetensors")
    draw = np.random.RandomState(5)
    weights = {}
    for name, values in sorted(load_file(file).items()):
        noise = draw.random_sample(values.shape) - 0.5
        weights[name] = (0.3 * noise + float(values.ndim == 1)).astype(np.float32)  # norms are close to 1
    save_file(weights, file, metadata={"format": "pt"})
    return folder


def train_with_each(folder: Path, losses: list[tuple[str, str]]) -> dict[str, Trajectory]:
    """On one rank: algorithm and loss -> what every step logs."""
    model = make_model(folder / "model")
    rows = {"kto": write_rows(folder / "kto.jsonl", make_rows(24)), "dpo": write_rows(folder / "dpo.jsonl", make_pairs(24))}
    logged = {}
    for algorithm, loss in losses:
        out = folder / f"{algorithm}-{loss}"
        given = [
            *OVERRIDES,
            f"model.{algorithm}.preference_loss={loss}",
            f"trainer.{algorithm}.max_steps={STEPS}",
            f"trainer.{algorithm}.val_check_interval={STEPS}",
            "model.reference.mode=auto",
        ]
        train(model, rows[algorithm], out, 1, given, algorithm)
        logged[out.name] = [{name: _rounded(value) for name, value in step.items()} for step in trajectory(out)]
    return logged


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


def read() -> dict[str, Trajectory]:
    """The contents of the file."""
    found: dict[str, Trajectory] = json.loads(FILE.read_text(encoding="utf-8"))
    return found


def main() -> None:
    pool = RankPool(max_ranks=1)
    with tempfile.TemporaryDirectory() as folder:
        logged: dict[str, Any] = pool.run(1, train_with_each, Path(folder), LOSSES)[0]
    pool.close()
    FILE.write_text(json.dumps(logged, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    print(f"{FILE}: {len(logged)} losses, {STEPS} steps each")


if __name__ == "__main__":
    main()
