"""Conversations with one model in Hugging Face format, or with two that get the same messages."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedTokenizerBase

from nemo_kto.artifacts.generation_files import read_generation_settings
from nemo_kto.artifacts.model_content import auto_class
from nemo_kto.data.rows.records import PromptRecord, RowError, TextOrMessages
from nemo_kto.data.tokens.chat_template import RecordEncoder, load_tokenizer
from nemo_kto.data.tokens.drawn import DrawnAnswer, drawn_text, read_drawn
from nemo_kto.data.tokens.message_content import TOKEN_IDS
from nemo_kto.data.tokens.template_trial import REMEDY
from nemo_kto.device import device
from nemo_kto.device.precision import bf16_slowdown, bf16_support
from nemo_kto.errors import UserError, either, plural, refuse_broken, show
from nemo_kto.tools.inference.opening import open_model
from nemo_kto.utils.text import terminal_line, terminal_text

DEFAULT_NEW_TOKENS = 512  # if neither the command nor generation_config.json limits an answer
Message = Mapping[str, Any]
_HELP = """\
/reset          forget the conversation; the system message stays
/system TEXT    set the system message, and forget the conversation; without TEXT, remove it
/help           list the commands
/quit           end, like Ctrl-D; Ctrl-C stops an answer
"""
_LABELS = ("\x1b[1;32m", "\x1b[1;36m")  # colour of the label of each model
_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"
_PROMPT = "> "
_REMEDY = "download it again, or export it again with nemo-kto export"


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Generation settings of the command; None keeps the value of generation_config.json."""

    max_new_tokens: int | None = None
    temperature: float | None = None  # 0 takes the most probable token
    top_p: float | None = None
    top_k: int | None = None  # 0 draws from all tokens
    seed: int | None = None  # every answer is drawn with this seed


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

    def __init__(self, *, label: str, folder: Path, base: Path | None = None, dtype: torch.dtype) -> None:
        """Load a Hugging Face folder, or adapters in PEFT format with the folder of their ``base`` model.

        Raises UserError if the model or its tokenizer cannot be loaded, or peft is not installed for adapters.
        """
        whole = folder if base is None else base
        self.label, self._folder = label, whole
        how: Any = {"adapters": None if base is None else folder, "class_name": auto_class(whole), "dtype": dtype}
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
                    prompt_ids,
                    attention_mask=torch.ones_like(prompt_ids),
                    generation_config=settings,
                    streamer=stream,
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


class Session:
    """A conversation, whose answers are printed to stdout: as text while they are generated, or as lines of JSON.

    Each model has a history of its own, with its own answers. ``collect`` gets each complete answer after it is printed: the
    name of its model, the prompt that the model has seen (a text, if it has no chat template), and the answer of a row.
    """

    def __init__(
        self,
        *,
        models: Sequence[ChatModel],
        sampling: Sampling,
        system: str | None = None,
        as_json: bool,
        collect: Callable[[str, Any, TextOrMessages], None] | None = None,
    ) -> None:
        self._collect = collect
        self._models, self._sampling, self._as_json = models, sampling, as_json
        self._coloured = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
        refuse_broken("--system", system or "")
        self._system = system
        self._histories: list[list[Message]] = []
        self.reset()
        for model in models:
            if ignored := model.settings[1]:
                _report(f"{model.label}: a chat ignores {', '.join(ignored)} of its generation settings")
        if without := [model for model in models if not model.has_template]:
            names = " and ".join(model.label for model in without)
            if system is not None:
                raise UserError(f"--system must be used with a chat template, which {names} lacks; leave it out")
            text = "no chat template, so that each prompt is completed as it is, without the conversation before it"
            _report(f"{names}: {text}")

    def reset(self) -> None:
        """Forget the conversation, except for the system message."""
        start = [] if self._system is None else [{"role": "system", "content": self._system}]
        self._histories = [list(start) for _ in self._models]

    def say(self, prompt: str) -> bool:
        """Print the answer of each model to a prompt, and add both to its history; return whether none was interrupted.

        Raises UserError if the prompt does not fit into the context, or the chat template rejects the messages; the
        histories then remain unchanged.
        """
        refuse_broken("a prompt", prompt)
        added = []
        for number, (model, history) in enumerate(zip(self._models, self._histories, strict=True)):
            if len(self._models) > 1 and not self._as_json:
                self._write(self._marked(terminal_line(f"{model.label}:"), _LABELS[number]) + "\n")
            show_text = (lambda text: None) if self._as_json else (lambda text: self._write(terminal_text(text)))
            answer = model.answer([*history, {"role": "user", "content": prompt}], self._sampling, show=show_text)
            if self._as_json:
                fields = {"tokens": answer.tokens, "seconds": round(answer.seconds, 3), "finish": answer.finish}
                message = {"message": answer.message} if answer.message.keys() - {"role", "content"} else {}
                line = {"model": model.label, "prompt": prompt, "answer": answer.drawn.text, **message, **fields}
                text = json.dumps(line, ensure_ascii=False)
                self._write((text if text == terminal_text(text) else json.dumps(line)) + "\n")
            else:
                details = f"  {self._marked(f'({answer.describe()})', _DIM)}" if sys.stdout.isatty() else ""
                self._write(f"{details}\n")
            added.append([{"role": "user", "content": prompt}, answer.message])
            if answer.finish == "interrupted":
                break
            if self._collect is not None:
                seen = [*history, {"role": "user", "content": prompt}] if model.has_template else prompt
                self._collect(model.label, seen, answer.drawn.answer)
        for history, messages in zip(self._histories, added, strict=False):
            history += messages
        return answer.finish != "interrupted"

    def talk(self) -> None:
        """Answer lines of stdin until its end or /quit.

        On a terminal, lines can be edited, and a UserError is printed; otherwise it is raised.
        """
        interactive = sys.stdin.isatty() and sys.stdout.isatty()
        for line in _typed_lines() if interactive else sys.stdin:
            word, _, rest = line.rstrip("\n").partition(" ")
            try:
                if word == "/quit":
                    return
                if word == "/help":
                    self._write(_HELP)
                elif word == "/reset":
                    self.reset()
                elif word == "/system":
                    self._set_system(rest.strip())
                elif word.startswith("/"):
                    known = either(["/reset", "/system", "/help", "/quit"])
                    raise UserError(f"the command must be {known}, got {show(word)}; a prompt may begin with a space")
                elif line.strip() and not self.say(line.strip()) and not interactive:
                    raise KeyboardInterrupt
            except UserError as error:
                if not interactive:
                    raise
                _report(str(error))

    def _set_system(self, text: str) -> None:
        if not all(model.has_template for model in self._models):
            raise UserError("/system must be used with a chat template, which the model lacks; write it into the prompt")
        refuse_broken("/system", text)
        self._system = text or None
        self.reset()

    def _marked(self, text: str, colour: str) -> str:
        return f"{colour}{text}{_PLAIN}" if self._coloured else text

    def _write(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()


def _report(text: str) -> None:
    sys.stderr.write(f"nemo-kto chat: {terminal_text(text)}\n")
    sys.stderr.flush()


def _typed_lines() -> Iterator[str]:
    """Yield lines typed on a terminal; Ctrl-C discards the line that is being written."""
    import readline  # noqa: F401  # input() then edits lines and recalls earlier ones

    while True:
        try:
            yield input(_PROMPT)
        except KeyboardInterrupt:
            sys.stdout.write("\n")
        except EOFError:
            sys.stdout.write("\n")
            return


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
