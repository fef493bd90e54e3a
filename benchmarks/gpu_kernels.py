"""The first two steps of `make gpu`: speed of the machine, and kernels compared with fp64.

    python benchmarks/gpu_kernels.py machine|kernels LINES KEY [--toy]

Errors are those of bf16 operands, norms relative to the norm of the fp64 result; times are medians, by events of the device.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks.gpu_lines import Lines
from benchmarks.gpu_models import LLAMA_1B, TINY
from nemo_kto.device import device, kernels
from nemo_kto.device.environment import MAX_CONNECTIONS

BF16 = torch.bfloat16
LAYERS = 4


def milliseconds(call: Callable[[], Any], *, repetitions: int = 10) -> float:
    """Return the median time that the device needs for a call, after two that do not count."""
    for _ in range(2):
        call()
    times = []
    for _ in range(repetitions):
        begin = device.moment()
        call()
        times.append(1000 * (device.moment() - begin))
    return statistics.median(times)


def peak_mb(call: Callable[[], Any]) -> float:
    """Return the memory that a call needs in addition to what is allocated."""
    device.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    return (torch.cuda.max_memory_allocated() - before) / 1e6


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def randn(*shape: int, dtype: torch.dtype = BF16, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, device=device.current_device()) * scale).to(dtype)


# the machine


def products(*, toy: bool) -> dict[str, float]:
    """TFLOP/s of bf16 products: a large one, and those of an MLP of Llama-3.2-1B with 8,192 tokens."""
    found = {}
    sizes = {"8192 x 8192 x 8192": (8192, 8192, 8192), "8192 x 2048 x 8192": (8192, 2048, 8192)}
    for name, (rows, inner, columns) in sizes.items():
        rows, inner, columns = (each // 64 if toy else each for each in (rows, inner, columns))
        left, right = randn(rows, inner), randn(inner, columns)
        seconds = milliseconds(functools.partial(torch.mm, left, right)) / 1000
        found[name] = 2 * rows * inner * columns / seconds / 1e12
    return found


def copies(*, toy: bool) -> dict[str, float]:
    """GB/s between page-locked host memory and the device: each direction, both, and the product's swap (both counted)."""
    tensors = [torch.ones(2**10 if toy else 2**25, dtype=BF16, device=device.current_device()) for _ in range(16)]
    hosts, size = device.host_tensors(tensors), sum(each.nbytes for each in tensors)

    def to_device() -> None:
        for tensor, host in zip(tensors, hosts, strict=True):
            tensor.copy_(host, non_blocking=True)

    def to_host() -> None:
        for tensor, host in zip(tensors, hosts, strict=True):
            host.copy_(tensor, non_blocking=True)

    swap = functools.partial(device.swap_, tensors, hosts)
    calls: dict[str, tuple[Callable[[], None], int]] = {"to the device": (to_device, 1), "to the host": (to_host, 1)}
    calls["swap_"] = swap, 2
    return {name: times * size / milliseconds(call, repetitions=3) / 1e6 for name, (call, times) in calls.items()}


def copies_with(connections: int, *, toy: bool) -> dict[str, float]:
    """:func:`copies` in a process with this number of connections, which CUDA reads when it starts."""
    command = [sys.executable, __file__, "copies", "-", "-", *["--toy"] * toy]
    given = {**os.environ, MAX_CONNECTIONS: str(connections)}
    done = subprocess.run(command, env=given, capture_output=True, text=True, check=False, timeout=120)
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1])
    return dict(json.loads(done.stdout))


def launches() -> dict[str, float]:
    """Microseconds of the host for one small kernel, and for a call of a fused kernel of the package."""
    from nemo_kto.distributed.logprobs import softmax_sums

    found, logits = {}, torch.zeros(64, 64, device=device.current_device())
    for name, call in {"add_": lambda: logits.add_(1), "softmax_sums": lambda: softmax_sums(logits, None)}.items():
        call()
        device.synchronize()
        began = time.perf_counter()
        for _ in range(1000):
            call()
        found[name] = (time.perf_counter() - began) * 1000
        device.synchronize()
    return found


def compiler() -> dict[str, Any]:
    """Whether torch compiles kernels on this machine, and the seconds of the first one."""
    from nemo_kto.distributed.logprobs import softmax_sums

    logits, began = randn(128, 1024, dtype=torch.float32), time.perf_counter()
    found = softmax_sums(logits.clone(), None)
    device.synchronize()
    seconds = time.perf_counter() - began
    same = max(error(*pair) for pair in zip(found, softmax_sums.eager(logits.clone(), None), strict=True))
    missing = device.missing_for_compiling()
    return {
        "missing": missing,
        "compiled": kernels.compiles() and not softmax_sums._failed,
        "seconds": seconds,
        "relative error": same,
    }


# kernels against fp64


def exact_attention(parts: list[torch.Tensor], lengths: list[int]) -> torch.Tensor:
    """Causal attention of each sequence with grouped heads in fp64; tensors are [tokens, heads, size]."""
    outputs = []
    for query, key, value in zip(*(part.double().split(lengths) for part in parts), strict=True):
        repeats = query.size(1) // key.size(1)
        key, value = (part.repeat_interleave(repeats, dim=1).transpose(0, 1) for part in (key, value))
        scores = query.transpose(0, 1) @ key.transpose(1, 2) / query.size(2) ** 0.5
        mask = torch.ones_like(scores[0], dtype=torch.bool).triu(1)
        outputs.append((scores.masked_fill(mask, float("-inf")).softmax(-1) @ value).transpose(0, 1))
    return torch.cat(outputs)


def attention(heads: int, groups: int, size: int, *, toy: bool) -> dict[str, Any]:
    """Packed attention with grouped heads: errors of values and gradients, milliseconds and memory of both passes."""
    from nemo_kto.layers.attention import packed_attention

    call = packed_attention(BF16)
    if call is None:
        raise RuntimeError("torch has no attention for packed sequences here")
    lengths = [7, 128, 65, 300] if toy else [400, 128, 1500, 64, 700, 256, 500, 548]
    total = sum(lengths)
    parts = [randn(total, count, size).requires_grad_() for count in (heads, groups, groups)]
    weight = randn(total, heads, size)
    begins = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device=weight.device)

    def forward() -> torch.Tensor:
        return call(*parts, begins, begins, max(lengths), max(lengths), window_size=(-1, 0))

    def both() -> list[torch.Tensor]:
        values = forward()
        return [values, *torch.autograd.grad(values, parts, weight)]

    found = both()
    wide = [part.detach().double().requires_grad_() for part in parts]
    values = exact_attention(wide, lengths)
    expected = [values, *torch.autograd.grad(values, wide, weight.double())]
    names = ("values", "queries", "keys", "values' gradient")
    errors = {name: error(*pair) for name, pair in zip(names, zip(found, expected, strict=True), strict=True)}
    return {"errors": errors, "ms": milliseconds(both), "peak MB": peak_mb(both)}


def head_sizes() -> dict[str, str]:
    """What torch's kernel for packed sequences says to sizes of heads."""
    found = {}
    for size in (4, 100, 104, 192, 256, 264):
        try:
            attention(4, 2, size, toy=True)
            found[str(size)] = "works"
        except RuntimeError as refusal:
            found[str(size)] = str(refusal).strip().splitlines()[0][:150]
    return found


def logprobs(chunk: int, summands: int, *, toy: bool) -> dict[str, Any]:
    """Log-probs of 8,192 tokens of Llama-3.2-1B's vocabulary: errors of values and gradients, time and memory."""
    from nemo_kto.distributed.logprobs import vocab_parallel_logprobs

    tokens, hidden, vocab = (256, 64, 1000) if toy else (8192, 2048, 128256)
    states, weight = randn(tokens, hidden).requires_grad_(), torch.nn.Parameter(randn(vocab, hidden, scale=0.02))
    main_grad = torch.zeros(vocab, hidden, device=weight.device)
    weight.__dict__["main_grad"] = main_grad
    target = torch.randint(vocab, (tokens,), device=weight.device)
    grad = torch.randn(tokens, device=weight.device) / 64

    def both() -> tuple[torch.Tensor, torch.Tensor]:
        found = vocab_parallel_logprobs(
            states, weight, target, vocab_size=vocab, group=None, chunk_size=chunk, summands=summands
        )
        return found, torch.autograd.grad(found, [states, weight], grad, allow_unused=True)[0]

    values, of_states = both()
    of_weight = main_grad.clone()
    exact = [each.detach().double().requires_grad_() for each in (states, weight)]
    expected = [torch.zeros(tokens, dtype=torch.float64, device=weight.device), *map(torch.zeros_like, exact)]
    for part in torch.arange(tokens, device=weight.device).split(512):  # the logits of all tokens in fp64 are too large
        logps = (exact[0][part] @ exact[1].T).log_softmax(-1).gather(1, target[part, None]).squeeze(1)
        expected[0][part] = logps.detach()
        for total, grads in zip(expected[1:], torch.autograd.grad(logps, exact, grad[part].double()), strict=True):
            total += grads
        del logps
    names = ("log-probs", "states", "weight")
    errors = {
        name: error(*pair)
        for name, pair in zip(names, zip((values, of_states, of_weight), expected, strict=True), strict=True)
    }
    del exact, expected, of_weight
    return {"errors": errors, "ms": milliseconds(both, repetitions=5), "peak MB": peak_mb(both)}


def added_products(*, toy: bool) -> dict[str, Any]:
    """A weight gradient added to its fp32 sum: in the product, and as a product that is added."""
    tokens, rows, columns = (64, 32, 48) if toy else (8192, 8192, 2048)
    left, right, total = (
        randn(tokens, rows).t(),
        randn(tokens, columns),
        torch.zeros(rows, columns, device=device.current_device()),
    )
    exact = left.double() @ right.double()
    found: dict[str, Any] = {"supported": kernels.adds_wide_products()}

    def in_place() -> None:
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)

    def separately() -> None:
        total.add_(torch.mm(left, right, out_dtype=torch.float32))

    def rounded() -> None:
        total.add_(torch.mm(left, right))

    for name, call in {
        "in the product": in_place,
        "fp32 product, added": separately,
        "bf16 product, added": rounded,
    }.items():
        total.zero_()
        try:
            call()
        except (RuntimeError, TypeError) as refusal:
            found[name] = {"error": str(refusal).splitlines()[0][:150]}
            continue
        found[name] = {"error": error(total, exact), "ms": milliseconds(call)}
    return found


@functools.cache
def layers_of(*, toy: bool) -> tempfile.TemporaryDirectory[str]:
    """A model of LAYERS layers of Llama-3.2-1B, in a folder that is removed at the end."""
    from tests.helpers.tiny_models import make_checkpoint

    folder = tempfile.TemporaryDirectory()
    config = {**LLAMA_1B, **(TINY if toy else {}), "num_hidden_layers": LAYERS, "vocab_size": 1024}
    make_checkpoint(Path(folder.name), "llama", dtype="bfloat16", **config)
    return folder


def layer(tokens: int, *, lora: bool, toy: bool) -> dict[str, float]:
    """A layer in rows of 512 tokens, the mean of four: time of the host to launch the passes, and of the device for both.

    With few tokens the device waits for the host, and the times are those of the launches.
    """
    from nemo_kto.architecture.lora import LoRASettings
    from nemo_kto.distributed import state
    from nemo_kto.layers.attention import PackedSequences
    from tests.helpers import lora_jobs

    size = min(512, tokens)
    state.init_distributed(layout=state.Layout(), seed=1)
    try:
        settings = LoRASettings(rank=16, alpha=16, target_modules=("all",)) if lora else None
        (chunk,), architecture = lora_jobs.build(Path(layers_of(toy=toy).name), state.Layout(), settings, dtype=BF16)
        packed = PackedSequences.of([(size,) * (tokens // size)])[0]
        ids, positions = device.upload([torch.randint(1000, (1, tokens)), torch.arange(size).repeat(tokens // size)[None]])
        grad = randn(1, tokens, architecture.hidden_size)
        forward, backward = list[float](), list[float]()

        def both() -> None:
            began = time.perf_counter()
            hidden = chunk(ids, positions, None, packed_seq_params=packed)
            launched = time.perf_counter()
            torch.autograd.backward(hidden, grad)
            forward.append(launched - began)
            backward.append(time.perf_counter() - launched)

        ms = milliseconds(both) / LAYERS
        weights = (
            sum(each.numel() for name, each in chunk.named_parameters() if "layers" in name and each.dim() == 2) / LAYERS
        )
        products = 2 * tokens * weights * (2 if lora else 3)  # without those of attention scores
        return {
            "host ms, forward": 1000 * statistics.median(forward) / LAYERS,
            "host ms, backward": 1000 * statistics.median(backward) / LAYERS,
            "device ms": ms,
            "TFLOP/s of products with weights": products / ms / 1e9,
        }
    finally:
        state.destroy()


def measurements(step: str, *, toy: bool) -> dict[str, Callable[[], Any]]:
    """The measurements of a step by name."""
    if step == "machine":
        return {
            "products, TFLOP/s": functools.partial(products, toy=toy),
            **{f"copies with {n} connections, GB/s": functools.partial(copies_with, n, toy=toy) for n in (1, 32)},
            "compiler": compiler,
            "host, us a call": launches,
        }
    shapes = {
        "32 heads, 8 groups of 64": (32, 8, 64),
        "32 heads of 64": (32, 32, 64),
        "28 heads, 4 groups of 128": (28, 4, 128),
    }
    return {
        **{f"attention, {name}": functools.partial(attention, *shape, toy=toy) for name, shape in shapes.items()},
        "sizes of heads": head_sizes,
        **{
            f"log-probs, chunks of {chunk}, {summands} bf16 summand{'s' * (summands > 1)}": functools.partial(
                logprobs, chunk, summands, toy=toy
            )
            for chunk, summands in ((4096, 1), (4096, 2), (1024, 1), (1024, 2))
        },
        **{
            f"a layer of Llama-3.2-1B{' with LoRA' * lora}, {tokens} tokens": functools.partial(
                layer, tokens, lora=lora, toy=toy
            )
            for tokens, lora in ((256, False), (256, True), (2048, False), (8192, False), (16384, False))
        },
        "weight gradients": functools.partial(added_products, toy=toy),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=["machine", "kernels", "copies"])
    parser.add_argument("lines")
    parser.add_argument("key")
    parser.add_argument("--toy", action="store_true")
    arguments = parser.parse_args()
    device.select()
    torch.manual_seed(0)
    if arguments.step == "copies":
        print(json.dumps(copies(toy=arguments.toy)))
        return
    lines = Lines(file=Path(arguments.lines), key=arguments.key)
    for name, measurement in measurements(arguments.step, toy=arguments.toy).items():
        lines.measure(arguments.step, name, measurement)


if __name__ == "__main__":
    main()
