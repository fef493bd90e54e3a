"""Translation of the configuration keys of other trainers.

Keys of NeMo-Aligner's configuration files that this package does not have are accepted (nemo_aligner.yaml), so that these
files run unchanged. Names from TRL, Hugging Face, Megatron-LM and NeMo-RL are errors that name our key in
other_trainers.yaml. The tables are read when the first unknown key is found.
"""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Container, Iterator, Mapping, Sequence
from functools import cache
from importlib import resources
from typing import Any, NamedTuple

import yaml

from nemo_kto.algorithms.recipes import Recipe
from nemo_kto.errors import ConfigError, either
from nemo_kto.utils.fields import echo

_PLUS = re.compile(r"\+(?=[A-Za-z]\w*\.[\w.]+=)")  # the plus of +KEY=VALUE; config groups, as in +hardware=cpu, have no dot


@cache
def read_table(name: str, package: str = __package__) -> dict[str, Any]:
    """Return the content of a YAML file of a package."""
    text = (resources.files(package) / f"{name}.yaml").read_text(encoding="utf-8")
    return dict(yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)))  # nosec B506  # both are safe


class AlignerKey(NamedTuple):
    """A key or section that only NeMo-Aligner has; nemo_aligner.yaml describes the attributes."""

    key: str
    why: str
    agrees: Sequence[object] = ()
    same_as: str | None = None
    ignored: bool = False


@cache
def aligner_keys(algorithm: str = "NAME") -> Mapping[str, AlignerKey]:
    """Return all keys that only NeMo-Aligner has; ``algorithm`` replaces NAME in the values."""
    found = {}
    for key, entry in read_table("nemo_aligner").items():
        texts = {name: text.replace("NAME", algorithm) for name, text in entry.items() if name in ("why", "same_as")}
        found[key] = AlignerKey(key, **{**entry, **texts})
    return found


def aligner_key(key: str, algorithm: str = "NAME") -> AlignerKey | None:
    """Return the entry for a key that only NeMo-Aligner has, or for the section that contains it."""
    entries, sections = aligner_keys(algorithm), itertools.accumulate(key.split("."), "{}.{}".format)
    return next((entries[name] for name in sections if name in entries), None)


def forced(override: str) -> str:
    """Return an override with two plus signs if Hydra would otherwise reject it.

    These are keys of NeMo-Aligner that our files lack, and +KEY=VALUE for keys that only our files have.
    """
    if aligner_key(override.lstrip("+").partition("=")[0]) is not None:
        return f"++{override.lstrip('+')}"
    return _PLUS.sub("++", override, count=1)


def judge(values: Mapping[str, object], known: Container[str], algorithm: str) -> Iterator[ConfigError | str]:
    """Yield errors in the keys of NeMo-Aligner in ``values``, and notes on keys without effect; ``known``: our keys."""
    for key, value in values.items():
        entry = None if key in known else aligner_key(key, algorithm)
        if entry is None or value in entry.agrees or (entry.same_as is not None and value == values.get(entry.same_as)):
            continue
        if entry.ignored:
            yield f"{key} has no effect: {entry.why}"
        elif entry.same_as is not None:
            other = f"{entry.same_as} = {echo(values.get(entry.same_as))}"
            yield ConfigError(key, f"must be the same as {other}, got {echo(value)}; {entry.why}", (entry.same_as,))
        else:
            yield ConfigError(key, f"must be {either(list(map(echo, entry.agrees)))}, got {echo(value)}; {entry.why}")


def aliases() -> dict[str, str]:
    """Return name in another trainer -> our key, with NAME for the algorithm; a hint about the value may follow a space."""
    return dict(read_table("other_trainers")["aliases"])


def without() -> dict[str, str]:
    """Return names in other trainers without an equivalent in this package, each with the reason."""
    return dict(read_table("other_trainers")["without"])


def unknown_key(key: str, got: str, known: Sequence[str], recipe: Recipe) -> ConfigError:
    """Return the error for an unknown key; the remedy is our key for a name of another trainer, or a similar key.

    In ``key``, sections may be missing or wrong, and hyphens stand for underscores. ``got`` is the key with its value, as
    given; ``known`` contains our keys and sections.
    """
    name, known = key.lstrip("-").replace("-", "_"), [each for each in known if not key.startswith(f"{each}.")]
    last, section = name.rpartition(".")[2], f"model.{recipe.name}"
    is_option = key.rpartition(".")[0] == section  # of a loss
    ours = {alias: text.replace("NAME", recipe.name) for alias, text in aliases().items()} | dict(recipe.aliases)
    ours = {alias: text for alias, text in ours.items() if text.partition(" ")[0] in known}
    alias = next((each for each in (name, last) if each in ours or each in without()), None)
    if alias is not None:
        remedy = f"use {ours[alias]}" if alias in ours else f"it has no equivalent: {without()[alias]}"
    elif (nearest := _nearest(name, last, known)) is not None:
        remedy = f"did you mean {nearest}?"
    elif similar := difflib.get_close_matches(last, [each for each in ours if len(each) > 5], n=1, cutoff=0.85):
        remedy = f"for {similar[0]}, use {ours[similar[0]]}"
    else:
        remedy = f"`nemo-kto {recipe.name} --help` lists all keys"
    if is_option and got.startswith(key) and alias is None:
        remedy += f" (options of a user-defined loss begin with a plus: +{got})"
    reads = (f"{section}.preference_loss",) if is_option else ()
    return ConfigError(key, f"is not a key of the configuration, got {got}; {remedy}", reads)


def _nearest(name: str, last: str, known: Sequence[str]) -> str | None:
    """Return the known key with the same last component in another section, or with similar spelling."""
    elsewhere = [each for each in known if each.rsplit(".", 1)[-1] == last and each != name]
    if elsewhere:
        return max(elsewhere, key=lambda each: difflib.SequenceMatcher(None, name, each).ratio())
    if close := difflib.get_close_matches(name, known, n=1, cutoff=0.8):
        return close[0]
    by_last = {each.rsplit(".", 1)[-1]: each for each in reversed(known)}
    close = difflib.get_close_matches(last, list(by_last), n=1, cutoff=0.75)
    return by_last[close[0]] if close else None
