"""What the quickstart measures, with transformers only: log-probs of responses, and how well they rank.

    python examples/quickstart/score.py kto|dpo REFERENCE ALIGNED ROWS [--precision auto] [--out FILE]

REFERENCE and ALIGNED are Hugging Face folders, ROWS is a jsonl file of held-out data.
"""

from __future__ import annotations

import argparse
import copy
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from plan import choose_precision
from prepare import FROM_FILES
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from nemo_kto.device import device
from nemo_kto.device.precision import PRECISIONS, dtype_of

BETA = 0.1

Messages = list[dict[str, str]]


def read_rows(file: Path) -> tuple[list[Messages], list[bool]]:
    """The conversations of a jsonl file and whether each is good; in a pair, the good one comes first."""
    conversations: list[Messages] = []
    labels: list[bool] = []
    for row in map(json.loads, file.read_text(encoding="utf-8").splitlines()):
        sides = {row["label"]: row["messages"]} if "label" in row else {}
        sides = sides or {True: row["prompt"] + row["chosen"], False: row["prompt"] + row["rejected"]}
        labels += sides
        conversations += sides.values()
    return conversations, labels


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A loaded Hugging Face folder, on the GPU if there is one."""

    model: Any
    tokenizer: Any


def load(folder: Path, *, dtype: torch.dtype) -> Loaded:
    """Model and tokenizer of a Hugging Face folder."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **FROM_FILES).to(device.current_device()).eval()
    return Loaded(model=model, tokenizer=AutoTokenizer.from_pretrained(folder, **FROM_FILES))


def _encode(tokenizer: Any, messages: Messages) -> tuple[tuple[int, ...], list[int]]:
    """Token ids of a conversation before its last turn, and of that turn up to its end."""
    prompt = tokenizer.apply_chat_template(messages[:-1], add_generation_prompt=True, tokenize=False)
    prompt_ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    response_ids = tokenizer(messages[-1]["content"], add_special_tokens=False)["input_ids"]
    return tuple(prompt_ids), [*response_ids, tokenizer.eos_token_id]


@torch.no_grad()
def answer_logps(loaded: Loaded, conversations: list[Messages], *, rows_at_once: int = 32) -> Tensor:
    """Log-prob of each conversation's last turn, end of turn included.

    Args:
        loaded: the model.
        conversations: message lists that end with the assistant's turn.
        rows_at_once: conversations with the same prompt in one forward pass; the prompt is computed once for all of them.

    Returns:
        Sums over the response's tokens, [conversations], float32, in the order of ``conversations``.
    """
    model, tokenizer = loaded.model, loaded.tokenizer
    encoded = [_encode(tokenizer, messages) for messages in conversations]
    of_prompt: dict[tuple[int, ...], list[int]] = {}
    for row in sorted(range(len(encoded)), key=lambda row: len(encoded[row][1])):
        of_prompt.setdefault(encoded[row][0], []).append(row)
    result = torch.zeros(len(encoded))
    for prompt, its_rows in of_prompt.items():
        keys_and_values = model.base_model(torch.tensor([prompt[:-1]], device=model.device), use_cache=True).past_key_values
        for start in range(0, len(its_rows), rows_at_once):
            rows = its_rows[start : start + rows_at_once]
            targets = [torch.tensor(encoded[row][1]) for row in rows]
            targets_BT = pad_sequence(targets, batch_first=True, padding_value=-100).to(model.device)
            tokens_BT = targets_BT.roll(1, dims=1).clamp(min=0)  # each token predicts the next one; padding is on the right
            tokens_BT[:, 0] = prompt[-1]
            past = copy.deepcopy(keys_and_values)  # a forward pass adds to it
            past.batch_repeat_interleave(len(rows))
            hidden = model.base_model(tokens_BT, past_key_values=past).last_hidden_state[targets_BT >= 0]
            logits = model.get_output_embeddings()(hidden).float()
            chosen = logits.gather(1, targets_BT[targets_BT >= 0][:, None]).squeeze(1) - logits.logsumexp(dim=1)
            owner = torch.nonzero(targets_BT >= 0)[:, 0]
            result[rows] = torch.zeros(len(rows), device=model.device).index_add(0, owner, chosen).cpu()
    return result


def auc(scores: Tensor, labels: list[bool]) -> float:
    """How often a response labelled True scores above one labelled False; a tie counts as half; 0.5 is chance."""
    good = scores[torch.tensor(labels)]
    bad = scores[~torch.tensor(labels)]
    difference = good[:, None] - bad[None, :]
    return float((difference > 0).float().mean() + 0.5 * (difference == 0).float().mean())


def accuracy(rewards: Tensor) -> float:
    """Fraction of the pairs (0 and 1, 2 and 3, ...) whose first response has the greater reward; a tie counts as half."""
    first, second = rewards.view(-1, 2).unbind(dim=1)
    return float((first > second).float().mean() + 0.5 * (first == second).float().mean())


def margin(rewards: Tensor, labels: list[bool]) -> float:
    """Mean reward of the responses labelled True minus that of the others."""
    return float(rewards[torch.tensor(labels)].mean() - rewards[~torch.tensor(labels)].mean())


def measure(logps: list[Tensor], labels: list[bool], *, pairs: bool) -> dict[str, float]:
    """Figures of the implied rewards, beta * (log-prob of the model - log-prob of the reference), before and after training.

    Args:
        logps: of the held-out responses under the reference and under the aligned model, each [responses].
        labels: whether a response is good, [responses].
        pairs: responses 0 and 1, 2 and 3, ... belong together, the good one first.
    """
    reference, aligned = logps
    figures: dict[str, float] = {"rows": len(labels) // (2 if pairs else 1)}
    for when, model in (("before", reference), ("after", aligned)):
        rewards = BETA * (model - reference)
        figures[f"margin_{when}"] = margin(rewards, labels)
        figures[f"auc_{when}"] = auc(rewards, labels)
        if pairs:
            figures[f"accuracy_{when}"] = accuracy(rewards)
    return figures


def show(figures: dict[str, float], *, pairs: bool) -> None:
    """Print the same figures."""
    what = "pairs of a good and a bad review" if pairs else "reviews, half of them good"
    print(f"\nHeld-out data: {figures['rows']:.0f} {what}")
    ranking = ("AUC: a good review gets a higher reward than a bad one", "auc")
    if pairs:
        ranking = ("accuracy: the good review of a pair gets the higher reward", "accuracy")
    for title, name in (("reward margin, good minus bad reviews", "margin"), ranking):
        print(f"  {title}\n    before: {figures[f'{name}_before']:.3f}  after: {figures[f'{name}_after']:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description="What an aligned model learned, on held-out data.")
    parser.add_argument("algorithm", choices=("kto", "dpo"))
    parser.add_argument("reference", type=Path, help="Hugging Face folder of the model before")
    parser.add_argument("aligned", type=Path, help="Hugging Face folder of the model after")
    parser.add_argument("rows", type=Path, help="jsonl file of held-out data")
    parser.add_argument("--precision", default="auto", choices=PRECISIONS)
    parser.add_argument("--out", type=Path, help="also write the figures to this file, as JSON")
    arguments = parser.parse_args()
    logging.disable_progress_bar()
    pairs, dtype = arguments.algorithm == "dpo", dtype_of(choose_precision(arguments.precision)[0])
    conversations, labels = read_rows(arguments.rows)
    # One thread per model and half of the cores for each: if both use all cores, each operation waits for the other.
    torch.set_num_threads(max(1, torch.get_num_threads() // 2))
    models = [load(folder, dtype=dtype) for folder in (arguments.reference, arguments.aligned)]
    print(f"log-probs of {len(conversations)} responses, before and after", flush=True)
    with ThreadPoolExecutor() as threads:
        logps = list(threads.map(lambda loaded: answer_logps(loaded, conversations), models))
    figures = measure(logps, labels, pairs=pairs)
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(figures, indent=2) + "\n")
    show(figures, pairs=pairs)


if __name__ == "__main__":
    main()
