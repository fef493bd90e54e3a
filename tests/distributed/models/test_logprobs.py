"""Chunked, vocabulary-parallel log-probs against a log-softmax over all logits: values, gradients, and memory."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from nemo_kto.distributed.logprobs import check_targets, vocab_parallel_logprobs
from tests.helpers.messages import Message, raises
from tests.helpers.rank_pool import RankPool

NUM_TOKENS, HIDDEN, VOCAB = 23, 16, 101
# Unpadded; padded within one rank; padded so far that with four ranks the last holds padding and nothing else.
VOCABS = {"no_padding": (104, 104), "padding": (VOCAB, 104), "a_rank_of_padding": (VOCAB, 136)}


def problem(dtype: torch.dtype, *, rows: int = 104, vocab: int = VOCAB, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """(hidden, weight, target, arriving gradient); padding rows of the weight hold what would win every softmax."""
    draw = torch.Generator().manual_seed(seed)
    hidden = torch.randn(NUM_TOKENS, HIDDEN, generator=draw).to(dtype)
    weight = torch.randn(rows, HIDDEN, generator=draw).to(dtype)
    weight[vocab:] = 50.0
    target = torch.randint(0, vocab, (NUM_TOKENS,), generator=draw)
    target[0], target[1] = 0, vocab - 1
    return hidden, weight, target, torch.randn(NUM_TOKENS, generator=draw)


def expected(dtype: torch.dtype, *, rows: int, vocab: int) -> tuple[torch.Tensor, ...]:
    """(log-probs, hidden gradient, weight gradient), in float64 over all logits."""
    hidden, weight, target, arriving = problem(dtype, rows=rows, vocab=vocab)
    hidden, weight = hidden.double().requires_grad_(), weight.double().requires_grad_()
    logps = torch.log_softmax(hidden @ weight[:vocab].t(), dim=1)[torch.arange(NUM_TOKENS), target]
    return logps.detach(), *torch.autograd.grad(logps, (hidden, weight), arriving.double())


def on_a_rank(
    dtype: torch.dtype, rows: int, vocab: int, chunk_size: int, reduce_hidden_grad: bool, softcap: float | None = None
) -> Any:
    """Results of one tensor-parallel rank: (log-probs, hidden gradient, its rows of the weight gradient)."""
    group = dist.group.WORLD
    hidden, weight, target, arriving = problem(dtype, rows=rows, vocab=vocab)
    hidden.requires_grad_()
    mine = weight.chunk(dist.get_world_size())[dist.get_rank()].clone().requires_grad_()
    options: dict[str, Any] = {
        "vocab_size": vocab,
        "group": group,
        "chunk_size": chunk_size,
        "softcap": softcap,
        "reduce_hidden_grad": reduce_hidden_grad,
    }
    logps = vocab_parallel_logprobs(hidden, mine, target, **options)
    logps.backward(arriving)
    with torch.no_grad():
        with_squares = vocab_parallel_logprobs(hidden, mine, target, **options, square_sums=True)
        assert torch.equal(with_squares[0], logps)
        again = vocab_parallel_logprobs(hidden, mine, target, **options)
    assert torch.equal(again, logps)
    assert not again.requires_grad
    assert logps.dtype == torch.promote_types(dtype, torch.float32)
    assert hidden.grad is not None
    assert mine.grad is not None
    assert hidden.grad.dtype == mine.grad.dtype == dtype
    # lists: results cross a process boundary
    return [value.detach().double().tolist() for value in (logps, hidden.grad, mine.grad, with_squares[1])]


def gathered(results: list[Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probs and hidden gradient, which must agree on all ranks, and the whole weight gradient."""
    for logps, hidden_grad, *_ in results[1:]:
        assert logps == results[0][0]
        assert hidden_grad == results[0][1]
    logps, hidden_grad = (torch.tensor(values, dtype=torch.float64) for values in results[0][:2])
    return logps, hidden_grad, torch.cat([torch.tensor(result[2], dtype=torch.float64) for result in results])


DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}
CHUNK_SIZES = [1, 4, 22, 23, 1000]
Problem = tuple[torch.dtype, int, int, int, bool]
Gathered = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def every_problem() -> list[Problem]:
    """Arguments of ``on_a_rank``: each dtype and vocabulary in chunks of 7, and the first vocabulary in other chunks."""
    in_sevens = [(dtype, rows, vocab, 7, True) for dtype in DTYPES.values() for vocab, rows in VOCABS.values()]
    return [*in_sevens, *((torch.float32, 104, VOCAB, size, True) for size in CHUNK_SIZES)]


def on_a_rank_for_each(problems: list[Problem]) -> list[Any]:
    return [on_a_rank(*arguments) for arguments in problems]


@pytest.fixture(scope="module")
def answers(ranks: RankPool) -> Callable[[int], dict[Problem, Gathered]]:
    """Number of tensor-parallel ranks -> their results for each problem, from one job."""

    @functools.cache
    def get(tensor_parallel: int) -> dict[Problem, Gathered]:
        of_ranks = ranks.run(tensor_parallel, on_a_rank_for_each, every_problem())
        of_problems = zip(*of_ranks, strict=True)
        return {given: gathered(list(results)) for given, results in zip(every_problem(), of_problems, strict=True)}

    return get


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("vocabulary", VOCABS)
@pytest.mark.parametrize("tensor_parallel", [1, 2, 4])
def test_values_and_gradients(answers: Any, dtype: torch.dtype, vocabulary: str, tensor_parallel: int) -> None:
    vocab, rows = VOCABS[vocabulary]
    logps, hidden_grad, weight_grad = answers(tensor_parallel)[dtype, rows, vocab, 7, True]
    true_logps, true_hidden_grad, true_weight_grad = expected(dtype, rows=rows, vocab=vocab)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-5}[dtype]
    rounding = 2**-8 if dtype == torch.bfloat16 else 0.0  # of gradients in bf16; nothing before them is rounded to it
    torch.testing.assert_close(logps, true_logps, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(hidden_grad, true_hidden_grad, rtol=tolerance + rounding, atol=tolerance)
    torch.testing.assert_close(weight_grad, true_weight_grad, rtol=tolerance + rounding, atol=tolerance)
    assert (weight_grad[vocab:] == 0).all()


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("tensor_parallel", [1, 2, 4])
def test_sums_of_squared_probabilities(ranks: RankPool, tensor_parallel: int, softcap: float | None) -> None:
    """Also with a rank that has only padding."""
    results = ranks.run(tensor_parallel, on_a_rank, torch.float64, 136, VOCAB, 7, True, softcap)
    hidden, weight, *_ = problem(torch.float64, rows=136)
    logits = hidden @ weight[:VOCAB].t()
    capped = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    expected_sums = capped.softmax(dim=1).square().sum(dim=1).log()
    for *_, square_sums in results:
        torch.testing.assert_close(torch.tensor(square_sums, dtype=torch.float64), expected_sums, rtol=1e-10, atol=1e-10)


def test_a_hidden_gradient_that_the_caller_reduces(ranks: RankPool) -> None:
    results = ranks.run(2, on_a_rank, torch.float64, 104, VOCAB, 7, False)
    parts = [torch.tensor(result[1], dtype=torch.float64) for result in results]
    assert not torch.allclose(parts[0], parts[1])
    torch.testing.assert_close(sum(parts), expected(torch.float64, rows=104, vocab=VOCAB)[1], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("tensor_parallel", [1, 2])
@pytest.mark.parametrize("chunk_size", CHUNK_SIZES)
def test_the_chunk_size_changes_nothing(answers: Any, tensor_parallel: int, chunk_size: int) -> None:
    whole = answers(tensor_parallel)[torch.float32, 104, VOCAB, NUM_TOKENS, True]
    chunked = answers(tensor_parallel)[torch.float32, 104, VOCAB, chunk_size, True]
    for one, other in zip(chunked, whole, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=2e-6)


def without_tokens() -> list[list[float]]:
    """A rank whose rows hold no response token: its collectives must still meet those of the others."""
    hidden = torch.randn(0, HIDDEN, requires_grad=True)
    weight = torch.randn(52, HIDDEN, requires_grad=True)
    target = torch.zeros(0, dtype=torch.int64)
    logps = vocab_parallel_logprobs(hidden, weight, target, vocab_size=VOCAB, group=dist.group.WORLD, chunk_size=4)
    logps.sum().backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    assert hidden.grad.shape == (0, HIDDEN)
    return [logps.tolist(), [weight.grad.abs().sum().item(), *weight.grad.shape]]


def test_no_tokens(ranks: RankPool) -> None:
    assert ranks.run(2, without_tokens) == [[[], [0.0, 52, HIDDEN]]] * 2


@pytest.mark.parametrize("softcap", [3.0, 50.0])
def test_a_soft_cap(ranks: RankPool, softcap: float) -> None:
    """Values, and gradients through c tanh(x / c), at logits up to about twice the smaller cap and far below the larger."""
    logps, hidden_grad, weight_grad = gathered(ranks.run(2, on_a_rank, torch.float64, 104, VOCAB, 7, True, softcap))
    hidden, weight, target, arriving = problem(torch.float64)
    hidden, weight = hidden.requires_grad_(), weight.requires_grad_()
    capped = softcap * torch.tanh(hidden @ weight[:VOCAB].t() / softcap)
    true_logps = torch.log_softmax(capped, dim=1)[torch.arange(NUM_TOKENS), target]
    true_grads = torch.autograd.grad(true_logps, (hidden, weight), arriving.double())
    for found, true in zip((logps, hidden_grad, weight_grad), (true_logps.detach(), *true_grads), strict=True):
        torch.testing.assert_close(found, true, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("given", "message"),
    [({"chunk_size": 5, "softcap": 0.0}, Message("0.0", "positive")), ({"chunk_size": 0}, Message("chunk_size", "1", "0"))],
    ids=["softcap", "chunk_size"],
)
def test_refused_arguments(given: dict[str, Any], message: Message) -> None:
    hidden, weight, target, _ = problem(torch.float32)
    with raises(ValueError, message):
        vocab_parallel_logprobs(hidden, weight, target, vocab_size=VOCAB, group=None, **given)


def test_logits_far_from_zero() -> None:
    hidden, weight, target, _ = problem(torch.float32)
    hidden = hidden * 1e4
    logps = vocab_parallel_logprobs(hidden, weight, target, vocab_size=VOCAB, group=None, chunk_size=5)
    full = torch.log_softmax((hidden.double() @ weight[:VOCAB].double().t()), dim=1)[torch.arange(NUM_TOKENS), target]
    assert logps.isfinite().all()
    torch.testing.assert_close(logps.double(), full, rtol=1e-5, atol=1e-2)


def test_gradient_in_float64() -> None:
    hidden, weight, target, _ = problem(torch.float64, rows=12, vocab=11)
    target = target[:5]

    def logprobs(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return vocab_parallel_logprobs(hidden, weight, target, vocab_size=11, group=None, chunk_size=2)

    def weighted(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        options: dict[str, Any] = {"vocab_size": 11, "group": None, "chunk_size": 2, "square_sums": True}
        logps, square_sums = vocab_parallel_logprobs(hidden, weight, target, **options)
        return logps * square_sums

    leaf = hidden[:5].clone().requires_grad_()
    (found,) = torch.autograd.grad(weighted(leaf, weight).sum(), leaf)
    square_sums = (leaf @ weight[:11].t()).softmax(dim=1).square().sum(dim=1).log().detach()
    (constant,) = torch.autograd.grad((logprobs(leaf, weight) * square_sums).sum(), leaf)
    torch.testing.assert_close(found, constant, rtol=1e-10, atol=1e-10)  # the sums have no gradient
    assert torch.autograd.gradcheck(logprobs, (hidden[:5].clone().requires_grad_(), weight.requires_grad_()))


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_a_frozen_input_gets_no_gradient(frozen: str) -> None:
    hidden, weight, target, arriving = problem(torch.float32)
    inputs = {"hidden": hidden, "weight": weight}
    (moving,) = inputs.keys() - {frozen}
    inputs[moving].requires_grad_()
    vocab_parallel_logprobs(hidden, weight, target, vocab_size=VOCAB, group=None, chunk_size=5).backward(arriving)
    assert inputs[frozen].grad is None
    true_grad = expected(torch.float32, rows=104, vocab=VOCAB)[1 if moving == "hidden" else 2]
    grad = inputs[moving].grad
    assert grad is not None
    torch.testing.assert_close(grad.double(), true_grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("token", [-100, -1, VOCAB])
def test_a_target_outside_the_vocabulary_is_refused(token: int) -> None:
    target = torch.arange(6)
    check_targets(target, vocab_size=VOCAB)
    target[3] = token
    with raises(ValueError, Message("0", "vocab_size", "101", f"{token}")):
        check_targets(target, vocab_size=VOCAB)


class LargestTensor(TorchDispatchMode):
    """Notes the most elements of any tensor an operation makes."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(value, torch.Tensor):
                self.elements = max(self.elements, value.numel())
        return result


def peak_bytes(work: Callable[[], Any]) -> int:
    """Peak of the additional bytes allocated while ``work`` runs."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = work()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    allocated = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        allocated += event.nbytes()
        peak = max(peak, allocated)
    del result
    return peak


LONG, WIDE, NARROW = 512, 2000, 8  # tokens, vocabulary, hidden size: full logits are by far the largest tensor


def long_problem(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    hidden, weight = torch.randn(LONG, NARROW, dtype=dtype), torch.randn(WIDE, NARROW, dtype=dtype)
    return hidden.requires_grad_(), weight.requires_grad_(), torch.randint(0, WIDE, (LONG,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("chunk_size", [16, 64])
def test_peak_memory(dtype: torch.dtype, chunk_size: int) -> None:
    """The peak is one chunk of logits forward, and the same and the gradients backward, as the module documents."""
    hidden, weight, target = long_problem(dtype)

    def forward() -> torch.Tensor:
        return vocab_parallel_logprobs(hidden, weight, target, vocab_size=WIDE, group=None, chunk_size=chunk_size)

    with LargestTensor() as largest:
        forward().sum().backward()
    assert largest.elements == max(chunk_size * WIDE, weight.numel())

    is_bf16 = dtype == torch.bfloat16
    chunk = chunk_size * WIDE * 4
    gradients = (hidden.numel() + weight.numel()) * (4 + 2 * is_bf16)
    block = is_bf16 * 1024 * NARROW * 4  # rows of the weight, in fp32
    small_change = 16 * LONG * 8 + 20_000 + block
    assert chunk <= peak_bytes(forward) <= chunk + small_change
    # together, because the backward pass frees a chunk that the forward pass has kept
    assert chunk <= peak_bytes(lambda: forward().sum().backward()) <= chunk + gradients + small_change
    assert chunk + gradients + small_change < LONG * WIDE * 4 / 2, "the bound must be tight"


class Products(TorchDispatchMode):
    """Counts the products of hidden states and the weight."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.mm.out
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("softcap", "recomputed"), [(None, 4), (5.0, 5)])
def test_the_last_chunk_is_not_recomputed(softcap: float | None, recomputed: int) -> None:
    """A soft cap is an exception, and a second backward pass, which must not use the memory that the first overwrote."""
    hidden, weight, target, arriving = problem(torch.float32)
    inputs = hidden.requires_grad_(), weight.requires_grad_()
    logps = vocab_parallel_logprobs(*inputs, target, vocab_size=VOCAB, group=None, chunk_size=5, softcap=softcap)
    counts, found = [], []
    for _ in range(2):
        with Products() as products:
            found.append(torch.autograd.grad(logps, inputs, arriving, retain_graph=True))
        counts.append(products.count)
    assert counts == [recomputed, 5]
    for first, second in zip(*found, strict=True):
        torch.testing.assert_close(first, second, rtol=1e-5, atol=1e-5)


def test_without_gradients_nothing_is_saved() -> None:
    hidden, weight, target = long_problem(torch.float32)
    with torch.no_grad():
        logps = vocab_parallel_logprobs(hidden, weight, target, vocab_size=WIDE, group=None, chunk_size=16)
    assert logps.grad_fn is None
    assert logps.untyped_storage().nbytes() == LONG * 4
