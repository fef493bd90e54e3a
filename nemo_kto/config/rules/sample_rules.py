"""Rules for the samples that a run takes at its validations."""

from __future__ import annotations

from collections.abc import Iterator

from nemo_kto.artifacts.tokenizer_files import has_chat_template
from nemo_kto.config.resolved import ResolvedRun
from nemo_kto.config.rules.validation_rules import needs_validation
from nemo_kto.data.rows.reader import read_prompts
from nemo_kto.data.rows.records import DataError
from nemo_kto.errors import ConfigError, UserError

Errors = Iterator[ConfigError]
_SAMPLES, _MODEL = "exp_manager.samples", "pretrained_checkpoint.restore_from_path"


def sample_rules(run: ResolvedRun) -> Errors:
    """Check the settings of the samples, the file of their prompts, and that the run will have validations."""
    samples, length = run.cfg.exp_manager.samples, run.cfg.seq_length
    if not samples.enabled:
        return
    if samples.max_new_tokens >= length:
        text = f"must leave room for a prompt in model.data.seq_length={length}, got {samples.max_new_tokens}; lower it"
        yield ConfigError(f"{_SAMPLES}.max_new_tokens", text, ("model.data.seq_length", _MODEL))
    for name, given, everything in (("top_p", samples.top_p, 1.0), ("top_k", samples.top_k, 0)):
        if samples.temperature == 0 and given != everything:
            text = f"must be {everything} with temperature=0.0, which does not draw, got {given}"
            yield ConfigError(f"{_SAMPLES}.{name}", f"{text}; set {_SAMPLES}.temperature=1.0", (f"{_SAMPLES}.temperature",))
    if samples.prompts is not None:
        yield from _file_rules(run, samples.prompts)
    loop, section = run.cfg.loop, f"trainer.{run.cfg.recipe.name}"
    wanted = {
        f"{section}.val_check_interval": (loop.val_check_interval, loop.val_check_interval > 0, "be above 0"),
        f"{section}.limit_val_batches": (loop.limit_val_batches, loop.limit_val_batches > 0, "be above 0"),
    }
    key, value, instead = "count", str(samples.count), "0"
    if samples.prompts is not None:
        key, value, instead = "prompts", samples.prompts, "null"
    yield from needs_validation(run, wanted, key=f"{_SAMPLES}.{key}", value=value, instead=instead)


def _file_rules(run: ResolvedRun, file: str) -> Errors:
    """Check that the prompts of a file can be read, and that the tokenizer can render those that are messages."""
    key, folder = f"{_SAMPLES}.prompts", run.files.hf_folder
    try:
        records = read_prompts(file, run.cfg.model.data.json_columns)
        if any(isinstance(record.prompt, list) for record in records) and not has_chat_template(folder):
            text = f"must contain plain strings for a tokenizer without a chat template, got messages in {file}"
            remedy = f"add chat_template.jinja to {folder}, or write the prompts as strings"
            yield ConfigError(key, f"{text}; {remedy}", (_MODEL,), about_files=True)
    except DataError as error:
        yield ConfigError(key, f"cannot be used: {error}", about_files=True)
    except UserError:
        return  # reported by the check of the tokenizer
