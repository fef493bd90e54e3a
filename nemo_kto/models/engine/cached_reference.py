"""A reference policy whose log-probs are precomputed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
import torch

from nemo_kto.distributed import state
from nemo_kto.models.engine.engine import LogProbEngine
from nemo_kto.models.engine.reference_cache import ReferenceCache, sequence_keys
from nemo_kto.models.engine.sequences import SequenceBatch
from nemo_kto.models.flops import Passes

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
