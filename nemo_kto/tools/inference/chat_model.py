"""Generation with a model in Hugging Face format: answers to a conversation, drawn as transformers draws them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedTokenizerBase

from nemo_kto.data.rows.records import PromptRecord, RowError
from nemo_kto.data.tokens.chat_template import RecordEncoder, load_tokenizer
from nemo_kto.data.tokens.drawn import DrawnAnswer, drawn_text, read_drawn
from nemo_kto.data.tokens.rendering import REMEDY, TOKEN_IDS
from nemo_kto.device import device
from nemo_kto.device.precision import bf16_slowdown, bf16_support
from nemo_kto.errors import UserError, plural
from nemo_kto.model_files.companion_files import auto_class, read_generation_settings
from nemo_kto.tools.inference.opening import open_model
from nemo_kto.tools.inference.quantized_base import QuantizedLinear
from nemo_kto.tools.inference.sampling import Sampling

DEFAULT_NEW_TOKENS = 512  # if neither the command nor generation_config.json limits an answer
Message = Mapping[str, Any]
_REMEDY = "download it again, or export it again with nemo-kto export"


@dataclass(frozen=True, kw_only=True)
class Answer:
    """An answer of a model, complete or interrupted.

    Attributes:
        drawn: what the model wrote, as text and as the answer of a row.
        ids: its tokens.
    """

    drawn: DrawnAnswer
    ids: Sequence[int]
    seconds: float
    finish: str  # "stop" at an end-of-turn token, "length" at the limit, "interrupted"

    @property
    def tokens(self) -> int:
        return len(self.ids)

    @property
    def message(self) -> Message:
        """The answer as a message of a conversation."""
        given = self.drawn.answer
        message: Message = {"content": given} if isinstance(given, str) else given[0]
        return {"role": "assistant", **{name: value for name, value in message.items() if name != TOKEN_IDS}}

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

    def __init__(
        self, *, label: str, folder: Path, base: Path | None = None, base_format: str | None = None, dtype: torch.dtype
    ) -> None:
        """Load a Hugging Face folder, or adapters in PEFT format with the folder of their ``base`` model.

        With ``base_format`` the base model is quantized.

        Raises UserError if the model or its tokenizer cannot be loaded, or peft is not installed for adapters.
        """
        whole = folder if base is None else base
        self.label, self._folder = label, whole
        how: Any = {
            "adapters": None if base is None else folder,
            "base_format": base_format,
            "class_name": auto_class(whole),
            "dtype": dtype,
        }
        self._model = to_device(open_model(whole, remedy=_REMEDY, **how))
        self._tokenizer: PreTrainedTokenizerBase = load_tokenizer(whole)  # transformers reads config.json for it too
        self.has_template = bool(self._tokenizer.chat_template)
        self._limit: int | None = getattr(self._model.config.get_text_config(), "max_position_embeddings", None)
        self._encoder = RecordEncoder(tokenizer=self._tokenizer, bounded=True)
        self.stop_ids = sorted(self._encoder.stop_ids())

    @cached_property
    def settings(self) -> tuple[dict[str, Any], list[str]]:
        """Generation settings of the model's folder, and those that are ignored; UserError if some are wrong."""
        return read_generation_settings(self._folder)

    def answer(self, messages: Sequence[Message], sampling: Sampling, *, show: Callable[[str], object]) -> Answer:
        """Answer a conversation; ``show`` gets the text as it is generated. KeyboardInterrupt ends the answer.

        Raises UserError if the chat template rejects the messages, or they leave no room for an answer.
        """
        prompt_ids, settings = self._prepare(messages, sampling, GenerationConfig(**self.settings[0]))
        read = partial(drawn_text, self._tokenizer, stop_ids=self.stop_ids, before=prompt_ids[0].tolist())
        stream, start = _Stream(read, show), time.perf_counter()
        try:
            with torch.inference_mode():
                self._model.generate(
                    prompt_ids, attention_mask=torch.ones_like(prompt_ids), generation_config=settings, streamer=stream
                )
        except KeyboardInterrupt:
            finish = "interrupted"
        else:
            finish = "stop" if stream.ids and stream.ids[-1] in self.stop_ids else "length"
        seconds = time.perf_counter() - start
        stream.finish()
        drawn = self._read(messages, {}, prompt_ids, stream.ids)
        return Answer(drawn=drawn, ids=stream.ids, seconds=seconds, finish=finish)

    def draw(
        self, messages: Sequence[Message], sampling: Sampling, *, count: int, variables: Mapping[str, object]
    ) -> list[Answer]:
        """Draw several answers to a conversation as one batch; ``variables`` are arguments of the chat template.

        The settings of the model's generation_config.json do not count.

        Raises UserError as :meth:`answer` does.
        """
        prompt_ids, settings = self._prepare(messages, sampling, GenerationConfig(), variables)
        prompt_ids, start = prompt_ids.repeat(count, 1), time.perf_counter()
        with torch.inference_mode():
            ids = self._model.generate(prompt_ids, attention_mask=torch.ones_like(prompt_ids), generation_config=settings)
        seconds, answers = time.perf_counter() - start, []
        for row in ids[:, prompt_ids.shape[1] :].tolist():
            end = next((number for number, token in enumerate(row, start=1) if token in self.stop_ids), None)
            drawn, finish = self._read(messages, variables, prompt_ids, row), "length" if end is None else "stop"
            answers.append(Answer(drawn=drawn, ids=row[:end], seconds=seconds, finish=finish))
        return answers

    def _read(
        self, messages: Sequence[Message], variables: Mapping[str, object], prompt_ids: torch.Tensor, ids: Sequence[int]
    ) -> DrawnAnswer:
        """Return an answer to a conversation as that of a row."""
        return read_drawn(
            self._encoder,
            self._tokenizer,
            list(messages) if self.has_template else messages[-1]["content"],
            ids,
            prompt_ids=prompt_ids[0].tolist(),
            stop_ids=self.stop_ids,
            variables=variables,
        )

    def describe(self) -> str:
        """Return family, size, dtype and device of the model."""
        parameters = sum(parameter.numel() for parameter in self._model.parameters())
        parameters += sum(each.weight.numel() for each in self._model.modules() if isinstance(each, QuantizedLinear))
        dtype = {torch.bfloat16: "bf16", torch.float32: "fp32"}[self._model.dtype]
        size = f"{parameters / 1e6:,.0f} M" if parameters >= 1e6 else f"{parameters:,}"
        return f"{self._model.config.model_type}, {size} parameters, {dtype}, {device.device_name()}"

    def _prepare(
        self,
        messages: Sequence[Message],
        sampling: Sampling,
        settings: GenerationConfig,
        variables: Mapping[str, object] = MappingProxyType({}),
    ) -> tuple[torch.Tensor, GenerationConfig]:
        """Return the token ids of a conversation and ``settings`` with those of the command, and set the seed."""
        prompt_ids = self._prompt_ids(messages, variables)
        room = None if self._limit is None else self._limit - prompt_ids.shape[1]
        if room is not None and room < 1:
            text = f"the conversation must have fewer than the {self._limit:,} tokens of the context of {self.label}"
            raise UserError(f"{text}, got {prompt_ids.shape[1]:,}; write less, or start again (in a chat with /reset)")
        if sampling.seed is not None:
            torch.manual_seed(sampling.seed)
        return prompt_ids, self._settings(sampling, room, settings)

    def _prompt_ids(self, messages: Sequence[Message], variables: Mapping[str, object]) -> torch.Tensor:
        if not self.has_template:
            ids = self._tokenizer(messages[-1]["content"])["input_ids"] or [self._tokenizer.eos_token_id]
            return torch.tensor([ids], device=self._model.device)
        (ids,) = self._encoder.encode_prompts([PromptRecord(prompt=list(messages), line=1, template=variables)])
        if isinstance(ids, RowError):
            reason, remedy = str(ids).removesuffix(f"; {REMEDY}"), "leave out the system message, or correct the template"
            raise UserError(f"{self.label}: {reason}; {remedy}")
        return torch.tensor([ids], device=self._model.device)

    def _settings(self, sampling: Sampling, room: int | None, settings: GenerationConfig) -> GenerationConfig:
        """Return generation settings with those of the command; ``room`` is the maximum length of an answer."""
        wanted = sampling.max_new_tokens or settings.max_new_tokens or DEFAULT_NEW_TOKENS
        settings.max_new_tokens, settings.max_length = wanted if room is None else min(wanted, room), None
        settings.eos_token_id = self.stop_ids
        if settings.pad_token_id is None:
            settings.pad_token_id = self._tokenizer.eos_token_id
        if sampling.temperature == 0:
            settings.do_sample = False
        elif any(value is not None for value in (sampling.temperature, sampling.top_p, sampling.top_k)):
            settings.do_sample = True
        if not settings.do_sample:  # transformers warns about settings that have no effect
            settings.temperature = settings.top_p = settings.top_k = None
        else:
            settings.temperature = sampling.temperature or settings.temperature
            settings.top_p = sampling.top_p or settings.top_p
            # generate would take 50 for None
            settings.top_k = max(settings.top_k or 0, 0) if sampling.top_k is None else sampling.top_k
        return settings


class _Stream:
    """Receiver of ``generate``'s tokens, which shows their text as soon as its last character is complete."""

    def __init__(self, read: Callable[[Sequence[int]], str], show: Callable[[str], object]) -> None:
        self._read, self._show = read, show
        self._prompt_seen, self._shown = False, ""
        self.ids: list[int] = []

    def put(self, ids: torch.Tensor) -> None:
        if not self._prompt_seen:  # generate passes the prompt first
            self._prompt_seen = True
            return
        self.ids += ids.tolist()
        text = self._read(self.ids)
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):  # a character may have several tokens
            self._extend(text)

    def end(self) -> None:
        """Called by ``generate`` after the last token."""

    def finish(self) -> None:
        """Show the rest."""
        self._extend(self._read(self.ids))

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


def to_device(model: Any) -> Any:
    """Return a model for inference on this machine's GPU, or on its CPU."""
    device.select()
    return model.to(device.current_device()).eval()
