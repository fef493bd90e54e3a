"""Reports of plans and of the layout search as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from nemo_kto.architecture.lora import adapted_modules, without_experts
from nemo_kto.architecture.parameters import rank_parameters
from nemo_kto.memory.micro_batches import MEAN_LENGTH
from nemo_kto.memory.rank_memory import CONTEXT
from nemo_kto.memory.run_plan import Plan, bubble_of_shorter_rows, overrides, remedies, remedy, size
from nemo_kto.telemetry.display import layout_text, short, table
from nemo_kto.telemetry.watch import duration_text
from nemo_kto.tools.plan.layouts import Shortage, values_of
from nemo_kto.tools.plan.speed import Speed, speed_of

_ESTIMATE = "an estimate from published figures, not measured"
_MEASURED = "an estimate from matrix products that were timed on this machine"
_BUSY = "this machine is busy: the estimate may be"


def plan_text(plan: Plan, *, checked: Mapping[str, str] | None = None) -> str:
    """Return the report of a plan: run, layout, memory, communication, speed and verdict.

    ``checked``: lines about the data and the folder of the run, if `nemo-kto check` has checked them.
    """
    largest, training, speed, reference = plan.largest, plan.training, speed_of(plan), plan.run.reference
    device, on_gpu, traffic = plan.machines.hardware, plan.machines.on_gpu, speed.traffic
    split, chunks = training.split, training.split.chunks
    stage = f", on stage {largest.stage + 1} of {split.stages}, which needs the most" if split.stages > 1 else ""
    trained = "" if largest.trained == largest.parameters else f", {short(largest.trained)} of them trained"
    in_flight = int(split.most_kept(largest.stage, training.micro_batches, [1] * chunks))
    unit = "micro-batch" if chunks == 1 else "pass through a chunk"
    if in_flight > 1:
        unit = "in-flight micro-batches" if chunks == 1 else "in-flight passes through a chunk"
    sent = {"tensor": traffic.tensor, "pipeline": traffic.pipeline}
    sent |= {"context": traffic.context} if training.context_parallel > 1 else {}
    sent |= {"data": traffic.data} | ({"expert": traffic.expert} if traffic.expert else {})
    between = f", {size(traffic.instances)} between optimizer instances" if traffic.instances else ""
    copies = {"offloaded": largest.offloaded, "reference copy": largest.reference, "checkpoint copy": largest.checkpoint}
    places = dict.fromkeys(copies, "in host memory" if on_gpu else "in the same memory")
    if training.reference_on_gpu:
        places["reference copy"] = "in GPU memory"
    shorter_rows = ""
    if plan.run.row_tokens is None and split.stages > 1:
        shorter_rows = f", {bubble_of_shorter_rows(plan):.0%} with rows of {MEAN_LENGTH:.0%} of that length"
    whole = "" if plan.steps is None else f", {duration_text(plan.steps * speed.seconds)} for all steps"
    seconds = f"{speed.seconds:.2g} s" if speed.seconds < 60 else duration_text(speed.seconds)
    lines = {
        **_run_lines(plan),
        **(checked or {}),
        "layout": _layout(plan),
        "micro-batch": _micro_batch(plan),
        **_shared_prompts(plan),
        "reference": f"{reference.name} ({reference.reason})",
        "parameters": f"{short(largest.parameters)} a rank{trained}{stage}",
        "weights": size(largest.weights),
        "gradients": size(largest.gradients),
        "optimizer": size(largest.optimizer),
        "activations": f"{size(largest.activations)}, of {in_flight} {unit}",
        "log-probs": size(largest.logprobs),
        **({"dequantized": f"{size(largest.dense)}, the largest weight in a product"} if largest.dense else {}),
        **({"update": f"{size(largest.working)} of temporary tensors"} if largest.working else {}),
        **({"heap": f"{size(largest.heap)} of allocator fragmentation"} if largest.heap else {}),
        **{name: f"{size(count)} {places[name]}" for name, count in copies.items() if count},
        **({"context": f"{size(CONTEXT)} of CUDA, its libraries and NCCL (assumed)"} if on_gpu else {}),
        "total": f"{size(largest.device)} of {size(device.memory)} (static memory: {size(plan.static)})",
        "FLOPs": f"{speed.flops / 1e12:,.1f} TFLOP a step",
        "sent by a rank": ", ".join(f"{size(each)} {name}" for name, each in sent.items()) + f" parallel{between}, a step",
        "pipeline bubble": f"{speed.bubble:.0%}{shorter_rows}",
        "expected": f"{_rate(plan, speed)}, {seconds} a step{whole} ({_MEASURED if device.measured else _ESTIMATE})",
        **({"load": f"{_BUSY} {device.busy:.1f} times too high"} if device.busy > 1 else {}),
        "verdict": "fits" if plan.fits else f"does not fit: {remedy(plan)}",
    }
    command, done = ("plan", "nothing was loaded") if checked is None else ("check", "no mistakes")
    return table(f"nemo-kto {command} {plan.run.cfg.recipe.name}: {done}; GB are 10^9 bytes", lines)


def search_text(plan: Plan, found: Sequence[Plan]) -> str:
    """Return the report of the layout search, with the overrides that select the first layout, the preferred one."""
    lines = _run_lines(plan)
    for number, each in enumerate(found, start=1):
        lines[str(number)] = (
            f"{_layout(each)}, micro-batches of {each.training.micro_batch_tokens:,} tokens: "
            f"{size(each.largest.device)} a rank, {_rate(each, speed_of(each))}"
        )
    lines["rates"] = _ESTIMATE
    lines["use"] = overrides(values_of(found[0]))
    title = f"layouts that fit on {_machines(plan)}, the preferred one first"
    return table(f"nemo-kto plan {plan.run.cfg.recipe.name}: {title}", lines)


def shortage_text(plan: Plan, shortage: Shortage, *, command: str) -> str:
    """Return the report of a layout search in which nothing fits; ``command`` trains ``shortage.smaller``."""
    whole, gpu = shortage.whole, plan.machines.hardware.name
    parts = {"weights": whole.weights, "gradients": whole.gradients, "optimizer state": whole.optimizer}
    of_parts = ", ".join(f"{size(count)} of {name}" for name, count in parts.items())
    fitting = f"{shortage.gpus} x {gpu}, the smallest number that fits"
    if shortage.gpus is None:
        fitting = f"no number up to {shortage.most_tried} x {gpu} fits"
    others = remedies(plan, lora=False)
    lines = {
        **_run_lines(plan),
        "needs": f"{size(sum(parts.values()))} in total, without activations: {of_parts}",
        "GPUs": fitting,
        **({"or use": ", or ".join(others)} if others else {}),
    }
    if (smaller := shortage.smaller) is not None:
        name = "LoRA" if smaller.run.cfg.model.quantize is None else "QLoRA"
        lines[name] = f"{size(smaller.largest.device)} a rank, {_rate(smaller, speed_of(smaller))} ({_ESTIMATE})"
        lines["command"] = command
    return table(f"nemo-kto plan {plan.run.cfg.recipe.name}: no layout fits on {_machines(plan)}", lines)


def _machines(plan: Plan) -> str:
    return f"{plan.machines.ranks} x {plan.machines.hardware.name}, {size(plan.machines.hardware.memory)} each"


def _run_lines(plan: Plan) -> dict[str, str]:
    architecture, adapters, cfg = plan.training.architecture, plan.training.adapters, plan.run.cfg
    whole = sum(each.total for each in rank_parameters(replace(architecture, tensor_parallel=1, expert_tensor_parallel=1)))
    how = "all trained"
    if adapters is not None:
        how = f"{adapters.kind} of rank {adapters.rank} on {', '.join(adapted_modules(architecture, adapters))}"
        how += without_experts(architecture, adapters)
    rows = f"{cfg.model.global_batch_size:,} {cfg.recipe.unit}"
    model = f"{cfg.pretrained_checkpoint.restore_from_path} ({architecture.family.name})"
    counted = plan.run.row_tokens is not None
    return {
        "model": f"{model}, {short(whole)} parameters, {how}",
        **plan.run.files.output_line,
        **plan.run.files.attention_line,
        "precision": _precision(plan),
        "step": f"{rows}, {plan.step.tokens:,} tokens {'in sequences of' if counted else 'if all are'} "
        f"{plan.step.width:,} tokens{', the mean of the training rows' if counted else ' long'}",
    }


def _precision(plan: Plan) -> str:
    cfg = plan.run.cfg
    further = {"fp8": cfg.model.fp8, "frozen linear layers in": cfg.model.quantize}
    return ", ".join([cfg.trainer.precision, *(f"{name} {value}" for name, value in further.items() if value is not None)])


def _layout(plan: Plan) -> str:
    training = plan.training
    experts = ""
    if training.architecture.experts is not None:
        shards = training.architecture.expert_tensor_parallel
        experts = f"{training.expert_parallel}" + (f" x {shards}" if shards > 1 else "")
    layout = layout_text(
        data=training.data_parallel,
        context=training.context_parallel,
        tensor=training.tensor_parallel,
        pipeline=training.split.stages,
        stages=training.split.text(training.architecture.num_layers),
        sequence_parallel=training.sequence_parallel,
        experts=experts,
        optimizer_instances=training.optimizer_instances,
    )
    return f"{layout}, {training.recompute or 'no'} recomputation"


def _micro_batch(plan: Plan) -> str:
    training, reason = plan.training, plan.run.micro_batch_reason
    packed = ", packed" if training.packed else ""
    text = f"up to {training.micro_batch_tokens:,} tokens{packed}, {plan.step.micro_batches:,} a step"
    return f"{text} ({reason})" if reason else text


def _shared_prompts(plan: Plan) -> dict[str, str]:
    if not plan.limits.share_prompts:
        return {}
    unknown = "not counted, the rows are not read; nemo-kto check counts them"
    return {"shared prompts": unknown if plan.shared is None else str(plan.shared)}


def _rate(plan: Plan, speed: Speed) -> str:
    return f"{plan.step.tokens / speed.seconds:,.0f} tokens/s"
