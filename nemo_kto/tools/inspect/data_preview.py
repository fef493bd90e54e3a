"""Text preview of the examples of a batch, with marks for prompts and answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from nemo_kto.data.batches.collate import DPOBatch, KTOBatch, kl_partners_of
from nemo_kto.data.batches.dataset import DPODataset, KTODataset, KTOExample
from nemo_kto.utils.text import terminal_line, terminal_text

Decode = Callable[[list[int]], str]
_PROMPT, _ANSWER = "prompt", "answer"


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

    decode: Decode
    seq_length: int
    marks: Marks

    def kto(self, dataset: KTODataset, batch: KTOBatch, examples: Sequence[KTOExample]) -> Iterator[str]:
        """Yield lines about the examples of a ``KTOBatch``: the first of ``examples``, which are a whole global batch."""
        origins = dataset.origins(range(len(examples)))
        titles = [terminal_line(origin.title) for origin in origins]
        partners = kl_partners_of(examples) if "kl_samples" in batch else None
        if partners is not None:
            yield f"KL examples are shown for a global batch of the first {len(examples)} examples; training shuffles them."
        for k, length in enumerate(batch["sample_lengths"].tolist()):
            prompt, kind = len(examples[k].prompt_ids), "desirable" if examples[k].desirable else "undesirable"
            weight = _weight(examples[k].weight)
            yield f"\n{titles[k]}: {kind}{weight}, {self._count(prompt, length)}{origins[k].cuts}"
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
