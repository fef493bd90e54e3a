"""Answers of the model to prompts, at every layout: one forward pass for each new token of all prompts together.

Where :meth:`LogProbEngine.keeps_tokens` allows it, a pass computes only new tokens, and each layer keeps the queries, keys
and values of the others: attention is evaluated for whole sequences, as in training, so that there is no second
implementation of it. Elsewhere each pass computes all tokens.

Shape suffixes: B sequences, V tokens of the vocabulary.
"""

from __future__ import annotations

import hashlib
from collections import ChainMap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor

from nemo_kto.data.batches.collate import kto_custom_collate
from nemo_kto.data.batches.dataset import KTOExample
from nemo_kto.device import device
from nemo_kto.distributed import state
from nemo_kto.distributed.collectives import from_last_stage
from nemo_kto.layers.attention import KeptTokens, PackedSequences
from nemo_kto.models.engine.engine import LogProbEngine
from nemo_kto.models.engine.sequences import MicroBatch, SequenceBatch


@dataclass(frozen=True, kw_only=True)
class Decoding:
    """How tokens are chosen, and where an answer ends."""

    stop_ids: frozenset[int]  # an answer ends with any of these tokens
    max_new_tokens: int
    seq_length: int  # maximum number of tokens of prompt and answer together
    temperature: float = 0.0  # the logits are divided by it; 0 chooses the most probable token
    top_p: float = 1.0  # only the most probable tokens, which together have at least this probability, are drawn
    top_k: int = 0  # only so many of the most probable tokens are drawn; 0 draws from all
    seed: int = 0

    def is_complete(self, prompt: Sequence[int], answer: Sequence[int]) -> bool:
        """Return whether an answer, which has at least one token, gets no further one."""
        full = len(answer) >= self.max_new_tokens or len(prompt) + len(answer) >= self.seq_length
        return full or answer[-1] in self.stop_ids


def generate(
    engine: LogProbEngine,
    prompts: Sequence[Sequence[int]],
    decoding: Decoding,
    *,
    collate: dict[str, Any],
    must_stop: Callable[[], bool] = lambda: False,
) -> list[list[int]] | None:
    """Return the tokens of the model's answer to each prompt, including the token that ends it; collective.

    The result is the same on all ranks; at another layout, logits differ by rounding. No random generator is used, so that
    the numbers of a training run do not depend on its samples. Data-parallel ranks divide the prompts among them.

    Args:
        prompts: token ids of each prompt, at least one and fewer than ``seq_length``.
        collate: keyword arguments of :func:`~nemo_kto.data.batches.collate.kto_custom_collate`, among them ``eos_id``.
        must_stop: asked before each token, and equal on all ranks; the result is then None.
    """
    rank, size = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    answers: dict[int, list[int]] = {number: [] for number in range(rank, len(prompts), size)}
    passes = NewTokenPasses(engine=engine) if engine.keeps_tokens() else None
    waiting, active = [*answers], list[int]()
    # also without prompts, because experts are shared with other ranks
    while state.max_over_ranks(len(active) + len(waiting)):
        if must_stop():
            return None
        while waiting and (passes is None or passes.have_room([len(prompts[k]) for k in (*active, waiting[0])], decoding)):
            active.append(waiting.pop(0))
        sequences = {number: [*prompts[number], *answers[number]] for number in active}
        logits_BV = passes.logits(sequences) if passes else _logits_of_whole(engine, [*sequences.values()], collate)
        # on the host, so that ranks with the same logits choose the same token
        numbers = [uniform(decoding.seed, number, len(answers[number])) for number in active]
        uniform_B = torch.tensor(numbers, dtype=torch.float64)
        chosen_B = choose_tokens(
            logits_BV.cpu(), uniform_B, temperature=decoding.temperature, top_p=decoding.top_p, top_k=decoding.top_k
        )
        tokens = from_last_stage(chosen_B.to(device.current_device())).tolist()
        for number, token in zip(active, tokens, strict=True):
            answers[number].append(token)
        active = [number for number in active if not decoding.is_complete(prompts[number], answers[number])]
    by_number = ChainMap(*state.gather(answers))
    return [by_number[number] for number in range(len(prompts))]


def _logits_of_whole(engine: LogProbEngine, sequences: list[list[int]], collate: dict[str, Any]) -> Tensor:
    """Return the logits after each sequence, [B, V], from a pass over all its tokens."""
    # collated as in training, each with one response token, whose value is not used
    examples = [KTOExample(prompt_ids=ids, response_ids=[collate["eos_id"]], desirable=True) for ids in sequences]
    batch = kto_custom_collate(examples, **collate, with_kl=False)
    return engine.next_token_logits(SequenceBatch.of(batch["samples"], batch["sample_labels"], batch["sample_lengths"]))


@dataclass(kw_only=True)
class NewTokenPasses:
    """Forward passes over growing sequences, which compute only the tokens since the pass before."""

    engine: LogProbEngine
    _kept: KeptTokens = field(init=False, default_factory=KeptTokens)
    _places: dict[int, range] = field(init=False, default_factory=dict)  # of each sequence in the last pack

    def have_room(self, lengths: Iterable[int], decoding: Decoding) -> bool:
        """Return whether prompts of these lengths, with answers, fit in a micro-batch of training; one always does."""
        limits, tokens = self.engine.limits, [min(n + decoding.max_new_tokens, decoding.seq_length) for n in lengths]
        return len(tokens) == 1 or sum(tokens) <= (limits.tokens or decoding.seq_length * (limits.prompts or 1))

    def logits(self, sequences: Mapping[int, Sequence[int]]) -> Tensor:
        """Return the logits after each sequence, [B, V]; each has a number of its own, the same in all passes."""
        if not sequences:
            return self.engine.logits_of([], 0)
        last, places = sum(map(len, self._places.values())), dict[int, range]()
        order, tokens, positions, new = list[int](), list[int](), list[int](), list[int]()
        for number, ids in sequences.items():
            known, begin = self._places.get(number, range(0)), len(order)
            order += [*known, *range(last + len(tokens), last + len(tokens) + len(ids) - len(known))]
            tokens += ids[len(known) :]
            positions += range(len(known), len(ids))
            new += range(begin + len(known), len(order))
            places[number] = range(begin, len(order))
        index_B = torch.arange(len(sequences))
        count_B = torch.tensor([len(ids) - len(self._places.get(number, ())) for number, ids in sequences.items()])
        of_new = MicroBatch(
            sequence_index_b=index_B,
            tokens_bs=torch.tensor([tokens]),
            positions_bs=torch.tensor([positions]),
            segment_bs=index_B.repeat_interleave(count_B)[None],
            owners_nb=torch.eye(len(index_B), dtype=torch.bool),
            hidden_index_T=count_B.cumsum(dim=0) - 1,
            target_T=torch.zeros_like(index_B),
            logprob_T=index_B,
            weight_T=None,
            num_logprobs=len(index_B),
        )
        self._kept.order_t, self._kept.new_n = device.upload([torch.tensor(order), torch.tensor(new)])
        (packed,) = PackedSequences.of([tuple(map(len, places.values()))])
        packed.kept, self._places = self._kept, places
        (micro_batch,) = MicroBatch.on_device([of_new])
        return self.engine.logits_of([replace(micro_batch, packed=packed)], len(index_B))


def choose_tokens(logits_BV: Tensor, uniform_B: Tensor, *, temperature: float, top_p: float, top_k: int = 0) -> Tensor:
    """Choose one token for each row of logits: [B] int64. All computations are in float64.

    With ``temperature`` 0 it is the most probable token, of equal ones the first. Otherwise it is drawn from the softmax of
    logits / temperature, restricted to the ``top_k`` most probable tokens (0: all), and then to the fewest whose
    probabilities sum to ``top_p`` or more (nucleus sampling, Holtzman et al. 2019, arXiv 1904.09751), by inverting the
    distribution function at ``uniform_B``, in [0, 1). Tokens are in the order of their ids, so that rounding of the logits
    rarely changes the choice.

    Examples:
        >>> logits_BV, uniform_B = torch.tensor([[0.5, 0.3, 0.2]]).log(), torch.tensor([0.79])
        >>> choose_tokens(logits_BV, uniform_B, temperature=1.0, top_p=1.0)
        tensor([1])
        >>> choose_tokens(logits_BV, uniform_B, temperature=0.0, top_p=1.0)
        tensor([0])
    """
    logits_BV = logits_BV.double()
    if temperature == 0:
        return logits_BV.argmax(dim=1)
    if 0 < top_k < logits_BV.shape[1]:
        order_BV = logits_BV.argsort(dim=1, descending=True, stable=True)
        logits_BV = logits_BV.scatter(1, order_BV[:, top_k:], -torch.inf)
    probs_BV = torch.softmax(logits_BV / temperature, dim=1)
    if top_p < 1:
        sorted_BV, order_BV = probs_BV.sort(dim=1, descending=True, stable=True)
        is_outside_BV = sorted_BV.cumsum(dim=1) - sorted_BV >= top_p
        probs_BV = probs_BV.masked_fill(torch.zeros_like(is_outside_BV).scatter(1, order_BV, is_outside_BV), 0.0)
    cumulative_BV = probs_BV.cumsum(dim=1)
    target_B1 = uniform_B.double().unsqueeze(1) * cumulative_BV[:, -1:]
    # NaN probabilities, of weights that are not finite, lead to an index after the last token
    return torch.searchsorted(cumulative_BV, target_B1, right=True).squeeze(1).clamp(max=logits_BV.shape[1] - 1)


def uniform(seed: int, prompt: int, position: int) -> float:
    """Return a number in [0, 1) that depends only on the seed, the index of a prompt, and the position in its answer."""
    digest = hashlib.blake2b(f"{seed} {prompt} {position}".encode(), digest_size=6).digest()
    return int.from_bytes(digest, "big") / 2**48
