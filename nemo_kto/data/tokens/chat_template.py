"""Tokenisation of records with the tokenizer and chat template of the model."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from transformers import AutoConfig, AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from nemo_kto.data.rows.records import (
    KTORecord,
    LastRowError,
    LostTextError,
    Message,
    PromptRecord,
    RowError,
    TextOrMessages,
    is_empty_answer,
)
from nemo_kto.data.tokens.rendering import (
    BEGIN_OF_THOUGHTS,
    DROP_REMEDY,
    END_OF_THOUGHTS,
    MAX_CHARACTERS,
    NO_THOUGHTS,
    REMEDY,
    TOKEN_IDS,
    Plan,
    continue_prompt,
    find_plan,
    in_form,
    in_form_of,
    render_bounded,
    renderer,
    signature,
)
from nemo_kto.data.tokens.workers import LimitError
from nemo_kto.errors import UserError, printable, show
from nemo_kto.model_files.companion_files import transformers_fields, without_class
from nemo_kto.model_files.tokenizer_files import chat_template_file, check_ids, check_tokenizer, declared_stop_ids, image_ids

_TRIAL_ROWS = 100  # number of rows on which a chat template is tried
_MAX_END = 8  # tokens that may follow the text of an answer
_NOW = re.compile(r"""strftime_now\(\s*(["'])(.*?)\1\s*\)""")  # a call in a chat template
_THINKING = "enable_thinking"  # variable of many templates
_tried_templates: set[str] = set()  # by this process, without reaching a limit
_AGAIN = "download the tokenizer's files again, or write them with save_pretrained"


@dataclass(frozen=True, kw_only=True)
class EncodedExample:
    """Token ids of one example before truncation; both lists are non-empty."""

    prompt_ids: list[int]
    response_ids: list[int]
    is_empty: bool = False  # the answer has text that becomes only the end of its turn
    has_special_tokens: bool = False  # within its texts: of a row of messages, or the EOS in an answer of plain text


class _Text(NamedTuple):
    prompt: str
    answer: str
    templated: bool
    drawn: object = ()  # TOKEN_IDS of the answer
    is_empty: bool = False
    has_special_tokens: bool = False


def load_tokenizer(folder: str | Path, *, vocab_size: int | None = None) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a Hugging Face folder, without network access and without running code from the folder.

    Raises UserError if it cannot be loaded, or BOS or EOS is beyond the model's ``vocab_size`` (None if unknown).
    """
    check_tokenizer(Path(folder), vocab_size=vocab_size)
    try:
        with _panics_named(Path(folder)):
            tokenizer = _read(Path(folder))
    except UserError:
        raise
    except Exception as error:  # for invalid files transformers and tokenizers may raise any exception
        message = f"{folder}: the tokenizer cannot be loaded: {printable(str(error))}"
        raise UserError(f"{message}; {_AGAIN}") from error
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise UserError(
            f"{folder} must hold a tokenizer, got {type(tokenizer).__name__}; download the tokenizer's files again"
        )
    ids = {
        token: number
        for token, number in tokenizer.get_vocab().items()
        if token in (tokenizer.bos_token, tokenizer.eos_token)
    }
    check_ids(ids, vocab_size=vocab_size, file=Path(folder))  # because files other than tokenizer.json may define them too
    return tokenizer


def hf_config(folder: Path) -> PretrainedConfig:
    """Return config.json as transformers reads it, also with an alias of a ``model_type``; raises as AutoConfig does."""
    fields, is_alias = transformers_fields(folder)
    if is_alias:
        return AutoConfig.for_model(**fields)
    return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def _read(folder: Path) -> Any:
    """Return the tokenizer of a folder, whose class does not depend on the packages that are installed.

    Of config.json only the type of the model counts, because transformers refuses other fields of published files.
    """
    if without_class(folder) is not None:
        return PreTrainedTokenizerFast.from_pretrained(str(folder), local_files_only=True)
    given = transformers_fields(folder)[0]
    names = ("model_type", "model_name", "tokenizer_class")
    fields = {name: given[name] for name in names if isinstance(given.get(name), str)}
    try:
        config = AutoConfig.for_model(**fields)
    except (TypeError, ValueError):  # no type, or one that transformers does not know
        config = PretrainedConfig(**fields)
    options = {"local_files_only": True, "trust_remote_code": False, "mistral_format": False}
    return AutoTokenizer.from_pretrained(str(folder), config=config, **options)


@contextlib.contextmanager
def _panics_named(folder: Path) -> Iterator[None]:
    """Turn a panic of the tokenizers library, which is not an Exception, into a UserError about tokenizer.json."""
    try:
        yield
    except BaseException as error:
        if type(error).__module__ != "pyo3_runtime":
            raise
        message = f"{folder / 'tokenizer.json'}: the tokenizers library failed: {printable(str(error))}"
        raise UserError(f"{message}; correct its regular expressions, or {_AGAIN}") from error


class RecordEncoder:
    """Encoder of records into token ids, one batch at a time.

    A row of strings gets a BOS (``bos_id``) if the tokenizer adds one itself, and an EOS after the answer. If
    ``apply_chat_template`` is set, it is treated as a user message and the assistant message that answers it. A row of
    messages is rendered by the chat template, as the first row of its shape is found to lose nothing (``find_plan``); white
    space after the end-of-turn token is removed, and an EOS is added only if neither the template nor the next turn ends a
    turn with a special token. The answer is tokenised as the continuation of the prompt. If this would change the tokens of
    the prompt (which the model is given unchanged), the answer is tokenised separately.
    """

    def __init__(
        self,
        *,
        tokenizer: PreTrainedTokenizerBase,
        vocab_size: int | None = None,
        apply_chat_template: bool = False,
        date: datetime | None = None,
        bounded: bool = False,
    ) -> None:
        """Prepare encoding; the tokenizer must have an EOS. ``vocab_size`` (None if unknown) limits the token ids.

        ``date`` is the time that a chat template writes with strftime_now; None for now. ``bounded``: each row is rendered
        with limits, and not only the first ones.
        """
        if tokenizer.eos_token_id is None:
            raise UserError("the tokenizer must have an EOS token, got none; set eos_token in tokenizer_config.json")
        self._tokenizer = tokenizer
        beyond = {} if vocab_size is None else tokenizer.get_vocab()
        self._beyond = {number: token for token, number in beyond.items() if number >= (vocab_size or 0)}
        self._image_ids = image_ids(Path(tokenizer.name_or_path)) if tokenizer.name_or_path else set()
        self._eos_id: int = tokenizer.eos_token_id
        self._eos = str(tokenizer.eos_token)
        self.apply_chat_template = apply_chat_template
        self.has_chat_template = tokenizer.chat_template is not None
        self._template = str(tokenizer.chat_template)
        self._date, self._bounded, self._has_limits = date or datetime.now(), bounded, bounded
        self._failed: LastRowError | None = None  # of this row, at a limit
        self._plans: dict[Hashable, Plan | LostTextError] = {}  # signature of rows -> how they are rendered
        self._dated: dict[str, str] = {}  # chat template -> the same with the date in it
        self._folder = Path(tokenizer.name_or_path)
        file = chat_template_file(self._folder) if tokenizer.name_or_path else None
        self._template_name = "the tokenizer's chat template" + (f" ({file})" if file else "")
        # End-of-turn tokens are often special tokens other than the EOS.
        added = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
        self._special_tokens = tuple(dict.fromkeys([*map(str, tokenizer.all_special_tokens), *added]))
        self._special_ids = set(tokenizer.convert_tokens_to_ids(list(self._special_tokens)))
        texts = {*self._special_tokens} - {BEGIN_OF_THOUGHTS, END_OF_THOUGHTS, ""}
        longest_first = sorted(texts, key=lambda text: (-len(text), text))
        self._special_text = re.compile("|".join(map(re.escape, longest_first)))
        stop_ids = self._declared_stop_ids() or self._special_ids
        is_stop = {text: tokenizer.convert_tokens_to_ids(text) in stop_ids for text in texts - {tokenizer.bos_token}}
        self._stops = [text for text in longest_first if is_stop.get(text)]
        with _panics_named(self._folder):
            adds_bos = tokenizer.bos_token_id is not None and tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]
        self.bos_id: int | None = tokenizer.bos_token_id if adds_bos else None
        # Forking after tokenising in threads is intended: the forked data loader workers never tokenise.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")

    def encode(self, records: Sequence[KTORecord]) -> list[EncodedExample | RowError]:
        """Return the token ids of each record, or the error that makes the record unusable."""
        texts = self._texts([_as_messages(record) for record in records] if self.apply_chat_template else records)
        usable = [text for text in texts if isinstance(text, _Text)]
        prompts = self._ids([text.prompt for text in usable])
        wholes = self._ids([text.prompt + text.answer for text in usable])
        continued = [whole[: len(prompt)] == prompt for prompt, whole in zip(prompts, wholes, strict=True)]
        separate = iter(self._ids([text.answer for text, joined in zip(usable, continued, strict=True) if not joined]))
        examples = (
            self._finish(text, prompt, whole[len(prompt) :] if joined else next(separate))
            for text, prompt, whole, joined in zip(usable, prompts, wholes, continued, strict=True)
        )
        return [text if isinstance(text, RowError) else next(examples) for text in texts]

    def encode_prompts(self, records: Sequence[PromptRecord]) -> list[list[int] | RowError]:
        """Return the token ids of each prompt as inference renders it, or the error that makes it unusable."""
        examples = self.encode([_unanswered(record, as_messages=self.apply_chat_template) for record in records])
        return [example if isinstance(example, RowError) else example.prompt_ids for example in examples]

    def stop_ids(self) -> frozenset[int]:
        """Return the tokens that end an answer: the EOS, those that the model's files declare, and the template's.

        The template's are the special tokens after the text of an answer.
        """
        turn: list[Message] = [{"role": "user", "content": "?"}]
        answered = KTORecord(prompt=turn, response=[{"role": "assistant", "content": "!"}], desirable=True, line=1)
        ids = {self._eos_id, *self._declared_stop_ids()}
        for example in self.encode([answered] if self.has_chat_template else []):
            for number in reversed(example.response_ids if isinstance(example, EncodedExample) else []):
                if number in self._special_ids:
                    ids.add(number)
                elif self._tokenizer.decode([number]).strip():
                    break
        return frozenset(ids)

    def _declared_stop_ids(self) -> set[int]:
        return declared_stop_ids(self._folder) if self._tokenizer.name_or_path else set()

    def fingerprint(self) -> str:
        """Return a hash of all tokenizer properties that determine the token ids of an example."""
        tokenizer = self._tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is not None:
            content = json.loads(backend.to_str())
            for setting in ("truncation", "padding"):  # remain from the last call of the tokenizer
                content.pop(setting, None)
        else:
            content = sorted(tokenizer.get_vocab().items())
        parts = [type(tokenizer).__name__, content, tokenizer.chat_template, self.bos_id, self._eos_id]
        parts += [tokenizer.special_tokens_map, sorted(self._special_tokens), self._stops, *sorted(self._beyond)]
        if self.apply_chat_template:  # otherwise the hash is the one from before this setting was introduced
            parts.append("apply_chat_template")
        if "strftime_now" in self._template:
            parts.append(self._date.strftime("%Y-%m-%d"))
        return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()

    def is_untemplated(self, prompt_ids: Sequence[int]) -> bool:
        """Return whether a prompt of plain text lacks the chat template of the tokenizer.

        A prompt with a special token other than a leading BOS was rendered by a chat template before.
        """
        text_ids = prompt_ids[1:] if prompt_ids[:1] == [self.bos_id] else prompt_ids
        return self.has_chat_template and not self.apply_chat_template and self._special_ids.isdisjoint(text_ids)

    def _ids(self, texts: list[str]) -> list[list[int]]:
        if not texts:
            return []
        with _panics_named(self._folder):
            encoded = self._tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)
        return encoded["input_ids"]

    def _texts(self, records: Sequence[KTORecord]) -> list[_Text | RowError]:
        """Return the texts of each record; a LastRowError for the first row at a limit and all rows of messages after it.

        The first rows of messages of a process are rendered with limits.
        """
        texts: list[_Text | RowError] = []
        last, self._failed = None, None
        is_tried, tried = self._template in _tried_templates, 0
        for record in records:
            text: _Text | RowError
            if isinstance(record.prompt, str) and isinstance(record.response, str):
                has_eos = self._eos in record.response.rstrip().removesuffix(self._eos)
                text = _Text(record.prompt, record.response, templated=False, has_special_tokens=has_eos)
            elif last is not None:
                text = last
            else:
                self._has_limits = self._bounded or (not is_tried and tried < _TRIAL_ROWS)
                tried += self._has_limits
                text = self._render_row(record)
                last = text if isinstance(text, LastRowError) else None
            texts.append(text)
        if tried and not self._bounded:
            renderer.close()
            _tried_templates.update({self._template} if last is None else ())
        return texts

    def _render_row(self, record: KTORecord) -> _Text | RowError:
        assert isinstance(record.prompt, list)
        assert isinstance(record.response, list)
        messages, response = ([_without_ids(each) for each in part] for part in (record.prompt, record.response))
        plan = self._plan(messages, response, record.template)
        if isinstance(plan, LostTextError):
            return plan
        variables = {**record.template, **plan.variables}
        try:
            prompt = self._render(messages, variables, add_generation_prompt=True)
            if not record.response:
                return _Text(prompt, "", templated=True)
            answered = in_form(response[0], plan.form)
            whole, answer = continue_prompt(self._render, messages, answered, variables, shown=prompt)
        except RowError as error:
            return error
        if answer is None:
            remedy = f"leave out {_THINKING}, or {REMEDY}" if _THINKING in record.template else REMEDY
            return LostTextError(
                f"the chat template must render the prompt the same with and without the answer after it, got "
                f"{prompt[-60:]!r} without and {whole[: len(prompt)][-60:]!r} with it; {remedy}; or {DROP_REMEDY}"
            )
        answer = answer.replace(NO_THOUGHTS, "")
        if answer.rstrip().endswith(self._special_tokens):
            answer = answer.rstrip()
        elif plan.end:
            answer = answer.rstrip() + plan.end
        is_empty = not is_empty_answer(record.response) and not self._special_text.sub("", answer).strip()
        found, drawn = self._has_special_tokens([*messages, *response]), record.response[0].get(TOKEN_IDS, ())
        return _Text(prompt, answer, templated=True, drawn=drawn, is_empty=is_empty, has_special_tokens=found)

    def _has_special_tokens(self, messages: Sequence[Message]) -> bool:
        values = (value for message in messages for value in message.values() if value)
        texts = (value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str) for value in values)
        return any(self._special_text.search(text) for text in texts)

    def _plan(self, prompt: list[Message], response: list[Message], variables: Mapping[str, Any]) -> Plan | LostTextError:
        """Return how rows of this shape are rendered; found for the first of them that the template does not refuse."""
        messages, is_answered = [*prompt, *response], bool(response)
        shape = signature(messages, variables, is_answered=is_answered)
        if shape not in self._plans:
            found = None
            with contextlib.suppress(ValueError):  # no template: the rendering names the reason
                found = find_plan(
                    self._render,
                    messages,
                    variables,
                    is_answered=is_answered,
                    template=self._dated_template(variables),
                    special=self._special_tokens,
                    stops=self._stops,
                )
            if found is None or self._failed is not None:
                return Plan()
            self._plans[shape] = found
        return self._plans[shape]

    def _dated_template(self, variables: Mapping[str, Any]) -> str:
        """Return the chat template with the date in the place of the function that writes the current one."""
        template = self._tokenizer.get_chat_template(tools=variables.get("tools"))
        if template not in self._dated:
            self._dated[template] = _NOW.sub(lambda match: json.dumps(self._date.strftime(match[2])), template)
        return self._dated[template]

    def _render(self, messages: Sequence[Message], variables: Mapping[str, Any], *, add_generation_prompt: bool) -> str:
        if self._failed is not None:
            raise self._failed
        try:
            template, how = self._dated_template(variables), {"add_generation_prompt": add_generation_prompt}
            if self._has_limits:
                given = {**self._tokenizer.special_tokens_map, **variables}
                rendered: Any = render_bounded(template, messages, given, **how)
            else:
                given = {"tokenize": False, "chat_template": template, **how, **variables}
                rendered = self._tokenizer.apply_chat_template(in_form_of(template, messages), **given)
            if len(rendered) > MAX_CHARACTERS:
                raise LimitError(f" as at most {MAX_CHARACTERS:,} characters, got more")
        except (LimitError, MemoryError) as error:
            self._failed = LastRowError(f"{self._template_name} must render a row{error or ' with less memory'}; {REMEDY}")
            raise self._failed from error
        except Exception as error:  # a template is a program and may raise any exception
            message = f"the tokenizer's chat template refuses the messages: {printable(str(error))}"
            raise RowError(f"{message}; {REMEDY}") from error
        if not isinstance(rendered, str) or not rendered.strip():
            raise RowError("the tokenizer's chat template must produce text, got none; correct the template")
        return rendered

    def _as_drawn(self, answer: list[int], drawn: Any) -> list[int]:
        """Return an answer with the tokens that were drawn, if they have its text, apart from white space around it."""
        size = len(self._tokenizer)
        if not drawn or not isinstance(drawn, list) or not all(type(each) is int and 0 <= each < size for each in drawn):
            return answer
        decode = partial(self._tokenizer.decode, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        text = str(decode(drawn)).strip()
        for end in range(len(answer), max(len(answer) - _MAX_END, 0) - 1, -1):
            if str(decode(answer[:end])).strip() == text:
                return [*drawn, *answer[end:]]
        return answer

    def _finish(self, text: _Text, prompt: list[int], answer: list[int]) -> EncodedExample | RowError:
        answer = self._as_drawn(answer, text.drawn)
        if text.templated:
            ended = bool(answer) and answer[-1] in self._special_ids
        else:
            ended = answer[-1:] == [self._eos_id]
            if self.bos_id is not None and prompt[:1] != [self.bos_id]:
                prompt = [self.bos_id, *prompt]
        if not prompt:
            return RowError(
                f"the prompt must have at least one token, got {text.prompt!r}, and this tokenizer adds no BOS; "
                "give the row a prompt or remove it"
            )
        if unknown := self._beyond.keys() & {*prompt, *answer}:
            token = f"{show(self._beyond[min(unknown)])} with id {min(unknown)}"
            return RowError(
                f"each token must be in the model's vocabulary, got {token} beyond its vocab_size; remove it from the row, "
                "or use the model's own tokenizer"
            )
        if images := self._image_ids & {*prompt, *answer}:
            token = show(self._tokenizer.convert_ids_to_tokens(min(images)))
            return RowError(
                f"each token must be of text, got {token}, which stands for an image or a sound; leave such rows out"
            )
        response = answer if ended else [*answer, self._eos_id]
        counted = {"is_empty": text.is_empty, "has_special_tokens": text.has_special_tokens}
        return EncodedExample(prompt_ids=prompt, response_ids=response, **counted)


def _without_ids(message: Message) -> Message:
    return {name: value for name, value in message.items() if name != TOKEN_IDS}


def _unanswered(record: PromptRecord, *, as_messages: bool) -> KTORecord:
    """Return a prompt with no answer, or, if it is a text, with one that does not change its tokens."""
    prompt = record.prompt
    if isinstance(prompt, str) and as_messages:
        prompt = [{"role": "user", "content": prompt}]
    response: TextOrMessages = "!" if isinstance(prompt, str) else []
    return KTORecord(prompt=prompt, response=response, desirable=True, line=record.line, template=record.template)


def _as_messages(record: KTORecord) -> KTORecord:
    """Return a record of strings as one user message and the assistant message that answers it; others unchanged."""
    if not (isinstance(record.prompt, str) and isinstance(record.response, str)):
        return record
    response: list[Message] = [{"role": "assistant", "content": record.response}]
    return replace(record, prompt=[{"role": "user", "content": record.prompt}], response=response)
