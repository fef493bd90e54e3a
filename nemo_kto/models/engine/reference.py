"""Reference policies that need no second model on the device: the model itself, or precomputed log-probs in cache files."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from nemo_kto.device import device
from nemo_kto.distributed import state
from nemo_kto.distributed.collectives import leads_context_parallel
from nemo_kto.errors import UserError
from nemo_kto.model_files.model_folders import content_hash, model_files
from nemo_kto.models.engine.engine import LogProbEngine
from nemo_kto.models.engine.sequences import SequenceBatch
from nemo_kto.models.flops import Passes
from nemo_kto.utils.files import make_folder, publish_file, writing_cache
from nemo_kto.utils.locks import one_writer

logger = logging.getLogger(__name__)

_FORMAT = 4  # increase it when the same sequences and model give different keys or values
_FLUSH_EVERY = 100  # batches between two writes; a run that is killed loses at most these

Phase = Callable[[str], AbstractContextManager[object]]
"""Context that a timer records under the name of a phase of a step; nullcontext if nothing is measured."""


class ReferencePolicy(Protocol):
    """Interface that returns the log-prob of each response under the reference, part after part: fp32, on the device."""

    @property
    def passes(self) -> Passes: ...  # passes through the model for the reference log-prob of one sequence
    def logprobs(self, *parts: SequenceBatch) -> Tensor: ...


@dataclass(kw_only=True, eq=False)
class LiveReference:
    """Reference that runs the model itself inside a context, ``active()``, that turns it into the reference."""

    engine: LogProbEngine
    active: Callable[[], AbstractContextManager[None]]
    passes: Passes

    def logprobs(self, *parts: SequenceBatch) -> Tensor:
        with self.active():
            return self.engine.logprobs(*parts)


class SwappedWeights:
    """Reference weights that take the place of the policy weights while the reference is evaluated.

    From host memory, a swap moves one tensor after the other, so it needs extra device memory for two tensors at most. On
    the device no value moves: each parameter refers to the other memory. A reference that is updated has fp32 values as
    well: in bf16, updates smaller than half the distance to the next representable number would be rounded away.
    """

    def __init__(
        self,
        *,
        parameters: Iterable[torch.nn.Parameter],  # those that differ between the policy and the reference
        finish_gathers: Callable[[], None] = lambda: None,  # completes pending all-gathers of the parameters
        on_device: bool = False,  # keep the reference weights on the device of the parameters
        moves: bool = False,  # the reference will be updated by :meth:`mix`
        phase: Phase = contextlib.nullcontext,  # records the swap in a timer
    ) -> None:
        """Copy the current values as the reference; call before the first update of the policy."""
        self.parameters = list(parameters)
        # reference values in the dtype of the parameters; the policy values while the reference is active
        if on_device:
            self.kept = [parameter.detach().clone() for parameter in self.parameters]
        else:
            self.kept = device.copied_to_host(self.parameters)
        # unrounded values of ``kept``: fp32 if the reference is updated
        self.values = [kept.float() for kept in self.kept] if moves else self.kept
        self._on_device = on_device
        self._finish_gathers, self._phase = finish_gathers, phase

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Compute with the reference weights inside the block; the policy weights are restored bit for bit afterwards."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        with self._phase("reference_swap"), torch.no_grad():
            self._finish_gathers()
            if not self._on_device:
                device.swap_(self.parameters, self.kept)
                return
            for number, parameter in enumerate(self.parameters):
                self.kept[number], parameter.data = parameter.data, self.kept[number]

    @torch.no_grad()
    def mix(self, mixup_alpha: float) -> None:
        """Mix the policy into the reference: reference = alpha * policy + (1 - alpha) * reference, in fp32.

        TR-DPO (Gorbatovski et al. 2024, arXiv 2404.09656, equations 5 and 6): an alpha of 1 replaces the reference.
        """
        self._finish_gathers()
        device.synchronize()  # the last swap may still be writing to ``kept``
        for parameter, value in zip(self.parameters, self.values, strict=True):
            value.lerp_(parameter.detach().to(value.device, torch.float32), mixup_alpha)
        self.round_values()

    @torch.no_grad()
    def round_values(self) -> None:
        """Copy ``values`` into ``kept``, rounded to the dtype of the parameters."""
        for kept, value in zip(self.kept, self.values, strict=True):
            kept.copy_(value)


class ReferenceCache:
    """On-disk cache of log-probs by sequence, shared by all runs with the same reference model."""

    def __init__(
        self, *, folder: Path, settings: Mapping[str, object], models: Sequence[Path], shared: bool = False
    ) -> None:
        """Open the existing cache files and remove damaged ones; collective. Raises UserError if a file cannot be read.

        ``folder`` is the parent of all caches, created if absent; ``models`` are the folders that make up the reference
        model; ``settings`` are further settings on which the log-prob of given tokens depends, such as the precision. With
        ``shared``, other users may read the files, subject to the umask.
        """
        self._private = not shared
        self._models = models
        self._pending: dict[tuple[int, int], float] = {}
        self._parts: list[np.ndarray] = []
        with state.main_process_first(doing="checking the reference log-probs"):
            self._hashes = [content_hash(model, model_files(model), cache_dir=folder, shared=shared) for model in models]
            about = {"format": _FORMAT, "models": self._hashes, **settings}
            self.folder = folder / "reference" / hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:24]
            if state.is_first_of_machine():
                self._prepare({**about, "folders": [str(model.resolve()) for model in models]})
        self.refresh()

    def check_models(self) -> None:
        """Raise UserError if the reference model's files, which are about to be read again, have changed; collective."""
        cache_dir = self.folder.parent.parent
        with state.main_process_first(doing="checking the reference model"):
            for model, known in zip(self._models, self._hashes, strict=True):
                try:
                    found = content_hash(model, model_files(model), cache_dir=cache_dir, shared=not self._private)
                except OSError:
                    found = None
                if found != known:
                    raise UserError(
                        f"the files of {model} have changed or are missing, but the reference is loaded again from them at "
                        "the start of an epoch; restore them and start the same command again"
                    )

    @property
    def size(self) -> int:
        """Number of log-probs in the cache files."""
        return sum(part.shape[1] for part in self._parts)

    @contextlib.contextmanager
    def one_job(self, rows: str) -> Iterator[None]:
        """Let one job at a time compute the log-probs of the data that ``rows`` describes; others wait. Collective."""
        with contextlib.ExitStack() as lock:
            part = f"-{hashlib.sha256(rows.encode()).hexdigest()[:12]}"
            writer = one_writer(self.folder, private=self._private, part=part)
            state.from_rank_zero(lambda: lock.enter_context(writer), doing="waiting for another job's log-probs")
            self.refresh()
            yield

    def refresh(self) -> None:
        """Memory-map the cache files, including those of other jobs; collective."""
        visible = {file.name for file in self.folder.glob("part-*.npy")}
        per_rank: list[set[str]] = [set()] * state.world_size()
        dist.all_gather_object(per_rank, visible)
        # only files that every rank sees: otherwise some ranks would enter a collective that the others never reach
        self._parts = [np.load(self.folder / name, mmap_mode="r") for name in sorted(set.intersection(*per_rank))]

    def look_up(self, keys_N2: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the log-probs [N] float32 of the sequences with these keys, and whether each was found [N] bool."""
        logps_N = np.zeros(len(keys_N2), dtype=np.float32)
        found_N = np.zeros(len(keys_N2), dtype=bool)
        for part in self._parts:
            place_N = np.searchsorted(part[0], keys_N2[:, 0]).clip(max=part.shape[1] - 1)
            is_in_part_N = (part[0, place_N] == keys_N2[:, 0]) & (part[1, place_N] == keys_N2[:, 1])
            logps_N[is_in_part_N] = part[2].view(np.float64)[place_N[is_in_part_N]]
            found_N |= is_in_part_N
        for k in np.flatnonzero(~found_N) if self._pending else ():
            if (logp := self._pending.get(tuple(keys_N2[k].tolist()))) is not None:
                logps_N[k], found_N[k] = logp, True
        return logps_N, found_N

    def add(self, keys_N2: np.ndarray, logps_N: np.ndarray) -> None:
        """Collect log-probs of this rank's sequences in memory; :meth:`flush` writes them."""
        self._pending.update(zip(map(tuple, keys_N2.tolist()), logps_N.tolist(), strict=True))

    def flush(self) -> None:
        """Write the log-probs that all ranks have added, and open the new file on every rank; collective."""
        # one rank of each model replica contributes; the others have the same log-probs
        first_of_model = parallel_state.get_tensor_model_parallel_rank() == 0 and parallel_state.is_pipeline_first_stage()
        contributes = first_of_model and leads_context_parallel()
        per_rank: list[dict[tuple[int, int], float]] = [{}] * state.world_size()
        dist.all_gather_object(per_rank, self._pending if contributes else {})
        known = {key: logp for part in per_rank for key, logp in part.items()}
        self._pending = {}
        if not known:
            return
        order = sorted(known)
        logps_N = np.array([known[key] for key in order], dtype=np.float64)
        part = np.vstack([np.array(order, dtype=np.int64).T, logps_N.view(np.int64)])
        with state.main_process_first(doing="writing reference log-probs"):
            if state.is_first_of_machine():
                target = self.folder / f"part-{_digest(part)}.npy"
                publishing = publish_file(target, private=self._private)
                with writing_cache(self.folder), publishing as writing, writing.open("wb") as file:
                    np.save(file, part)
        self.refresh()

    def _prepare(self, about: Mapping[str, object]) -> None:
        """Create the folder with its description, and remove damaged files."""
        with writing_cache(self.folder):
            make_folder(self.folder, private=self._private)
            with publish_file(self.folder / "about.json", private=self._private) as writing:
                writing.write_text(json.dumps(about, indent=2), encoding="utf-8")
        for file in sorted(self.folder.glob("part-*.npy")):
            try:
                is_whole = file.name == f"part-{_digest(np.load(file, mmap_mode='r'))}.npy"
            except PermissionError as error:
                remedy = "make it readable, or choose another model.data.cache_dir"
                raise UserError(f"cannot read {file}: {error.strerror}; {remedy}") from error
            except Exception:  # truncated, or not an array: numpy raises different types of errors
                is_whole = False
            if not is_whole:
                logger.warning("%s is damaged; its reference log-probs are computed again", file)
                file.unlink(missing_ok=True)


def sequence_keys(sequences: SequenceBatch) -> np.ndarray:
    """Return a hash of the tokens, labels and weights of each sequence without its padding, [B, 2] int64."""
    keys_B2 = np.empty((len(sequences), 2), dtype=np.int64)
    tokens_BS, labels_BS = sequences.tokens_BS.numpy(), sequences.labels_BS.numpy()
    for number, length in enumerate(sequences.lengths_B.tolist()):
        content = tokens_BS[number, :length].tobytes() + labels_BS[number, :length].tobytes()
        content += b"" if sequences.weights_BS is None else sequences.weights_BS[number, :length].numpy().tobytes()
        keys_B2[number] = np.frombuffer(hashlib.blake2b(content, digest_size=16).digest(), dtype=np.int64)
    return keys_B2


def _digest(part: np.ndarray) -> str:
    return hashlib.blake2b(np.ascontiguousarray(part).data, digest_size=12).hexdigest()


@dataclass(kw_only=True, eq=False)
class CachedReference:
    """Reference that looks up log-probs in ``cache``, so that the reference model is not run any more."""

    cache: ReferenceCache
    passes = Passes()

    def logprobs(self, *parts: SequenceBatch) -> torch.Tensor:
        """See :meth:`ReferencePolicy.logprobs`; raises RuntimeError if a sequence is not in the cache."""
        found = list[torch.Tensor]()
        for sequences in parts:
            logps_B, found_B = self.cache.look_up(sequence_keys(sequences))
            if missing := int((~found_B).sum()):
                raise RuntimeError(
                    f"{missing} of {len(sequences)} sequences of this batch have no reference log-prob in "
                    f"{self.cache.folder}; the data may have been changed during the run: start it again"
                )
            found.append(torch.from_numpy(logps_B))
        (logps_B,) = device.upload([torch.cat(found)])
        return logps_B  # type: ignore[no-any-return]

    def precompute(
        self,
        batches: Iterable[Sequence[SequenceBatch]],
        engine: LogProbEngine,
        *,
        active: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext,
    ) -> None:
        """Compute the log-probs that the cache lacks; collective. Every rank must pass the same number of batches.

        ``active`` returns a context in which the model is the reference; it is entered when the first log-prob is missing.
        """
        with contextlib.ExitStack() as reference:
            is_active = False
            for number, parts in enumerate(batches, start=1):
                for sequences in engine.joined(parts):
                    keys_B2 = sequence_keys(sequences)
                    missing = np.flatnonzero(~self.cache.look_up(keys_B2)[1])
                    if not state.max_over_ranks(len(missing)):
                        continue
                    if not is_active:
                        reference.enter_context(active())
                        is_active = True
                    unknown = sequences if len(missing) == len(sequences) else sequences.take(torch.from_numpy(missing))
                    logps_B = engine.logprobs(unknown)  # collective, also on ranks that lack nothing
                    if len(missing):
                        self.cache.add(keys_B2[missing], logps_B.cpu().numpy())
                if number % _FLUSH_EVERY == 0:
                    self.cache.flush()
        self.cache.flush()
