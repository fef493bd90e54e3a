"""Reward models of transformers, which give an answer of a conversation a score."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from nemo_kto.data.tokens.chat_template import load_tokenizer
from nemo_kto.data.tokens.rendering import render_bounded
from nemo_kto.data.tokens.workers import LimitError, WorkError
from nemo_kto.device import device
from nemo_kto.errors import UserError
from nemo_kto.model_files.tokenizer_files import has_chat_template
from nemo_kto.tools.inference.chat_model import Message, to_device
from nemo_kto.tools.inference.opening import open_model

_KIND = "ForSequenceClassification"  # end of the names of its class in transformers


class RewardModel:
    """A model for sequence classification with one output, which is in the memory of the CPU until it scores."""

    def __init__(self, *, folder: Path) -> None:
        """Load tokenizer and weights; UserError if the folder has no complete reward model for conversations."""
        self._folder = folder
        dtype = torch.bfloat16 if device.on_gpu() and device.gpu_has_bf16() else torch.float32
        remedy = "download it again, or name another model"
        how: Any = {"class_name": f"AutoModel{_KIND}", "dtype": dtype, "accept": self._accept}
        self._model = open_model(folder, remedy=remedy, **how)
        self._model.config.use_cache = False
        self._tokenizer = load_tokenizer(folder)
        self._limit: int | None = getattr(self._model.config.get_text_config(), "max_position_embeddings", None)

    def _accept(self, config: Mapping[str, Any]) -> None:
        """Raise a UserError for a model that gives no score to conversations."""
        name, labels = (config["architectures"] or ["no class"])[0], config["num_labels"]
        if not name.endswith(_KIND) or labels != 1:
            got = f"{self._folder}, whose config.json has {name} with num_labels {labels}"
            text = f"must be a reward model, of a class ...{_KIND} with num_labels 1, got {got}"
            raise UserError(f"{text}; name another model, or use --judge or --score")
        if not has_chat_template(self._folder):
            text = f"must be a reward model whose tokenizer has a chat template, got {self._folder}, which has none"
            raise UserError(f"{text}; add the template that it was trained with")

    def encode(self, messages: Sequence[Message], answer: str) -> list[int]:
        """Return the token ids of a conversation with its answer, rendered by the chat template of the reward model.

        Raises UserError if the template rejects the messages, or they are longer than the context of the model.
        """
        try:
            turns = [*messages, {"role": "assistant", "content": answer}]
            template, given = self._tokenizer.get_chat_template(tools=None), self._tokenizer.special_tokens_map
            text = render_bounded(template, turns, given, add_generation_prompt=False)
        except WorkError as error:
            raise UserError(f"the chat template of {self._folder} rejects the messages: {error}") from error
        except LimitError as error:
            raise UserError(f"the chat template of {self._folder} must render an answer{error}; correct it") from error
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        if self._limit is not None and len(ids) > self._limit:
            context = f"the {self._limit:,} tokens of the context of {self._folder}"
            raise UserError(f"prompt and answer must have at most {context}, got {len(ids):,}")
        return ids

    def scores(self, sequences: Sequence[Sequence[int]]) -> list[float]:
        """Return the score of each sequence of token ids, which are one batch if the model has a padding token."""
        to_device(self._model)
        padding = self._model.config.get_text_config().pad_token_id
        if padding is None and len(sequences) > 1:
            return [score for each in sequences for score in self.scores([each])]
        longest = max(map(len, sequences))
        missing = [longest - len(each) for each in sequences]
        ids_BS = [[*each, *[padding] * number] for each, number in zip(sequences, missing, strict=True)]
        mask_BS = [[1] * len(each) + [0] * number for each, number in zip(sequences, missing, strict=True)]
        inputs = {"input_ids": ids_BS, "attention_mask": mask_BS}
        with torch.inference_mode():
            output = self._model(**{name: torch.tensor(rows, device=self._model.device) for name, rows in inputs.items()})
        scores: list[float] = output.logits[:, 0].tolist()
        return scores
