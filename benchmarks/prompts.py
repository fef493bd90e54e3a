"""Shared prompts compared with a prompt for each answer: CPU seconds of a DPO or KTO step with a swapped reference.

    python benchmarks/prompts.py MODEL [--rounds 9] [--threads 1] [--layers 4] [--cases TEXT] [--samples]

MODEL is a Hugging Face folder, of which only config.json is used, with --layers of its layers and as large a part of its
vocabulary, so that the output layer takes its usual part of a step. Weights and tokens are random. In the first cases all
lengths are equal: prompts as long as answers, four times as long, or of little or no use, in one micro-batch of four
examples. In the others they differ, and the micro-batches are the default ones of a CPU. One process takes a step in turn
with and without shared prompts, round after round, without the optimizer. Each round gives a ratio of CPU seconds; the table
shows the median and the middle half of the ratios, and both losses. The memory of activations is that of a single micro-
batch.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Case:
    """Ranges of the lengths of prompts and answers in a batch."""

    algorithm: str
    prompt: tuple[int, int]
    answer: tuple[int, int]
    examples: int = 4
    answers: int = 1  # examples with the same prompt
    tokens: int | None = None  # limit of a micro-batch; None for one micro-batch


CASES = {
    "DPO, prompts as long as answers": Case("dpo", (128, 128), (128, 128)),
    "DPO, prompts four times as long": Case("dpo", (256, 256), (64, 64)),
    "KTO, prompts as long as answers": Case("kto", (128, 128), (128, 128)),
    "KTO, prompts four times as long": Case("kto", (256, 256), (64, 64)),
    "KTO, four answers to a prompt as long": Case("kto", (128, 128), (128, 128), answers=4),
    "KTO, four answers to a prompt four times as long": Case("kto", (256, 256), (64, 64), answers=4),
    "DPO, prompts of a thirtieth": Case("dpo", (8, 8), (240, 240)),
    "nothing is shared": Case("apo_zero_unpaired", (128, 128), (128, 128)),
    "DPO, different lengths": Case("dpo", (32, 128), (64, 256), tokens=512),
    "DPO, different lengths, short": Case("dpo", (20, 28), (8, 30), examples=16, tokens=512),
    "DPO, different lengths, very short prompts": Case("dpo", (4, 12), (64, 256), tokens=512),
    "KTO, different lengths": Case("kto", (32, 128), (64, 256), examples=8, tokens=512),
    "KTO, different lengths, short": Case("kto", (20, 28), (8, 30), examples=32, tokens=512),
    "KTO, different lengths, very short prompts": Case("kto", (4, 12), (64, 256), examples=8, tokens=512),
    "nothing is shared, different lengths": Case("apo_zero_unpaired", (32, 128), (64, 256), examples=8, tokens=512),
}


def make_batch(case: Case, vocab_size: int) -> dict[str, Any]:
    """A collated batch of random tokens."""
    import torch

    from nemo_kto.data.batches.collate import dpo_custom_collate, kto_custom_collate
    from nemo_kto.data.batches.dataset import DPOExample, KTOExample

    draw = torch.Generator().manual_seed(1)

    def text(lengths: tuple[int, int]) -> Any:
        length = int(torch.randint(lengths[0], lengths[1] + 1, (), generator=draw))
        return torch.randint(0, vocab_size, (length,), generator=draw).numpy()

    prompts = [text(case.prompt) for _ in range(case.examples // case.answers)]
    if case.algorithm == "dpo":
        pairs = [
            DPOExample(
                prompt_ids=prompt,
                chosen_ids=text(case.answer),
                rejected_ids=text(case.answer),
                chosen_reward=1.0,
                rejected_reward=0.0,
            )
            for prompt in prompts
        ]
        return dict(dpo_custom_collate(pairs, 0))
    rated = [
        KTOExample(prompt_ids=prompts[k // case.answers], response_ids=text(case.answer), desirable=k % 2 == 0)
        for k in range(case.examples)
    ]
    return dict(kto_custom_collate(rated, 0, with_kl=case.algorithm == "kto"))


def smaller(model: Path, folder: Path, *, layers: int) -> Path:
    """Write the configuration of ``model`` with fewer layers, and with a vocabulary that is smaller by as much."""
    config = json.loads((model / "config.json").read_text())
    part = min(1.0, layers / config["num_hidden_layers"])
    sizes = {name: round(part * config[name]) for name in ("num_hidden_layers", "vocab_size")}
    (folder / "config.json").write_text(json.dumps(config | sizes))
    return folder


def build(folder: Path) -> tuple[Any, Any]:
    """Return the engine of a model with random weights, and the model as its own reference, with swapped weights."""
    import torch

    from nemo_kto.architecture.architecture import read_architecture
    from nemo_kto.distributed import state
    from nemo_kto.models.engine.engine import LogProbEngine
    from nemo_kto.models.engine.optimizer import wrap_data_parallel
    from nemo_kto.models.engine.reference import LiveReference, SwappedWeights
    from nemo_kto.models.engine.sequences import MicroBatchLimits
    from nemo_kto.models.flops import ModelFlops, Passes
    from nemo_kto.models.gpt import build_chunks

    state.init_distributed(layout=state.Layout(), seed=1)
    architecture = read_architecture(folder, tensor_parallel=1)
    built = build_chunks(architecture, params_dtype=torch.float32)
    chunks = wrap_data_parallel(built, use_distributed_optimizer=False)
    engine = LogProbEngine(
        chunks=list(chunks),
        vocab_size=architecture.vocab_size,
        limits=MicroBatchLimits(prompts=None, tokens=None, multiple=1),
        forward_micro_batch_size=None,
        average_log_probs=False,
        logprob_chunk_size=256,
        logprob_gradient_summands=1,
        flops=ModelFlops.of_model(architecture),
    )
    swapped = SwappedWeights(parameters=[each for chunk in chunks for each in chunk.parameters()])
    with torch.no_grad():  # the policy differs a little from the reference, or losses would agree in any case
        for chunk in chunks:
            for name, parameter in chunk.named_parameters():
                if "norm" in name:
                    parameter.mul_(1.01)
    return engine, LiveReference(engine=engine, active=swapped.active, passes=Passes(forward=1))


def model_of(case: Case, engine: Any, reference: Any) -> Any:
    """Return the model of a case."""
    from nemo_kto.losses.kto import LOSSES as KTO_LOSSES
    from nemo_kto.losses.preference import LOSSES as DPO_LOSSES
    from nemo_kto.models.nlp.gpt.megatron_gpt_dpo_model import MegatronGPTDPOModel
    from nemo_kto.models.nlp.gpt.megatron_gpt_kto_model import MegatronGPTKTOModel
    from nemo_kto.models.preference_model import Objective

    if case.algorithm == "dpo":
        objective = Objective(loss=DPO_LOSSES["dpo"], beta=0.1)
        return MegatronGPTDPOModel(engine=engine, reference=reference, objective=objective)
    objective = Objective(loss=KTO_LOSSES[case.algorithm], beta=0.1)
    weights: dict[str, Any] = {"desirable_loss_weight": 1.0, "undesirable_loss_weight": 1.0}
    return MegatronGPTKTOModel(engine=engine, reference=reference, objective=objective, **weights)


@dataclass
class Saved:
    """Bytes of the tensors that a step saves for its backward pass, each storage once."""

    storages: dict[int, int] = field(default_factory=dict)

    def keep(self, tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        self.storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    @property
    def megabytes(self) -> float:
        return sum(self.storages.values()) / 1e6


def step(model: Any, batch: dict[str, Any], case: Case, *, share: bool) -> tuple[float, float, dict[str, float]]:
    """CPU seconds, loss and sums of one step with its reference."""
    model.engine.limits = replace(model.engine.limits, tokens=case.tokens, share_prompts=share)
    model.zero_grad()
    started = time.process_time()
    logps = model.get_ref_policy_logprobs(batch)
    names = ("chosen", "rejected") if "chosen" in batch else ("samples", "kl_samples")[: len(model.sequences(batch))]
    parts = logps.chunk(len(names))
    batch = batch | {f"ref_policy_log_probs_{name}": part for name, part in zip(names, parts, strict=True)}
    loss, metrics = model.get_loss_and_metrics(batch, forward_only=False)
    return time.process_time() - started, loss, dict(metrics.sums)


def compare_samples(engine: Any, reference: Any, *, rounds: int) -> None:
    """Print the median CPU seconds of a step, and of two answers with passes of both kinds."""
    from unittest import mock

    from nemo_kto.models.engine.engine import LogProbEngine
    from nemo_kto.models.engine.generation import Decoding, generate

    case = Case("kto", (35, 41), (3, 28), examples=8, tokens=512)
    batch, decoding = make_batch(case, engine.vocab_size), Decoding(stop_ids=frozenset(), max_new_tokens=32, seq_length=2048)
    prompts = [[1 + k for k in range(length)] for length in (37, 39)]
    seconds: dict[str, list[float]] = {"a step": [], "answers, new tokens": [], "answers, whole sequences": []}
    for _ in range(rounds):
        seconds["a step"].append(step(model_of(case, engine, reference), batch, case, share=True)[0])
        for name, keeps in (("answers, new tokens", True), ("answers, whole sequences", False)):
            started = time.process_time()
            with mock.patch.object(LogProbEngine, "keeps_tokens", lambda _, keeps=keeps: keeps):
                generate(engine, prompts, decoding, collate={"eos_id": 0})
            seconds[name].append(time.process_time() - started)
    for name, measured in seconds.items():
        median = statistics.median(measured)
        print(f"{name:<25} {median:.2f} CPU s, {median / statistics.median(seconds['a step']):.2f} steps")


def main() -> None:
    """Take the steps of each case, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--cases", default="", help="only cases with this text in their names")
    parser.add_argument("--samples", action="store_true", help="compare answers with a step instead")
    arguments = parser.parse_args()
    import torch

    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as folder:
        engine, reference = build(smaller(arguments.model, Path(folder), layers=arguments.layers))
    if arguments.samples:
        compare_samples(engine, reference, rounds=arguments.rounds)
        return
    weights = Saved()
    for parameter in engine.chunks[0].parameters():
        weights.keep(parameter)
    print("| step | FLOPs allow | measured | middle half | activations, MB | shared | loss | shared |", flush=True)
    print("|---|---|---|---|---|---|---|---|", flush=True)
    for name, case in CASES.items():
        if arguments.cases not in name:
            continue
        model, batch = model_of(case, engine, reference), make_batch(case, engine.vocab_size)
        losses: dict[bool, float] = {}
        flops: dict[bool, float] = {}
        saved = {False: Saved(), True: Saved()}
        for share in (False, True):  # the first step of a kind is slower, and not counted
            with torch.autograd.graph.saved_tensors_hooks(saved[share].keep, lambda tensor: tensor):
                _, losses[share], sums = step(model, batch, case, share=share)
            flops[share] = sums["flops"]
            for of_weight in weights.storages:
                saved[share].storages.pop(of_weight, None)
        ratios = list[float]()
        for number in range(arguments.rounds):
            order = (False, True) if number % 2 else (True, False)
            seconds = {share: step(model, batch, case, share=share)[0] for share in order}
            ratios.append(seconds[False] / seconds[True])
            print(f"{name}: {seconds[False]:.2f} s, shared {seconds[True]:.2f} s", file=sys.stderr)
        low, gain, high = statistics.quantiles(ratios, n=4)
        memory = " | ".join(f"{saved[share].megabytes:.0f}" if case.tokens is None else "" for share in (False, True))
        found = " | ".join(f"{losses[share]:.6f}" for share in (False, True))
        allowed = f"{flops[False] / flops[True]:.2f}"
        print(f"| {name} | {allowed} | {gain:.2f} | {low:.2f} to {high:.2f} | {memory} | {found} |", flush=True)


if __name__ == "__main__":
    main()
