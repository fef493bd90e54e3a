"""Command `nemo-kto data preview`: the first rows of a file as the model sees them.

The rows are processed by the same code as in training, in a temporary folder. megatron-core is not loaded.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from nemo_kto.algorithms.recipes import RECIPES
from nemo_kto.cli.command import command, integer_from, is_set
from nemo_kto.cli.tokenise_command import data_errors
from nemo_kto.config import compose
from nemo_kto.config.checker import POSITIONS, Checker, quoted
from nemo_kto.config.resolved import ResolvedRun
from nemo_kto.data.rows.data_sources import read_data_prefix
from nemo_kto.errors import UserError
from nemo_kto.tools.inspect.check_data_command import ALGORITHM_OPTION
from nemo_kto.utils.text import terminal_line, terminal_text

if TYPE_CHECKING:
    from nemo_kto.data.batches.collate import DPOBatch, KTOBatch
    from nemo_kto.data.batches.dataset import DPODataset, KTODataset, KTOExample

_MODEL, _DATA = POSITIONS.values()
_PROMPT, _ANSWER = "prompt", "answer"  # parts of a text
_DESCRIPTION = """\
Show the first rows of a file as the model sees them: the decoded tokens with prompt and response marked,
their number, the label, and the response of the KL example. KEY=VALUE: as in training.
"""


@command("data preview", _DESCRIPTION)
@click.argument("file", help="a data file, a folder of them, or hf:ORG/NAME[:SPLIT]")
@click.argument("overrides", nargs=-1, metavar="KEY=VALUE", help="such as model.data.seq_length=512")
@click.option("--model", metavar="FOLDER", help="the model that will be trained: a Hugging Face folder")
@click.option("--rows", type=integer_from(1), default=3, metavar="N", help="rows to show (3)")
@ALGORITHM_OPTION
def main(file: str, overrides: Sequence[str], model: str | None, rows: int, algorithm: str) -> None:
    """Run the command; raise UserError if the command line, the model's tokenizer or the rows are invalid."""
    recipe = RECIPES[algorithm]
    if model is None and not is_set(_MODEL, overrides):
        raise UserError(
            "--model must be a Hugging Face folder, whose tokenizer and chat template are used, got none; "
            f"e.g. nemo-kto data preview {file} --model MODEL"
        )
    if Path(file).is_dir():
        file = str(next(found for group in read_data_prefix(file).values() for found in group[0].files))
    named = {_MODEL: model, _DATA: file}
    given = [f"{key}={quoted(value)}" for key, value in named.items() if value is not None]
    source, title = compose.Source(config_name=recipe.config_name), "the rows cannot be shown"
    checker = Checker(recipe=recipe, source=source, rules=data_errors, gpus=0, title=title, weights=False)
    run = checker.resolve([*given, *overrides])
    coloured = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    sys.stdout.write("\n".join(_lines(run, file, rows=rows, coloured=coloured)) + "\n")


def _lines(run: ResolvedRun, file: str, *, rows: int, coloured: bool) -> Iterator[str]:
    from nemo_kto.memory.micro_batches import multiple_of
    from nemo_kto.run.data import collate_settings, model_tokenizer, source_settings

    cfg = run.cfg
    tokenizer = model_tokenizer(run.files)
    batch_size = max(cfg.model.global_batch_size, 2)
    with tempfile.TemporaryDirectory() as folder:
        first = {"data_prefix": {"train": file}, "cache_dir": Path(folder), "max_rows": max(batch_size, rows)}
        splits = cfg.recipe.build_splits(source_settings(run, tokenizer) | first, cfg.data_options())
        dataset: Any = splits.train
        examples = dataset.__getitems__(range(min(len(dataset), batch_size)))
        shown = dataset.examples_of_lines(rows)
        options = collate_settings(cfg, tokenizer, multiple=multiple_of(run)) | cfg.loss.collate_options()
        if len(examples) == 1 and "with_kl" in options:  # a KL example takes the response of another example
            options["with_kl"] = False
        batch = cfg.recipe.collate(examples, **options, kept=range(min(shown, len(examples))))
        decode = partial(tokenizer.decode, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        preview = Preview(decode=decode, seq_length=cfg.seq_length, marks=Marks(coloured=coloured))
        yield f"{terminal_line(f'{file} as {run.files.source}')} sees it in `nemo-kto {cfg.recipe.name}`"
        yield f"Marks: {preview.marks.legend()}."
        if splits.prompts:
            yield f"Prompts: {splits.prompts}."
        for warning in splits.warnings:
            yield f"Of the first rows, {terminal_line(warning.removeprefix(f'{file}: '))}."
        if cfg.recipe.has_pairs:
            yield from preview.dpo(dataset, batch, with_rewards=cfg.loss.definition.needs_rewards)
        else:
            yield from preview.kto(dataset, batch, examples)


@dataclass(frozen=True, kw_only=True)
class Marks:
    """Marks that distinguish the parts of a text: colours, or brackets around all parts except the prompt."""

    coloured: bool

    def legend(self) -> str:
        """Return an explanation of the marks."""
        return f"{self.mark(_PROMPT, 'prompt')}, {self.mark(_ANSWER, 'trained on')}"

    def mark(self, kind: str, text: str) -> str:
        """Return the text with the marks of its kind; colours are reset at the end of each line."""
        if self.coloured:
            colour = {_PROMPT: 2, _ANSWER: 32}[kind]  # dim, green
            return "\n".join(f"\x1b[{colour}m{line}\x1b[0m" if line else "" for line in text.split("\n"))
        return f"[[{text}]]" if kind == _ANSWER else text


@dataclass(frozen=True, kw_only=True)
class Preview:
    """Preview of examples as they are in a batch; ``decode`` returns the text of token ids, including special tokens."""

    decode: Callable[[list[int]], str]
    seq_length: int
    marks: Marks

    def kto(self, dataset: KTODataset, batch: KTOBatch, examples: Sequence[KTOExample]) -> Iterator[str]:
        """Yield lines about the examples of a ``KTOBatch``: the first of ``examples``, which are a whole global batch."""
        from nemo_kto.data.batches.collate import kl_partners_of

        origins = dataset.origins(range(len(examples)))
        titles = [terminal_line(origin.title) for origin in origins]
        partners = kl_partners_of(examples) if "kl_samples" in batch else None
        if partners is not None:
            yield f"KL examples are shown for a global batch of the first {len(examples)} examples; training shuffles them."
        for k, length in enumerate(batch["sample_lengths"].tolist()):
            prompt, kind = len(examples[k].prompt_ids), "desirable" if examples[k].desirable else "undesirable"
            yield f"\n{titles[k]}: {kind}{_weight(examples[k].weight)}, {self._count(prompt, length)}{origins[k].cuts}"
            yield from self._text(batch["samples"][k, :length].tolist(), prompt)
            if partners is not None:
                same = " (to the same prompt)" if batch["kl_same_prompt"][k] else ""
                length = int(batch["kl_sample_lengths"][k])
                count = self._count(prompt, length)
                yield f"  KL example: this prompt with the answer of {titles[partners[k]]}{same}, {count}"
                yield from self._text(batch["kl_samples"][k, :length].tolist(), prompt, answer_only=True)

    def dpo(self, dataset: DPODataset, batch: DPOBatch, *, with_rewards: bool) -> Iterator[str]:
        """Yield lines about the pairs of a ``DPOBatch``: the first pairs of the dataset."""
        for k, origin in enumerate(dataset.origins(range(len(batch["chosen"])))):
            values = batch["chosen_rewards"][k].item(), batch["rejected_rewards"][k].item()
            rewards = f", rewards {values[0]:g} and {values[1]:g}" if with_rewards else ""
            yield f"\n{terminal_line(origin.title)}: a pair{_weight(dataset[k].weight)}{rewards}{origin.cuts}"
            prompt = len(dataset[k].prompt_ids)
            chosen = batch["chosen"][k, : batch["chosen_lengths"][k]].tolist()
            rejected = batch["rejected"][k, : batch["rejected_lengths"][k]].tolist()
            for name, ids in (("chosen", chosen), ("rejected", rejected)):
                yield f"  {name}, {self._count(prompt, len(ids))}"
                yield from self._text(ids, prompt, answer_only=name == "rejected")

    def _count(self, prompt: int, length: int) -> str:
        return f"{prompt} + {length - prompt} = {length} of at most {self.seq_length} tokens"

    def _text(self, ids: list[int], prompt: int, *, answer_only: bool = False) -> Iterator[str]:
        """Yield the lines of the marked text of a sequence that begins with ``prompt`` tokens of the prompt."""
        marked = "" if answer_only else self.marks.mark(_PROMPT, self._decoded(ids, 0, prompt))
        marked += self.marks.mark(_ANSWER, self._decoded(ids, prompt, len(ids)))
        for line in marked.split("\n"):
            yield f"  | {line}"

    def _decoded(self, ids: list[int], start: int, stop: int) -> str:
        """Return the text of tokens [start, stop), with the leading space that some tokenizers decode only inside a text."""
        before, until = self.decode(ids[:start]), self.decode(ids[:stop])
        text = until[len(before) :] if until.startswith(before) else self.decode(ids[start:stop])
        return terminal_text(text)


def _weight(weight: float) -> str:
    """Return text for the middle of a sentence, such as ", weight 2"; empty for a weight of 1."""
    return "" if weight == 1 else f", weight {weight:g}"
