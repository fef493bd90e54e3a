"""Reports of plans and of the layout search as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from nemo_kto.architecture.parameters import rank_parameters
from nemo_kto.config.choices import choose_mode
from nemo_kto.planner.hardware import CONTEXT
from nemo_kto.planner.memory import RankMemory
from nemo_kto.planner.plan_run import Plan, remedy, size
from nemo_kto.planner.search import overrides, values_of
from nemo_kto.telemetry.summary import layout_text, short, table
from nemo_kto.telemetry.timers import duration_text

_ESTIMATE = "an estimate from published figures, not measured"
_MEASURED = "an estimate from a matrix product that was timed just now"


def plan_text(plan: Plan) -> str:
    """Return the report of a plan: run, layout, memory, communication, speed and verdict."""
    largest, training, speed, mode = plan.largest, plan.training, plan.speed, choose_mode(plan.cfg)
    device = plan.machines.hardware
    lines = {
        **_run_lines(plan),
        "layout": _layout(plan),
        "micro-batch": f"{training.micro_batch_tokens:,} tokens at most, {training.micro_batches:,} a step",
        "reference": f"{mode[0]} ({mode[1]})",
        "parameters": _parameters(plan, largest),
        "weights": size(largest.weights),
        "gradients": size(largest.gradients),
        "optimizer": size(largest.optimizer),
        "activations": f"{size(largest.activations)}, of {_on_their_way(plan, largest)}",
        "log-probs": size(largest.logprobs),
        "update": f"{size(largest.working)} for a moment",
        **({"heap": f"{size(largest.heap)} that freed activations leave behind"} if largest.heap else {}),
        **_host_lines(plan, largest),
        **({"context": f"{size(CONTEXT)} of CUDA, its libraries and NCCL (assumed)"} if plan.machines.on_gpu else {}),
        "in all": f"{size(largest.device)} of {size(device.memory)} ({size(plan.certain)} whatever the rows are)",
        "operations": f"{speed.flops / 1e12:,.1f} TFLOP a step",
        "sent by a rank": _traffic(plan),
        "pipeline bubble": f"{speed.bubble:.0%}",
        "expected": f"{_rate(plan)}, {_seconds(speed.seconds)} a step ({_MEASURED if device.measured else _ESTIMATE})",
        "verdict": "fits" if plan.fits else f"does not fit: {remedy(plan)}",
    }
    return table(f"nemo-kto plan {plan.cfg.recipe.name}: nothing was loaded; GB are 10^9 bytes", lines)


def search_text(plan: Plan, found: Sequence[Plan]) -> str:
    """Return the report of the layout search, with the overrides that select the first layout."""
    lines = _run_lines(plan)
    for number, each in enumerate(found, start=1):
        lines[str(number)] = (
            f"{_layout(each)}, micro-batches of {each.training.micro_batch_tokens:,} tokens: "
            f"{size(each.largest.device)} a rank, {_rate(each)}"
        )
    lines["rates"] = _ESTIMATE
    lines["use"] = overrides(values_of(found[0])) if found else f"nothing fits; {remedy(plan)}"
    there = f"{plan.machines.ranks} x {plan.machines.hardware.name}, {size(plan.machines.hardware.memory)} each"
    return table(f"nemo-kto plan {plan.cfg.recipe.name}: the fastest layouts that fit on {there}", lines)


def _run_lines(plan: Plan) -> dict[str, str]:
    architecture, adapters = plan.training.architecture, plan.training.adapters
    whole = sum(each.numel for each in rank_parameters(replace(architecture, tensor_parallel=1, expert_tensor_parallel=1)))
    how = "all trained" if adapters is None else f"{adapters.kind} of rank {adapters.rank} on {', '.join(adapters.modules)}"
    step, unit = plan.step, plan.cfg.recipe.unit
    rows = f"{plan.cfg.model.global_batch_size:,} {unit}"
    model = f"{plan.cfg.pretrained_checkpoint.restore_from_path} ({architecture.family.name})"
    return {
        "model": f"{model}, {short(whole)} parameters, {how}",
        "precision": plan.cfg.trainer.precision + ("" if plan.cfg.model.fp8 is None else f", fp8 {plan.cfg.model.fp8}"),
        "step": f"{rows}, {step.tokens:,} tokens if all are {step.width:,} tokens long",
    }


def _layout(plan: Plan) -> str:
    training = plan.training
    degrees = layout_text(
        data=training.data_parallel,
        context=training.context_parallel,
        tensor=training.tensor_parallel,
        pipeline=training.split.stages,
        stages=training.split.text(training.architecture.num_layers),
        sequence_parallel=training.sequence_parallel,
    )
    experts = ""
    if training.architecture.experts is not None:
        shards = training.architecture.expert_tensor_parallel
        experts = f", experts over {training.expert_parallel}" + (f" x {shards}" if shards > 1 else "")
    ranks = f"{plan.machines.ranks} ranks = {degrees}{experts}" if plan.machines.ranks > 1 else "1 rank"
    return f"{ranks}, {training.recompute or 'no'} recomputation"


def _parameters(plan: Plan, largest: RankMemory) -> str:
    stage = f", on stage {largest.stage + 1} of {len(plan.stages)}, which needs the most" if len(plan.stages) > 1 else ""
    trained = "" if largest.trained == largest.parameters else f", {short(largest.trained)} of them trained"
    return f"{short(largest.parameters)} a rank{trained}{stage}"


def _on_their_way(plan: Plan, largest: RankMemory) -> str:
    split = plan.training.split
    count = int(split.most_kept(largest.stage, plan.training.micro_batches, [1] * split.chunks))
    if split.chunks > 1:
        return f"{count} passes through a chunk that are on their way"
    return "1 micro-batch" if count == 1 else f"{count} micro-batches that are on their way"


def _host_lines(plan: Plan, largest: RankMemory) -> dict[str, str]:
    where = "on the host" if plan.machines.on_gpu else "in the same memory"
    copies = {
        "offloaded": largest.offloaded, "reference copy": largest.reference, "checkpoint copy": largest.checkpoint,
    }  # fmt: skip
    return {name: f"{size(count)} {where}" for name, count in copies.items() if count}


def _traffic(plan: Plan) -> str:
    traffic = plan.speed.traffic
    context = f"{size(traffic.context.bytes)} context, " if plan.training.context_parallel > 1 else ""
    experts = f", {size(traffic.expert.bytes)} expert" if traffic.expert.bytes else ""
    stages = f"{size(traffic.tensor.bytes)} tensor, {size(traffic.pipeline.bytes)} pipeline"
    return f"{stages}, {context}{size(traffic.data.bytes)} data{experts} parallel, a step"


def _rate(plan: Plan) -> str:
    return f"{plan.step.tokens / plan.speed.seconds:,.0f} tokens/s"


def _seconds(seconds: float) -> str:
    return f"{seconds:.2g} s" if seconds < 60 else duration_text(seconds)
