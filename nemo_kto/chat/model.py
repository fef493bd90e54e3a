"""A model in Hugging Face format that answers messages with transformers' ``generate``."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from nemo_kto.artifacts.adapter_files import ADAPTER_CONFIG
from nemo_kto.data.tokens.chat import RecordEncoder, load_tokenizer
from nemo_kto.device import device
from nemo_kto.device.precision import bf16_slowdown, bf16_support
from nemo_kto.errors import UserError, plural, printable

DEFAULT_NEW_TOKENS = 512  # if neither the command nor generation_config.json limits an answer
Message = Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Generation settings of the command; None keeps the value of generation_config.json."""

    max_new_tokens: int | None = None
    temperature: float | None = None  # 0 takes the most probable token
    top_p: float | None = None
    seed: int | None = None  # every answer is drawn with this seed


@dataclass(frozen=True, kw_only=True)
class Answer:
    """An answer of a model, complete or interrupted."""

    text: str
    tokens: int
    seconds: float
    finish: str  # "stop" at an end-of-turn token, "length" at the limit, "interrupted"

    def describe(self) -> str:
        """Return length and speed of the answer as text."""
        return f"{plural(self.tokens, 'token')} in {self.seconds:.1f} s, {self.finish}"


class ChatModel:
    """A model with its tokenizer and generation settings.

    Attributes:
        label: name of the model in the output.
        has_template: whether the tokenizer has a chat template; without one, prompts are completed as they are.
        stop_ids: the tokens that end an answer.
    """

    def __init__(self, *, label: str, folder: Path, base: Path | None = None, dtype: torch.dtype) -> None:
        """Load a Hugging Face folder, or adapters in PEFT format with the folder of their ``base`` model.

        Raises UserError if the model or its tokenizer cannot be loaded, or peft is not installed for adapters.
        """
        whole = folder if base is None else base
        self.label = label
        self._tokenizer: PreTrainedTokenizerBase = load_tokenizer(whole)
        self._model = _load(whole, adapters=None if base is None else folder, dtype=dtype)
        self.has_template = bool(self._tokenizer.chat_template)
        self._limit: int | None = getattr(self._model.config.get_text_config(), "max_position_embeddings", None)
        self.stop_ids = sorted(RecordEncoder(tokenizer=self._tokenizer).stop_ids(trial=False))

    def answer(self, messages: Sequence[Message], sampling: Sampling, *, show: Callable[[str], object]) -> Answer:
        """Answer a conversation; ``show`` gets the text as it is generated. KeyboardInterrupt ends the answer.

        Raises UserError if the chat template rejects the messages, or they leave no room for an answer.
        """
        prompt_ids = self._prompt_ids(messages)
        room = None if self._limit is None else self._limit - prompt_ids.shape[1]
        if room is not None and room < 1:
            text = f"the conversation must have fewer than the {self._limit:,} tokens of the context of {self.label}"
            raise UserError(f"{text}, got {prompt_ids.shape[1]:,}; start again with /reset, or write less")
        if sampling.seed is not None:
            torch.manual_seed(sampling.seed)
        stream, start = _Stream(self._tokenizer, show), time.perf_counter()
        try:
            with torch.inference_mode():
                self._model.generate(
                    prompt_ids,
                    attention_mask=torch.ones_like(prompt_ids),
                    generation_config=self._settings(sampling, room),
                    streamer=stream,
                )
        except KeyboardInterrupt:
            finish = "interrupted"
        else:
            finish = "stop" if stream.ids and stream.ids[-1] in self.stop_ids else "length"
        seconds = time.perf_counter() - start
        return Answer(text=stream.finish(), tokens=len(stream.ids), seconds=seconds, finish=finish)

    def describe(self) -> str:
        """Return family, size, dtype and device of the model."""
        parameters = sum(parameter.numel() for parameter in self._model.parameters())
        dtype = {torch.bfloat16: "bf16", torch.float32: "fp32"}[self._model.dtype]
        size = f"{parameters / 1e6:,.0f} M" if parameters >= 1e6 else f"{parameters:,}"
        return f"{self._model.config.model_type}, {size} parameters, {dtype}, {device.device_name()}"

    def _prompt_ids(self, messages: Sequence[Message]) -> torch.Tensor:
        if not self.has_template:
            ids = self._tokenizer(messages[-1]["content"])["input_ids"] or [self._tokenizer.eos_token_id]
            return torch.tensor([ids], device=self._model.device)
        try:
            text = self._tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        except Exception as error:  # a template is a program and may raise any exception
            remedy = "leave out the system message, or correct the template"
            raise UserError(
                f"{self.label}: the chat template rejects the messages: {printable(str(error))}; {remedy}"
            ) from error
        ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return torch.tensor([ids], device=self._model.device)

    def _settings(self, sampling: Sampling, room: int | None) -> GenerationConfig:
        """Return the model's generation settings with those of the command; ``room`` is the maximum length of an answer."""
        settings = copy.deepcopy(self._model.generation_config)
        wanted = sampling.max_new_tokens or settings.max_new_tokens or DEFAULT_NEW_TOKENS
        settings.max_new_tokens, settings.max_length = wanted if room is None else min(wanted, room), None
        settings.eos_token_id = self.stop_ids
        if settings.pad_token_id is None:
            settings.pad_token_id = self._tokenizer.eos_token_id
        if sampling.temperature == 0:
            settings.do_sample = False
        elif sampling.temperature is not None or sampling.top_p is not None:
            settings.do_sample = True
        if not settings.do_sample:  # transformers warns about settings that have no effect
            settings.temperature = settings.top_p = settings.top_k = None
        else:
            settings.temperature = sampling.temperature or settings.temperature
            settings.top_p = sampling.top_p or settings.top_p
        return settings


class _Stream:
    """Receiver of ``generate``'s tokens, which shows their text as soon as its last character is complete."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, show: Callable[[str], object]) -> None:
        self._tokenizer, self._show = tokenizer, show
        self._prompt_seen, self._shown = False, ""
        self.ids: list[int] = []

    def put(self, ids: torch.Tensor) -> None:
        if not self._prompt_seen:  # generate passes the prompt first
            self._prompt_seen = True
            return
        self.ids += ids.tolist()
        text = self._text()
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):  # a character may have several tokens
            self._extend(text)

    def end(self) -> None:
        """Called by ``generate`` after the last token."""

    def finish(self) -> str:
        """Show the rest, and return the whole text."""
        text = self._text()
        self._extend(text)
        return text

    def _text(self) -> str:
        return str(self._tokenizer.decode(self.ids, skip_special_tokens=True))

    def _extend(self, text: str) -> None:
        if len(text) > len(self._shown) and text.startswith(self._shown):
            self._show(text[len(self._shown) :])
            self._shown = text


def faster_dtype() -> torch.dtype:
    """Return bf16 if this machine generates tokens faster with it, else fp32.

    Many CPUs train faster in bf16, and still multiply a matrix with a single vector faster in fp32.
    """
    native = bf16_support().native if device.on_gpu() else bf16_slowdown(rows=1) < 1.0
    return torch.bfloat16 if native else torch.float32


def _load(folder: Path, *, adapters: Path | None, dtype: torch.dtype) -> Any:
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # for invalid files transformers may raise any exception
        text = f"{folder}: the model cannot be loaded: {type(error).__name__}: {printable(str(error))}"
        raise UserError(f"{text}; download it again, or export it again with nemo-kto export") from error
    if adapters is not None:
        try:
            from peft import PeftConfig, PeftModel
        except ImportError:
            text = f"{adapters}: the package peft must be installed for adapters ({ADAPTER_CONFIG}), got none"
            raise UserError(f"{text}; pip install peft, or name the run, whose merged model is used") from None
        config = PeftConfig.from_pretrained(str(adapters), local_files_only=True)
        config.megatron_config = None  # PEFT would import the module that megatron_core names
        model = PeftModel.from_pretrained(model, str(adapters), config=config, local_files_only=True).merge_and_unload()
    device.select()
    return model.to(device.current_device()).eval()
