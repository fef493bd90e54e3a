"""Translation of the configuration keys of other trainers.

Keys of NeMo-Aligner's configuration files that this package does not have are accepted, so that these files run unchanged
(:data:`ALIGNER`). Names from TRL, Hugging Face, Megatron-LM and NeMo-RL are errors that name our key (:data:`ALIASES`).

`python -m nemo_kto.config.migration > docs/migration.md` writes the page; a test compares the page with the tables.
"""

from __future__ import annotations

import difflib
import functools
import itertools
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from nemo_kto.algorithms.recipes import RECIPES, Recipe
from nemo_kto.config.migration_tables import ALIASES, ALIGNER, WITHOUT, AlignerKey
from nemo_kto.errors import ConfigError, either

_PLUS = re.compile(r"\+(?=[A-Za-z]\w*\.[\w.]+=)")  # the plus of +KEY=VALUE; config groups, as in +hardware=cpu, have no dot


def aligner_key(key: str, algorithm: str) -> AlignerKey | None:
    """Return the entry for a key that only NeMo-Aligner has, or for the section that contains it; otherwise None."""
    entries, sections = _aligner_keys(algorithm), itertools.accumulate(key.split("."), "{}.{}".format)
    return next((entries[name] for name in sections if name in entries), None)


@functools.cache
def _aligner_keys(algorithm: str) -> dict[str, AlignerKey]:
    return {entry.key: entry for entry in (each.of(algorithm) for each in ALIGNER)}


def forced(override: str, algorithms: Sequence[str]) -> str:
    """Return an override with two plus signs if Hydra would otherwise reject it.

    This applies to keys of NeMo-Aligner that our files lack, and to +KEY=VALUE, which users of NeMo-Aligner write for keys
    that its files lack and ours have.
    """
    key = override.lstrip("+").partition("=")[0]
    if any(aligner_key(key, algorithm) is not None for algorithm in algorithms):
        return f"++{override.lstrip('+')}"
    return _PLUS.sub("++", override, count=1) if _PLUS.match(override) else override


class Verdict(NamedTuple):
    """Result of checking a key of NeMo-Aligner: an error, a note to print at the start of the run, or neither."""

    error: ConfigError | None = None
    note: str | None = None


def judge(values: Mapping[str, object], algorithm: str) -> Iterator[Verdict]:
    """Check each key of NeMo-Aligner in ``values`` (dotted name -> value)."""
    for key, value in values.items():
        entry = aligner_key(key, algorithm)
        if entry is not None:
            yield _judge(entry, key, value, values)


def _judge(entry: AlignerKey, key: str, value: object, values: Mapping[str, object]) -> Verdict:
    other = entry.same_as
    if value in entry.agrees or (other is not None and value == values.get(other)):
        return Verdict()
    if entry.ignored:
        return Verdict(note=f"{key} is not needed here: {entry.why}")
    if other is not None:
        text = f"must be the same as {other} = {_echo(values.get(other))}, got {_echo(value)}; {entry.why}"
        return Verdict(ConfigError(key, text, (other,)))
    return Verdict(
        ConfigError(key, f"must be {either([_echo(each) for each in entry.agrees])}, got {_echo(value)}; {entry.why}")
    )


def _echo(value: object) -> str:
    return {None: "null", True: "true", False: "false"}[value] if value is None or isinstance(value, bool) else str(value)


class Meant(NamedTuple):
    """The most likely meaning of an unknown key.

    Attributes:
        words: explanation, if the key is the name that another trainer uses.
        nearest: our key that is spelled most similarly.
    """

    words: str | None = None
    nearest: str | None = None


def meant(key: str, recipe: Recipe, known: Sequence[str]) -> Meant:
    """Find the meaning of an unknown key: first among the names of other trainers, then among keys with similar spelling.

    Args:
        key: the key as given; its sections may be missing or wrong, and hyphens stand for underscores.
        recipe: the algorithm.
        known: our keys.
    """
    name = key.lstrip("-").replace("-", "_")
    last = name.rpartition(".")[2]
    for candidate in (name, last):
        if (words := _in_words(candidate, recipe, known)) is not None:
            return Meant(words=f"is {words}")
        if candidate in WITHOUT:
            return Meant(words=f"has no key here: {WITHOUT[candidate]}")
    if (nearest := _nearest(name, last, known)) is not None:
        return Meant(nearest=nearest)
    for alias in difflib.get_close_matches(last, [alias for alias in ALIASES if len(alias) > 5], n=1, cutoff=0.85):
        if (words := _in_words(alias, recipe, known)) is not None:
            return Meant(words=f"is not a key, and {alias} is {words}")
    return Meant()


def _in_words(alias: str, recipe: Recipe, known: Sequence[str]) -> str | None:
    """Return our key for the name that another trainer uses, and a hint about its value; None if there is no such key."""
    name, _, hint = ({**ALIASES, **recipe.aliases}).get(alias, "").format(algorithm=recipe.name).partition(" ")
    return f"{name} here {hint}".rstrip() if name in known else None


def _nearest(name: str, last: str, known: Sequence[str]) -> str | None:
    """Return the known key with the same last component in another section, or with similar spelling; None if none."""
    elsewhere = [each for each in known if each.rsplit(".", 1)[-1] == last and each != name]
    if elsewhere:
        return max(elsewhere, key=lambda each: difflib.SequenceMatcher(None, name, each).ratio())
    if close := difflib.get_close_matches(name, known, n=1, cutoff=0.8):
        return close[0]
    by_last = {each.rsplit(".", 1)[-1]: each for each in reversed(known)}
    close = difflib.get_close_matches(last, list(by_last), n=1, cutoff=0.75)
    return by_last[close[0]] if close else None


_PAGE = """\
# Coming from NeMo-Aligner or TRL

Written by `python -m nemo_kto.config.migration` from the tables in `nemo_kto/config/migration_tables.py`; edit those.

## NeMo-Aligner

Configuration files of NeMo-Aligner run as they are, with a Hugging Face model in the place of the .nemo file:

    nemo-kto {first.name} --config-dir aligner/conf --config-name {first.config_name} \\
      pretrained_checkpoint.restore_from_path=MODEL model.data.data_prefix=DATA

Keys that the file lacks have our defaults. `null` counts as "not given" where a key cannot be null, as in
`exp_manager.exp_dir`. Where `model.encoder_seq_length` is read and not given (there it comes from the checkpoint), it is our
default of `model.data.seq_length`. `+KEY=VALUE` and `++KEY=VALUE` mean the same as `KEY=VALUE`. All names of its optimizers
mean AdamW, and a final stretch of `model.optim.sched.constant_steps` that a short run has no room for is left out with a
warning. Row formats and import paths are the same ([data.md](data.md)); rows may also be messages.

These keys have no meaning of their own here. A value of the second column is accepted silently. Where the third column says
so, any other value is accepted too, and one line at the start says why it is not needed; elsewhere it is an error.

| key | silently accepted | other values | why |
|---|---|---|---|
{aligner}

## TRL, Hugging Face, Megatron-LM, NeMo-RL

Their names are errors that name our key, in every section, with hyphens or underscores: `learning_rate=1e-6` gives
"learning_rate is model.optim.lr here". NAME stands for the algorithm.

| name there | key here |
|---|---|
{aliases}

### SFT terms of TRL

TRL's DPOTrainer (loss type `sft`, formerly `rpo_alpha`) and ORPOTrainer take one mean over the tokens of a batch on one
device. `model.dpo.sft_token_mean=true` is that mean over the tokens of the global batch. `sft_average_log_probs=true` is
the mean over responses of each one's own mean, and equals it only where all responses have the same length.

`preference_loss=orpo` is the loss of the paper, whose SFT term covers the response. ORPOTrainer's covers the prompt too:
[algorithms/orpo.md](algorithms/orpo.md#trls-form) has the options for it. ORPOTrainer also puts a BOS token before every
prompt.
"""


def as_markdown() -> str:
    """Return the page docs/migration.md."""
    own = [(alias, key) for recipe in RECIPES.values() for alias, key in recipe.aliases.items()]
    aliases = [f"| `{alias}` | {_as_code(key)} |" for alias, key in (*ALIASES.items(), *own)]
    aliases += [f"| `{name}` | none: {why} |" for name, why in WITHOUT.items()]
    first = next(iter(RECIPES.values()))
    return _PAGE.format(first=first, aligner="\n".join(map(_line, ALIGNER)), aliases="\n".join(aliases))


def _line(entry: AlignerKey) -> str:
    entry = entry.of("NAME")
    silent = [f"`{_echo(value)}`" for value in entry.agrees] + ([f"that of `{entry.same_as}`"] if entry.same_as else [])
    return f"| `{entry.key}` | {', '.join(silent) or 'none'} | {'one line' if entry.ignored else 'error'} | {entry.why} |"


def _as_code(target: str) -> str:
    name, _, hint = target.format(algorithm="NAME").partition(" ")
    return f"`{name}` {hint}".rstrip()


if __name__ == "__main__":
    sys.stdout.write(as_markdown())
