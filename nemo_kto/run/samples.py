"""Texts of a run: prompts, answers of the model that is being trained, and held-out rows with the most extreme rewards."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from nemo_kto.algorithms.callbacks import SampleCallback
from nemo_kto.algorithms.duration import interval_steps
from nemo_kto.config.resolved import ResolvedRun
from nemo_kto.config.schema import RunConfig
from nemo_kto.data.batches.dataset import SplitCounts
from nemo_kto.data.batches.loader import gathered_examples
from nemo_kto.data.batches.splits import Splits
from nemo_kto.data.rows.reader import RowErrors, read_prompts
from nemo_kto.data.rows.records import DataError, PromptRecord, RowError
from nemo_kto.data.tokens.chat_template import RecordEncoder
from nemo_kto.data.tokens.drawn import drawn_text
from nemo_kto.distributed import state
from nemo_kto.errors import UserError, plural
from nemo_kto.losses.metrics import Rewards
from nemo_kto.models.engine.engine import LogProbEngine
from nemo_kto.models.engine.generation import Decoding, generate
from nemo_kto.models.flops import ModelFlops, Passes
from nemo_kto.run.data import RunData, collate_settings, model_vocab_size
from nemo_kto.telemetry.evaluations import SAMPLES_FILE, ExtremeRow, Model, Sample, read_samples
from nemo_kto.telemetry.watch import RunTimer

_COUNT_AT_ENDS, _MAX_TOKENS_AT_ENDS = 2, 32  # of the samples that every run has
_MAX_ROWS_AT_ENDS = 1000  # in which their prompts are searched
_EXTREMES = 3  # rows at each end of a validation set
_PROMPTS, _MAX_NEW_TOKENS = "exp_manager.samples.prompts", "exp_manager.samples.max_new_tokens"


class Prompt(NamedTuple):
    """Prompt of a sample."""

    ids: list[int]
    text: str  # as the model gets it, or the last message of the user
    messages: list[Mapping[str, Any]] | None  # None for a prompt that was not read as messages


class SamplePrompts(NamedTuple):
    """Prompts that the model answers, and the decoding of the answers."""

    prompts: list[Prompt]
    decoding: Decoding


def build_prompts(
    run: ResolvedRun, tokenizer: PreTrainedTokenizerBase, splits: Splits[Any], *, date: datetime
) -> SamplePrompts | None:
    """Return the prompts of the samples, from the validation rows and from the file; None without samples. Collective.

    Raises UserError if a prompt cannot be used, or has too many tokens for the configured length of the answers.
    """
    cfg, settings = run.cfg, run.cfg.exp_manager.samples
    if not settings.enabled or (settings.only_at_ends and not tokenizer.chat_template):
        return None

    def build() -> SamplePrompts | None:
        encoder = RecordEncoder(
            tokenizer=tokenizer,
            vocab_size=model_vocab_size(run.files),
            apply_chat_template=cfg.model.data.apply_chat_template,
            date=date,
        )
        sets = [*splits.validation.values()]
        if settings.only_at_ends:
            sets = [examples for examples in (*sets, splits.train) if examples is not None][:1]
        found = [Prompt(ids, tokenizer.decode(ids), None) for examples in sets for ids in _of_examples(cfg, examples)]
        if settings.prompts is not None:
            found += _of_file(cfg, Path(settings.prompts), encoder)
        decoding = Decoding(
            stop_ids=encoder.stop_ids(),
            max_new_tokens=_max_new_tokens(cfg),
            seq_length=cfg.seq_length,
            temperature=settings.temperature,
            top_p=settings.top_p,
            top_k=settings.top_k,
            seed=settings.seed,
        )
        return SamplePrompts(found, decoding) if found else None

    return state.from_rank_zero(build, doing="reading the prompts of the samples")


def _of_examples(cfg: RunConfig, examples: Any) -> list[list[int]]:
    """Return the first ``count`` distinct prompts of a validation set that leave room for an answer."""
    settings, room = cfg.exp_manager.samples, _room(cfg)
    count = _COUNT_AT_ENDS if settings.only_at_ends else settings.count or 0
    found = dict[tuple[int, ...], None]()
    rows = min(len(examples), _MAX_ROWS_AT_ENDS) if settings.only_at_ends else len(examples)
    for place in range(rows if count else 0):
        ids = tuple(map(int, examples[place].prompt_ids))
        if len(ids) <= room:
            found[ids] = None
        if len(found) == count:
            break
    if count and not found and not settings.only_at_ends:
        text = f"must leave room for the prompt of a validation row, got {settings.max_new_tokens}"
        raise UserError(f"{_MAX_NEW_TOKENS} {text} of model.data.seq_length={cfg.seq_length}; lower it")
    return [list(ids) for ids in found]


def _of_file(cfg: RunConfig, file: Path, encoder: RecordEncoder) -> Iterator[Prompt]:
    """Yield the prompts of a file; UserError if any of them cannot be used."""
    broken, room = RowErrors(), _room(cfg)
    try:
        records = read_prompts(file, cfg.model.data.json_columns)
        encoded = encoder.encode_prompts(records)
        for record, ids in zip(records, encoded, strict=True):
            if isinstance(ids, RowError):
                broken.add(file, record.line, str(ids))
            elif len(ids) > room:
                text = f"a prompt must have at most model.data.seq_length - {_MAX_NEW_TOKENS} = {room} tokens"
                broken.add(file, record.line, f"{text}, got {len(ids)}; shorten it, or allow fewer new tokens")
        broken.raise_if_any()
    except DataError as error:
        raise UserError(f"{_PROMPTS} cannot be used: {error}") from error
    yield from (_prompt(record, ids) for record, ids in zip(records, encoded, strict=True) if isinstance(ids, list))


def _prompt(record: PromptRecord, ids: list[int]) -> Prompt:
    if isinstance(record.prompt, str):
        return Prompt(ids, record.prompt, None)
    of_user = [message for message in record.prompt if message["role"] == "user"] or record.prompt
    return Prompt(ids, str(of_user[-1].get("content")), list(record.prompt))


def _room(cfg: RunConfig) -> int:
    """Return the maximum number of tokens of a prompt."""
    return cfg.seq_length - _max_new_tokens(cfg)


def _max_new_tokens(cfg: RunConfig) -> int:
    samples = cfg.exp_manager.samples
    return min(samples.max_new_tokens, _MAX_TOKENS_AT_ENDS) if samples.only_at_ends else samples.max_new_tokens


@dataclass(kw_only=True, eq=False)
class Sampler:
    """Generates answers to the prompts of the samples with the model's current weights."""

    engine: LogProbEngine
    tokenizer: PreTrainedTokenizerBase
    samples: SamplePrompts
    collate: dict[str, Any]  # of ``generate``
    must_stop: Callable[[], bool]  # equal on all ranks
    starts_as: Model  # the model that answers before training
    is_policy: bool  # this model has the weights with which the policy starts
    recorded: Collection[int] = ()  # a resumed run: steps whose answers are in its folder; 0 is before training
    only_at_ends: bool = False  # before the first and after the last step, not at validations
    initial: list[Sample] = field(default_factory=list)  # those of :meth:`before_training`

    def before_training(self) -> None:
        """Generate the answers from before the first step, unless the run folder has them. Collective."""
        if 0 not in self.recorded:
            self.initial = self.answers(0, self.starts_as)

    def answers(self, step: int, model: Model = "policy") -> list[Sample]:
        """Return the answers to all prompts after a step; none if the run must stop. Collective."""
        prompts, decoding = self.samples
        ids = [prompt.ids for prompt in prompts]
        generated = generate(self.engine, ids, decoding, collate=self.collate, must_stop=self.must_stop)
        if generated is None:
            return []
        return [
            Sample(
                step=step,
                model=model,
                index=index,
                prompt=prompt.text,
                messages=prompt.messages,
                answer=drawn_text(self.tokenizer, tokens, decoding.stop_ids, before=prompt.ids),
                tokens=len(tokens),
                ended=tokens[-1] in decoding.stop_ids,
            )
            for index, (prompt, tokens) in enumerate(zip(prompts, generated, strict=True))
        ]

    def callback(self, *, record: Callable[[Sequence[Sample], int], None]) -> SampleCallback:
        """Return the callback that takes the samples, and records those from before the first step."""
        return SampleCallback(
            answer=self.answers,
            record=record,
            initial=self.initial,
            starts_as_policy=self.is_policy,
            only_at_ends=self.only_at_ends,
            recorded=self.recorded,
        )


def build_sampler(
    run: ResolvedRun,
    engine: LogProbEngine,
    *,
    tokenizer: PreTrainedTokenizerBase,
    samples: SamplePrompts | None,
    run_timer: RunTimer,
    resumed_step: int | None,
) -> Sampler | None:
    """Build the sampler of a run; None without samples. Collective."""
    if samples is None:
        return None

    def recorded() -> set[int]:
        steps = {sample.step for sample in read_samples(run.folder / SAMPLES_FILE)}
        return set() if resumed_step is None else {step for step in steps if step <= resumed_step}

    return Sampler(
        engine=engine,
        tokenizer=tokenizer,
        samples=samples,
        collate=collate_settings(run.cfg, tokenizer, multiple=engine.limits.multiple),
        must_stop=lambda: run_timer.stop_reason() is not None,
        only_at_ends=run.cfg.exp_manager.samples.only_at_ends,
        starts_as="policy" if run.reference.name == "none" else "reference",
        is_policy=run.reference_model is None,
        recorded=state.from_rank_zero(recorded, doing="reading the samples"),
    )


def extreme_rows(run: ResolvedRun, data: RunData, set_name: str, rewards: Rewards, step: int) -> list[ExtremeRow]:
    """Return the held-out rows whose rewards agree least and most with their labels, the most extreme first."""
    dataset, of_class = data.splits.validation[set_name], {name: each.tolist() for name, each in rewards.by_class.items()}
    better, worse = of_class
    total = len(of_class[better]) if rewards.paired else len(of_class[better]) + len(of_class[worse])
    gathered = gathered_examples(data.validation[set_name], total)
    order, examples = [*gathered], [*gathered.values()]
    following = {name: iter(rewards_of) for name, rewards_of in of_class.items()}
    agreement = [sum(next(following[name]) * (1 if name == better else -1) for name in each.answers) for each in examples]
    ranked = sorted((k for k in range(total) if math.isfinite(agreement[k])), key=lambda k: (agreement[k], order[k]))
    shown = min(_EXTREMES, len(ranked) // 2)

    def extreme(k: int, *, best: bool) -> ExtremeRow:
        answers = examples[k].answers
        return ExtremeRow(
            step=step,
            set=set_name,
            best=best,
            row=dataset.names([order[k]])[0],
            reward=agreement[k] if better in answers else -agreement[k],
            prompt=data.tokenizer.decode(examples[k].prompt_ids),
            answers={name: _row_text(data.tokenizer, tokens, examples[k].prompt_ids) for name, tokens in answers.items()},
        )

    return [extreme(k, best=False) for k in ranked[:shown]] + [extreme(k, best=True) for k in ranked[::-1][:shown]]


def _row_text(tokenizer: PreTrainedTokenizerBase, ids: Iterable[int], prompt_ids: Iterable[int]) -> str:
    """Return the text of a row's answer without the special tokens at its end."""
    special, kept = set(tokenizer.all_special_ids), [*map(int, ids)]
    while kept and kept[-1] in special:
        kept.pop()
    return drawn_text(tokenizer, kept, (), before=[*map(int, prompt_ids)])


def samples_text(run: ResolvedRun, samples: SamplePrompts, splits: Splits[Any]) -> str:
    """Describe the samples, and their work compared with the training between two validations."""
    (prompts, decoding), share = samples, _relative_work(run, samples, splits.in_use["train"].counts)
    top_k = f", top_k {decoding.top_k}" if decoding.top_k else ""
    drawn = f"temperature {decoding.temperature:g}, top_p {decoding.top_p:g}{top_k}" if decoding.temperature else "greedy"
    work = "less than 1%" if share < 0.01 else f"at most {share:.0%}"
    text = f"{plural(len(prompts), 'prompt')}, up to {plural(decoding.max_new_tokens, 'token')} each, {drawn}"
    if run.cfg.exp_manager.samples.only_at_ends:
        return f"{text}, before the first and after the last step; {work} more work"
    return f"{text}; {work} more work (timing/samples)"


def _relative_work(run: ResolvedRun, samples: SamplePrompts, train: SplitCounts) -> float:
    """Return the FLOPs of the linear layers for answers of maximum length, relative to those between two validations."""
    flops, (forward, disabled) = ModelFlops.of_model(run.architecture, adapters=run.adapters), run.reference_passes
    example = flops.of_passes(Passes(forward + 1, disabled, backward=1)).per_token
    if run.cfg.loss.definition.needs_z0:
        example += flops.of_passes(Passes(forward + 1, disabled)).per_token  # of the KL example
    batch_size, new = run.cfg.model.global_batch_size, samples.decoding.max_new_tokens
    batches = train.rows // batch_size
    only_at_ends = run.cfg.exp_manager.samples.only_at_ends
    steps = 0 if only_at_ends else interval_steps(run.length.val_check_interval, run.length.steps_per_epoch(batches))
    training = example * train.tokens / train.rows * batch_size * (steps or run.length.total_steps(batches))
    tokens = sum(len(prompt.ids) * new + new * (new + 1) // 2 for prompt in samples.prompts)
    output = flops.forward.per_response_token * new * len(samples.prompts)
    return (flops.forward.per_token * tokens + output) / training
