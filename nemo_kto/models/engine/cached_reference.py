"""Precomputed reference log-probs: their files, and the reference that reads them."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from nemo_kto.artifacts.content import content_hash, model_files
from nemo_kto.distributed import state
from nemo_kto.distributed.collectives import leads_context_parallel
from nemo_kto.errors import UserError
from nemo_kto.models.engine.engine import LogProbEngine
from nemo_kto.models.engine.sequences import SequenceBatch
from nemo_kto.models.flops import Passes
from nemo_kto.utils.files import make_folder, publish_file
from nemo_kto.utils.locks import one_writer

logger = logging.getLogger(__name__)

_FORMAT = 3  # raise it when the same sequences and model give other keys or values


class ReferenceCache:
    """Files of log-probs by sequence, shared by all runs with the same reference model."""

    def __init__(
        self, *, folder: Path, settings: Mapping[str, object], models: Sequence[Path], shared: bool = False
    ) -> None:
        """Open what there is; collective. Files that are damaged are removed.

        Args:
            folder: of all caches; made if absent.
            settings: what else decides a log-prob of given tokens, such as the precision.
            models: folders that make up the reference model.
            shared: others may read the files, as the umask says; else only the user.

        Raises:
            UserError: a file cannot be read.
        """
        self._private = not shared
        self._models = models
        self._pending: dict[tuple[int, int], float] = {}
        self._parts: list[np.ndarray] = []
        with state.main_process_first(doing="checking the reference log-probs"):
            hashes = [content_hash(model, model_files(model), cache_dir=folder, shared=shared) for model in models]
            self._hashes = hashes
            about = {"format": _FORMAT, "models": hashes, **settings}
            self.folder = folder / "reference" / hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:24]
            if state.is_first_of_machine():
                self._prepare(json.dumps({**about, "folders": [str(model.resolve()) for model in models]}, indent=2))
        self._open()

    def check_models(self) -> None:
        """Compare the files of the reference model, which are about to be read again, with what they were; collective.

        Raises:
            UserError: they are others, or gone.
        """
        cache_dir = self.folder.parent.parent
        with state.main_process_first(doing="checking the reference model"):
            for model, known in zip(self._models, self._hashes, strict=True):
                try:
                    found = content_hash(model, model_files(model), cache_dir=cache_dir, shared=not self._private)
                except OSError:
                    found = None
                if found != known:
                    raise UserError(
                        f"{model} must keep its files until the run ends, as the reference is loaded again when an epoch "
                        "begins, but they have changed or are gone; restore them and start the same command again"
                    )

    @property
    def size(self) -> int:
        """Number of log-probs in the files."""
        return sum(part.shape[1] for part in self._parts)

    @contextlib.contextmanager
    def one_job(self, rows: str) -> Iterator[None]:
        """Let one job at a time compute the log-probs of the ``rows`` of that name; others wait for them. Collective."""
        with contextlib.ExitStack() as lock:
            part = f"-{hashlib.sha256(rows.encode()).hexdigest()[:12]}"
            writer = one_writer(self.folder, private=self._private, part=part)
            state.from_rank_zero(lambda: lock.enter_context(writer), doing="waiting for another job's log-probs")
            self._open()
            yield

    def refresh(self) -> None:
        """Take over what other jobs have written; collective."""
        self._open()

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
        of_model = parallel_state.get_tensor_model_parallel_rank() == 0 and parallel_state.is_pipeline_first_stage()
        leads = of_model and leads_context_parallel()
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

    def _prepare(self, about: str) -> None:
        make_folder(self.folder, private=self._private)
        with publish_file(self.folder / "about.json", private=self._private) as writing:
            writing.write_text(about, encoding="utf-8")
        for file in sorted(self.folder.glob("part-*.npy")):
            if not _is_whole(file):
                text = "reference log-probs in %s are not used and computed again: its content is not what was written"
                logger.warning(text, file)
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
    except PermissionError as error:
        remedy = "make it readable, or choose another model.data.cache_dir"
        raise UserError(f"{file} cannot be read: {error.strerror}; {remedy}") from error
    except Exception:  # cut short, or no array at all: numpy raises what it meets
        return False


_FLUSH_EVERY = 100  # batches between two writes: what a run that is killed loses


@dataclass(kw_only=True, eq=False)
class CachedReference:
    """Looks log-probs up in ``cache``; the model need not be the reference any more."""

    cache: ReferenceCache
    passes = Passes()

    def logprobs(self, *parts: SequenceBatch) -> torch.Tensor:
        """See :meth:`nemo_kto.models.engine.reference.ReferencePolicy.logprobs`.

        Raises:
            RuntimeError: a sequence is not in the cache.
        """
        return torch.cat([self._logprobs(sequences) for sequences in parts])

    def precompute(
        self,
        batches: Iterable[Sequence[SequenceBatch]],
        engine: LogProbEngine,
        *,
        active: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext,
    ) -> None:
        """Compute the log-probs that the cache lacks; collective. Every rank gives as many batches.

        Args:
            batches: the sequences of each batch.
            engine: runs the model.
            active: gives a context in which the model is the reference; it is entered when the first log-prob is missing.
        """
        with contextlib.ExitStack() as reference:
            is_active = False
            for number, parts in enumerate(batches, start=1):
                for sequences in parts:
                    keys_B2 = sequence_keys(sequences)
                    missing = np.flatnonzero(~self.cache.look_up(keys_B2)[1])
                    if not state.largest(len(missing)):
                        continue
                    if not is_active:
                        reference.enter_context(active())
                        is_active = True
                    unknown = sequences if len(missing) == len(sequences) else sequences.take(torch.from_numpy(missing))
                    logps_B = engine.logprobs(unknown)  # nothing may be missing here, and something on another rank
                    if len(missing):
                        self.cache.add(keys_B2[missing], logps_B.numpy())
                if number % _FLUSH_EVERY == 0:
                    self.cache.flush()
        self.cache.flush()

    def _logprobs(self, sequences: SequenceBatch) -> torch.Tensor:
        logps_B, found_B = self.cache.look_up(sequence_keys(sequences))
        if missing := int((~found_B).sum()):
            raise RuntimeError(
                f"reference log-probs of every sequence must be in {self.cache.folder}, but {missing} of {len(sequences)} "
                "sequences of this batch are not; the data may have been changed during the run: start it again"
            )
        return torch.from_numpy(logps_B)
