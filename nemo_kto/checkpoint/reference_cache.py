"""Reference log-probs, computed once and kept: a run that finds its sequences here never evaluates the reference model.

A sequence is found by a hash of its tokens and labels. Whatever decides what the sequences of a run are (data, tokenizer,
chat template, truncation, and for KL pairs seed and batch size) is in the key by what it produces, so that a run which
differs in any of it finds what is still right and computes the rest.

    CACHE/reference/<hash of model and settings>/about.json    what the log-probs are of
                                                /part-*.npy    log-probs by key; complete or absent, checked when opened
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from megatron.core import parallel_state

from nemo_kto.checkpoint.content import model_files
from nemo_kto.files import make_folder, publish_file
from nemo_kto.models.sequences import SequenceBatch
from nemo_kto.parallel import state

logger = logging.getLogger(__name__)

_FORMAT = 2  # raise it when the same sequences and model give other keys or values


def model_state(folder: Path) -> dict[str, list[int]]:
    """What changes when the weights in ``folder`` do: size and time of change of every file of weights or configuration."""
    return {str(file.relative_to(folder)): [file.stat().st_size, file.stat().st_mtime_ns] for file in model_files(folder)}


class ReferenceCache:
    """Files of log-probs by sequence, shared by all runs with the same reference model."""

    def __init__(
        self, *, folder: Path, settings: Mapping[str, object], models: Sequence[Path], shared: bool = False
    ) -> None:
        """Open what there is; collective. Files that are damaged, or of weights that have changed since, are removed.

        Args:
            folder: of all caches; made if absent.
            settings: what else decides a log-prob of given tokens, such as the precision.
            models: folders that make up the reference model.
            shared: others may read the files, as the umask says; else only the user.
        """
        name = {"format": _FORMAT, "models": [str(model.resolve()) for model in models], **settings}
        self.folder = folder / "reference" / hashlib.sha256(json.dumps(name, sort_keys=True).encode()).hexdigest()[:24]
        self._about = {**name, "state": [model_state(model) for model in models]}
        self._private = not shared
        self._pending: dict[tuple[int, int], float] = {}
        self._parts: list[np.ndarray] = []
        with state.main_process_first(doing="checking the reference log-probs"):
            if state.is_first_of_machine():
                self._prepare()
        self._open()

    @property
    def size(self) -> int:
        """Number of log-probs in the files."""
        return sum(part.shape[1] for part in self._parts)

    def look_up(self, keys_N2: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Log-probs [N] float32 of sequences with these keys, and whether each was found [N] bool."""
        logps_N = np.zeros(len(keys_N2), dtype=np.float32)
        found_N = np.zeros(len(keys_N2), dtype=bool)
        for part in self._parts:
            place_N = np.searchsorted(part[0], keys_N2[:, 0]).clip(max=part.shape[1] - 1)
            here_N = (part[0, place_N] == keys_N2[:, 0]) & (part[1, place_N] == keys_N2[:, 1])
            logps_N[here_N] = part[2].view(np.float64)[place_N[here_N]]
            found_N |= here_N
        for place in np.flatnonzero(~found_N) if self._pending else ():
            if (logp := self._pending.get(tuple(keys_N2[place].tolist()))) is not None:
                logps_N[place], found_N[place] = logp, True
        return logps_N, found_N

    def add(self, keys_N2: np.ndarray, logps_N: np.ndarray) -> None:
        """Note the log-probs of sequences of this rank; :meth:`flush` writes them."""
        self._pending.update(zip(map(tuple, keys_N2.tolist()), logps_N.tolist(), strict=True))

    def flush(self) -> None:
        """Write what all ranks have noted, and let all of them know it; collective."""
        leads = parallel_state.get_tensor_model_parallel_rank() == 0 and parallel_state.is_pipeline_first_stage()
        noted: list[dict[tuple[int, int], float]] = [{}] * state.world_size()
        dist.all_gather_object(noted, self._pending if leads else {})
        known = {key: logp for part in noted for key, logp in part.items()}
        self._pending = {}
        if not known:
            return
        order = sorted(known)
        logps_N = np.array([known[key] for key in order], dtype=np.float64)
        part = np.vstack([np.array(order, dtype=np.int64).T, logps_N.view(np.int64)])
        with state.main_process_first(doing="writing reference log-probs"):
            if state.is_first_of_machine():
                target = self.folder / f"part-{_digest(part)}.npy"
                with publish_file(target, private=self._private) as writing, writing.open("wb") as file:
                    np.save(file, part)
        self._open()

    def _prepare(self) -> None:
        about = self.folder / "about.json"
        if about.exists() and (reason := _difference(json.loads(about.read_text(encoding="utf-8")), self._about)):
            self._refuse(list(self.folder.glob("part-*.npy")), reason)
            about.unlink(missing_ok=True)  # another machine may have been first
        make_folder(self.folder, private=self._private)
        if not about.exists():
            with publish_file(about, private=self._private) as writing:
                writing.write_text(json.dumps(self._about, indent=2), encoding="utf-8")
        damaged = [file for file in self.folder.glob("part-*.npy") if not _is_whole(file)]
        self._refuse(damaged, "its content is not what was written")

    def _refuse(self, files: Sequence[Path], reason: str) -> None:
        for file in files:
            logger.warning("reference log-probs in %s are not used and computed again: %s", file, reason)
            file.unlink(missing_ok=True)

    def _open(self) -> None:
        """Map the parts that every rank sees: all must agree on what is there, or some would wait for others forever."""
        mine = {file.name for file in self.folder.glob("part-*.npy")}
        seen: list[set[str]] = [set()] * state.world_size()
        dist.all_gather_object(seen, mine)
        self._parts = [np.load(self.folder / name, mmap_mode="r") for name in sorted(set.intersection(*seen))]


def sequence_keys(sequences: SequenceBatch) -> np.ndarray:
    """[B, 2] int64: a hash of each sequence's tokens and labels, without its padding."""
    keys_B2 = np.empty((len(sequences), 2), dtype=np.int64)
    tokens_BS, labels_BS = sequences.tokens_BS.numpy(), sequences.labels_BS.numpy()
    for number, length in enumerate(sequences.lengths_B.tolist()):
        content = tokens_BS[number, :length].tobytes() + labels_BS[number, :length].tobytes()
        keys_B2[number] = np.frombuffer(hashlib.blake2b(content, digest_size=16).digest(), dtype=np.int64)
    return keys_B2


def _digest(part: np.ndarray) -> str:
    return hashlib.blake2b(np.ascontiguousarray(part).data, digest_size=12).hexdigest()


def _is_whole(file: Path) -> bool:
    try:
        return file.name == f"part-{_digest(np.load(file, mmap_mode='r'))}.npy"
    except (OSError, ValueError):  # cut short, or no array at all
        return False


def _difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """What has changed in the reference model since its log-probs were computed; None if nothing has."""
    for old, new in zip(before["state"], now["state"], strict=True):
        changed = sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))
        if changed:
            return f"{', '.join(changed)} of the reference model changed since"
    return None
