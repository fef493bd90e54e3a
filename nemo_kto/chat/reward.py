"""Reward models of transformers, which give an answer of a conversation a score."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from nemo_kto.chat.session import Message, load_model, to_device
from nemo_kto.data.tokens.chat import hf_config, load_tokenizer
from nemo_kto.data.tokens.content import in_form_of
from nemo_kto.device import device
from nemo_kto.errors import UserError, printable

_KIND = "ForSequenceClassification"  # end of the names of its class in transformers


class RewardModel:
    """A model for sequence classification with one output, which is in the memory of the CPU until it scores."""

    def __init__(self, *, folder: Path) -> None:
        """Load tokenizer and weights; UserError if the folder has no complete reward model for conversations."""
        self._folder, self._tokenizer = folder, load_tokenizer(folder)
        try:
            config = hf_config(folder)
        except Exception as error:  # for invalid files transformers may raise any exception
            raise UserError(f"{folder}: config.json cannot be read: {printable(str(error))}; download it again") from error
        names = getattr(config, "architectures", None) or ["no class"]
        if not names[0].endswith(_KIND) or config.num_labels != 1:
            got = f"{folder}, whose config.json has {names[0]} with num_labels {config.num_labels}"
            text = f"must be a reward model, of a class ...{_KIND} with num_labels 1, got {got}"
            raise UserError(f"{text}; name another model, or use --judge or --score")
        if not self._tokenizer.chat_template:
            text = f"must be a reward model whose tokenizer has a chat template, got {folder}, which has none"
            raise UserError(f"{text}; add the template that it was trained with")
        self._limit: int | None = getattr(config.get_text_config(), "max_position_embeddings", None)
        dtype = torch.bfloat16 if device.on_gpu() and device.gpu_has_bf16() else torch.float32
        remedy = "download it again, or name another model"
        self._model = load_model(folder, class_name=f"AutoModel{_KIND}", dtype=dtype, remedy=remedy)
        self._model.config.use_cache = False

    def encode(self, messages: Sequence[Message], answer: str) -> list[int]:
        """Return the token ids of a conversation with its answer, rendered by the chat template of the reward model.

        Raises UserError if the template rejects the messages, or they are longer than the context of the model.
        """
        try:
            turns = [*messages, {"role": "assistant", "content": answer}]
            template = self._tokenizer.get_chat_template(tools=None)
            text = self._tokenizer.apply_chat_template(in_form_of(template, turns), tokenize=False)
        except Exception as error:  # a template is a program and may raise any exception
            raise UserError(f"the chat template of {self._folder} rejects the messages: {printable(str(error))}") from error
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
