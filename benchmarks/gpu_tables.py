"""The page of `make gpu`, drawn from its lines."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.gpu_lines import END, HEADER, Lines, newest_of

_TITLES = {
    "machine": "The machine",
    "kernels": "Kernels against fp64",
    "llama-1b": "KTO of Llama-3.2-1B, all weights",
    "qwen-7b": "KTO of Qwen2.5-7B, LoRA",
    "trl": "TRL, KTO of Llama-3.2-1B",
    "tests": "Tests",
}
_ABOUT = {
    "kernels": "Errors are norms relative to the norm of the fp64 result, with operands in bf16.",
    "llama-1b": "A step has 64 rows of 128 to 4,096 tokens, 33,000 in all, and as many tokens of KL examples; TRL gets "
    "the same rows. What is not named is the default.",
}
SHOWN = 8  # kernels of a profile
_PHASES = ("data", "reference", "reference_swap", "kl", "forward_backward", "optimizer")


def page(file: Path) -> str:
    """Return the page of a device as Markdown; each step is shown with the newest sources and versions that it ran with."""
    steps = {step: lines for step in _TITLES if (lines := newest_of(file, step)) is not None}
    headers = {step: lines.of(HEADER)[HEADER] for step, lines in steps.items()}
    first = next(iter(headers.values()))
    text = [f"# {first['device']}", "", "Written by `make gpu`; [README.md](README.md) says what it runs.", ""]
    text += ["| | |", "|---|---|"]
    for name in first:
        values = {step: header.get(name, "not known") for step, header in headers.items()}
        same = len(set(values.values())) == 1
        shown = first[name] if same else "; ".join(f"{step}: {value}" for step, value in values.items())
        text.append(f"| {name} | {shown} |")
    for step, title in _TITLES.items():
        found = dict(steps[step].of(step)) if step in steps else {}
        end = found.pop(END, None)
        text += ["", f"## {title}", "", *_body(step, found), _ending(step, end, found)]
    return "\n".join(text) + "\n"


def failures(lines: Lines, steps: tuple[str, ...]) -> list[str]:
    """Return a line for each step that did not end well, and each measurement or test that failed."""
    wrong = []
    for step in steps:
        found = lines.of(step)
        end = found.pop(END, {"status": "not run"})
        wrong += [f"{step}, {name}: {each['error']}" for name, each in found.items() if "error" in each]
        failed = [f"{name}: {each['result']}" for name, each in found.items() if str(each.get("result")).startswith("**")]
        wrong += failed
        if end["status"] != 0 and not failed:
            wrong.append(f"{step}: {end['status']}; the same command continues")
    return wrong


def _ending(step: str, end: Mapping[str, Any] | None, found: Mapping[str, Any]) -> str:
    if end is None:
        return f"{'Stopped before its end' if found else 'Not run'}: `make gpu STEP={step}`."
    return f"Ended with status {end['status']} after {end['seconds']:.0f} s."


def _body(step: str, found: Mapping[str, dict[str, Any]]) -> Iterator[str]:
    if not found:
        return
    if step in _ABOUT:
        yield from (_ABOUT[step], "")
    if step == "tests":
        yield from _tests(found)
    elif step in ("llama-1b", "qwen-7b", "trl"):
        yield from _steps(found)
    else:
        yield from ("| measurement | found |", "|---|---|")
        yield from (f"| {name} | {'; '.join(_flat(each))} |" for name, each in found.items())
    yield ""


def _flat(found: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in found.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name} ")
        else:
            yield f"{prefix}{name} {f'{value:.3g}' if isinstance(value, float) else value}"


def _steps(found: Mapping[str, dict[str, Any]]) -> Iterator[str]:
    """A table of settings, and the operations on which the profiled ones spend their time."""
    parts = (*_PHASES, "the rest") if any("phases" in each for each in found.values()) else ()
    heads = ("setting", "tokens/s", "s a step", "MFU", "peak GB (planned)", "loss, first and last", *parts)
    yield _row(*heads)
    yield "|---" * len(heads) + "|"
    for name, each in found.items():
        if "error" in each:
            error = textwrap.shorten(each["error"].replace("|", "/"), 80)
            yield _row(name, f"**{error}**", *[""] * (len(heads) - 2))
            continue
        seconds, phases = each["seconds"], dict(each.get("phases", {}))
        if phases:  # the swap is a part of the reference's phase
            phases["reference"] = phases.get("reference", 0.0) - phases.get("reference_swap", 0.0)
        phases["the rest"] = seconds - sum(phases.values())
        shares = [f"{phases.get(part, 0.0) / seconds:.1%}" if "phases" in each else "" for part in parts]
        mfu = f"{each['MFU']:.1%}" if each.get("MFU") else ""
        memory = f"{each['peak GB']:.1f}" + (f" ({each['planned GB']:.1f})" if "planned GB" in each else "")
        losses = f"{each['losses'][0]:.4f}, {each['losses'][-1]:.4f}"
        yield _row(name, f"{each['tokens per second']:,.0f}", f"{seconds:.3f}", mfu, memory, losses, *shares)
    for name, each in found.items():
        if profile := each.get("profile"):
            yield from _profile(name, profile)


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _profile(name: str, profile: Mapping[str, Any]) -> Iterator[str]:
    total = profile["busy ms"] + profile["idle ms"]
    gaps = ", ".join(f"{gap:.1f}" for gap in profile["longest gaps ms"])
    yield ""
    yield (
        f"Profile of a step, {name}: {profile['kernels']} kernels and copies; the device is idle in "
        f"{profile['idle ms'] / total:.1%} of {total:.0f} ms; longest gaps {gaps} ms."
    )
    yield from ("", "| kernel | ms | calls |", "|---|---|---|")
    for kernel, each in [*profile["largest"].items()][:SHOWN]:
        yield f"| `{kernel.replace('|', '/')}` | {each['ms']:.1f} | {each['calls']} |"


def _tests(found: Mapping[str, dict[str, Any]]) -> Iterator[str]:
    counts = Counter(each["result"].split(":")[0].strip("*") for each in found.values())
    yield ", ".join(f"{count} {result}" for result, count in counts.items()) + "."
    others: dict[str, list[str]] = {}
    for name, each in found.items():
        if each["result"] != "passed":
            others.setdefault(each["result"], []).append(name.removeprefix("tests/gpu/"))
    yield from ("", "| result | tests |", "|---|---|")
    yield from (f"| {result} | {', '.join(names)} |" for result, names in others.items())
