"""What the quickstart measures, with transformers alone: log-probs of answers, how well they rank, and sample texts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from prepare import SYSTEM
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

Messages = list[dict[str, str]]


def read_rows(file: Path) -> tuple[list[Messages], list[bool]]:
    """The conversations of a jsonl file and whether each is good; of a pair, the good one comes first."""
    conversations: list[Messages] = []
    labels: list[bool] = []
    for row in map(json.loads, file.read_text(encoding="utf-8").splitlines()):
        sides = {row["label"]: row["messages"]} if "label" in row else {}
        sides = sides or {True: row["prompt"] + row["chosen"], False: row["prompt"] + row["rejected"]}
        labels += sides
        conversations += sides.values()
    return conversations, labels


def load(folder: Path) -> tuple[Any, Any]:
    """Model (on the GPU where there is one) and tokenizer of a Hugging Face folder."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(device).eval()
    return model, AutoTokenizer.from_pretrained(folder)


def _encode(tokenizer: Any, messages: Messages) -> tuple[list[int], int]:
    """Token ids of a conversation up to the end of its last turn, and how many of them are the prompt."""
    prompt = tokenizer.apply_chat_template(messages[:-1], add_generation_prompt=True, tokenize=False)
    prompt_ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    answer_ids = tokenizer(messages[-1]["content"], add_special_tokens=False)["input_ids"]
    return [*prompt_ids, *answer_ids, tokenizer.eos_token_id], len(prompt_ids)


@torch.no_grad()
def answer_logps(folder: Path, conversations: list[Messages], *, rows_at_once: int = 16) -> Tensor:
    """Log-prob of each conversation's last turn, end of turn included.

    Args:
        folder: Hugging Face checkpoint.
        conversations: message lists that end with the assistant's turn.
        rows_at_once: rows of similar length that go through the model together.

    Returns:
        Sums over the answer's tokens, [rows], float32, in the order of ``conversations``.
    """
    model, tokenizer = load(folder)
    encoded = [_encode(tokenizer, messages) for messages in conversations]
    order = sorted(range(len(encoded)), key=lambda row: len(encoded[row][0]))
    result = torch.zeros(len(encoded))
    for start in range(0, len(order), rows_at_once):
        rows = order[start : start + rows_at_once]
        width = max(len(encoded[row][0]) for row in rows)
        tokens = torch.full((len(rows), width), tokenizer.eos_token_id)
        predicts = torch.zeros(len(rows), width, dtype=torch.bool)  # positions whose next token belongs to the answer
        for number, row in enumerate(rows):
            ids, prompt_length = encoded[row]
            tokens[number, : len(ids)] = torch.tensor(ids)
            predicts[number, prompt_length - 1 : len(ids) - 1] = True
        tokens, predicts = tokens.to(model.device), predicts.to(model.device)
        # Padding is on the right and attention is causal: no answer token sees it, so no mask is needed.
        hidden = model.base_model(tokens).last_hidden_state[predicts]
        logits = model.get_output_embeddings()(hidden).float()
        targets = tokens.roll(-1, dims=1)[predicts]
        chosen = logits.gather(1, targets[:, None]).squeeze(1) - logits.logsumexp(dim=1)
        owner = torch.nonzero(predicts)[:, 0]
        result[rows] = torch.zeros(len(rows), device=model.device).index_add(0, owner, chosen).cpu()
    return result


def auc(scores: Tensor, labels: list[bool]) -> float:
    """How often a row labelled True scores above one labelled False, ties counted as half; 0.5 is chance."""
    good = scores[torch.tensor(labels)]
    bad = scores[~torch.tensor(labels)]
    difference = good[:, None] - bad[None, :]
    return float((difference > 0).float().mean() + 0.5 * (difference == 0).float().mean())


def accuracy(rewards: Tensor) -> float:
    """Share of the pairs (rows 0 and 1, rows 2 and 3, ...) whose first row has the greater reward; ties count as half."""
    first, second = rewards.view(-1, 2).unbind(dim=1)
    return float((first > second).float().mean() + 0.5 * (first == second).float().mean())


def margin(rewards: Tensor, labels: list[bool]) -> float:
    """Mean reward of the rows labelled True minus that of the others."""
    return float(rewards[torch.tensor(labels)].mean() - rewards[~torch.tensor(labels)].mean())


@torch.no_grad()
def sample(folder: Path, prompts: list[str], *, seed: int, new_tokens: int = 40) -> list[str]:
    """What a model answers to each prompt, drawn at temperature 0.7 with a fixed seed."""
    model, tokenizer = load(folder)
    answers = []
    for prompt in prompts:
        torch.manual_seed(seed)
        messages = [SYSTEM, {"role": "user", "content": prompt}]
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        encoded = tokenizer(text, add_special_tokens=False, return_tensors="pt").to(model.device)
        output = model.generate(
            **encoded,
            max_new_tokens=new_tokens,
            do_sample=True,
            temperature=0.7,
            top_p=0.95,
            pad_token_id=tokenizer.eos_token_id,
        )
        answers.append(tokenizer.decode(output[0, encoded["input_ids"].shape[1] :], skip_special_tokens=True).strip())
    return answers
