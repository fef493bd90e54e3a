"""The reference pages list what exists: options, metrics, exit statuses; all of it, and nothing else."""

from __future__ import annotations

import re
from pathlib import Path

from docs.site.commands import command_contexts
from nemo_kto.algorithms.recipes import RECIPES
from nemo_kto.algorithms.recipes.recipe import OTHER_METRICS
from nemo_kto.architecture.config_fields import QUANTIZED
from nemo_kto.architecture.families import FAMILIES, MULTIMODAL
from nemo_kto.cli.train_command import TrainingCommand
from nemo_kto.processes import ranks, signals
from nemo_kto.telemetry import console
from nemo_kto.telemetry.watch import throughput

REPOSITORY = Path(__file__).resolve().parent.parent
REFERENCE = REPOSITORY / "docs" / "reference"


def first_cells(page: str, *, below: str = "") -> set[str]:
    """The code of the first column of a page's tables, or of those below one heading."""
    text = (REFERENCE / page).read_text(encoding="utf-8")
    if below:
        text = text.split(f"\n## {below}\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (.*?) \|", text, re.MULTILINE)
    return {code for row in rows for code in re.findall(r"`([^`]+)`", row)}


def in_code(pattern: str) -> set[str]:
    """All matches in the package."""
    files = (REPOSITORY / "nemo_kto").rglob("*.py")
    return {found for file in files for found in re.findall(pattern, file.read_text(encoding="utf-8"))}


def test_metrics_of_steps_and_validations() -> None:
    names = {
        name for recipe in RECIPES.values() for name in (*recipe.metrics, *recipe.val_metrics, *recipe.anchors.values())
    }
    of_steps = {"lr", "epoch", *in_code(r'step_values\["(\w+)"\]'), *in_code(r'"train/(\w+)": self'), "skipped_steps"}
    assert first_cells("metrics.md", below="`train/` and `val/`") == names | set(OTHER_METRICS) | of_steps


def test_supported_models() -> None:
    """By names that people know; each family, and each text model of those with image input."""
    families = [*FAMILIES.values(), *MULTIMODAL]
    assert len({family.published for family in families if family.published}) == len(families)
    text = (REFERENCE / "supported.md").read_text(encoding="utf-8")
    for parts in (("GLM-4.6", "`glm4_moe`", "MTP layers"), ("Gemma 3 4B, 12B, 27B", "`gemma3_text`", "vision tower")):
        assert len([line for line in text.splitlines() if all(part in line for part in parts)]) == 1, parts
    assert {*QUANTIZED, "index_topk", "mamba_*"} <= set(re.findall(r"`([\w*-]+)`", text))
    readme = " ".join((REFERENCE.parents[1] / "README.md").read_text(encoding="utf-8").split())
    assert f"{len(FAMILIES)} model families" in readme
    assert f"{len({family.name for family in MULTIMODAL})} kinds of models with image input" in readme


def test_metrics_of_times() -> None:
    phases = in_code(r'phase\("(\w+)"\)') | in_code(r'"timing/(\w+)"')
    of_ranks = {"PHASE_max", "PHASE_max_rank"}
    not_logged = {"export"}  # after the last line of the log
    assert first_cells("metrics.md", below="`timing/`") == (phases | of_ranks) - not_logged


def test_metrics_of_throughput() -> None:
    sums = {"tokens": 2.0, "kl_tokens": 1.0, "padded_tokens": 4.0, "flops": 1.0, "saved_flops": 1.0}
    names = throughput(sums, seconds=1.0, world_size=1, peak_flops=1.0)
    assert first_cells("metrics.md", below="`perf/`") == {*names, *in_code(r'figures\["(\w+)"\]')}


def test_exit_statuses() -> None:
    rows = re.findall(r"^\| (\d+) \|", (REFERENCE / "commands.md").read_text(encoding="utf-8"), re.MULTILINE)
    known = {0, console.LOST, ranks.USAGE_ERROR, signals.ENDED_EARLY, ranks.INTERRUPTED}
    assert set(map(int, rows)) == known


def test_commands_and_their_options() -> None:
    text = (REFERENCE / "commands.md").read_text(encoding="utf-8")
    sections = {f"nemo-kto {part.splitlines()[0]}": part for part in text.split("\n## nemo-kto ")[1:]}
    shown = {context.command_path: context.command for context in command_contexts()}
    assert set(sections) == {"nemo-kto kto, nemo-kto dpo", *shown}
    for name, command in shown.items():
        options = {option for parameter in command.params for option in parameter.opts if option.startswith("-")}
        first_column = " ".join(re.findall(r"^\| `([^`]*)` \|", sections[name], re.MULTILINE))
        assert set(re.findall(r"(?<![\w-])--?[a-z][a-z-]*", first_column)) == options


def test_options_of_training() -> None:
    """Those of the other commands are generated."""
    text = (REFERENCE / "commands.md").read_text(encoding="utf-8").split("<!-- commands -->")[0]
    parameters = TrainingCommand(recipe=RECIPES["kto"]).params
    flags = {option for parameter in parameters for option in parameter.opts if option.startswith("--")} | {"--help"}
    assert set(re.findall(r"--[a-z][a-z-]*", text.split("The options are")[1])) == flags
