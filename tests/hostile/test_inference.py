"""Hostile models and adapters, opened by each command that opens one: status 2 and one error, and nothing is run or read."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import pytest

from nemo_kto.cli import job, main
from nemo_kto.data.tokens import rendering
from nemo_kto.tools.inference import opening
from tests.helpers.messages import Message
from tests.helpers.tiny_models import write_rows
from tests.hostile.folders import (
    Break,
    assert_harmless,
    both,
    config,
    content,
    fields,
    header,
    indexed,
    linked,
    removed,
    replaced_by_pipe,
    shapes,
)

WEIGHTS, TEMPLATE = "model.safetensors", "chat_template.jinja"
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
SETTINGS, NORM = "generation_config.json", "model.norm.weight"
PICKLE = b"\x80\x04cposix\nsystem\n(S'touch marker'\ntR."
RUN = "pretrained_checkpoint.restore_from_path=model model.data.data_prefix=rows.jsonl trainer.accelerator=cpu"
RUN += " model.data.seq_length=64 exp_manager.exp_dir=results"
LORA = f"{RUN} model.peft.peft_scheme=lora model.peft.restore_from_path=adapter"
SAMPLED = "prompts.txt --out out.jsonl -n 1 --max-new-tokens 2"
TRAIN = {"kto": f"kto {RUN}", "check": f"check kto {RUN}"}
PLAN = {"plan": f"plan kto {RUN}"}  # reads no weights
TRAIN_ADAPTERS = {"kto": f"kto {LORA}", "check": f"check kto {LORA}"}


def inference(folder: str) -> dict[str, str]:
    """Command lines that open a folder to draw answers."""
    return {
        "chat": f"chat {folder} -p hi",
        "chat --against": f"chat plain --against {folder} -p hi",
        "sample": f"sample {folder} {SAMPLED}",
        "compare MODEL": f"compare {folder} answers.jsonl {SAMPLED} --score scores.length",
        "compare BASE": f"compare answers.jsonl {folder} {SAMPLED} --score scores.length",
    }


REWARD = {"compare --reward-model": "compare answers.jsonl others.jsonl --out out.jsonl --reward-model model"}
CHAT, ADAPTED = inference("model"), inference("adapter")
CHAT_ONLY = {"chat": CHAT["chat"]}
AS_REWARD_MODEL = both(
    config(architectures=["LlamaForSequenceClassification"], num_labels=1), shapes({"score.weight": (1, 8)})
)
ENDLESS = b"{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
TIME = Message("chat template", "CPU time")


def moved_out(file: str, *, by: Break) -> Break:
    """A file in the folder above, which ``by`` refers to."""
    return both(lambda folder: (folder / file).rename(folder.parent / "secret.safetensors"), by)


# The damage, what the error names, and the command lines.
MODELS: dict[str, tuple[Break, Message, dict[str, str]]] = {
    "an index that leads out": (
        moved_out(WEIGHTS, by=indexed({"weight_map": {NORM: "../secret.safetensors"}})),
        Message("model", "../secret.safetensors", "outside", "copy"), TRAIN | CHAT | REWARD),
    "a link that leads out": (
        moved_out(WEIGHTS, by=linked(WEIGHTS, "../secret.safetensors", new=True)),
        Message(WEIGHTS, "link", "outside", "copy"), TRAIN | CHAT | REWARD),
    "a configuration that leads out": (
        moved_out("config.json", by=linked("config.json", "../secret.safetensors", new=True)),
        Message("config.json", "link", "outside", "copy"), CHAT | REWARD),
    "weights that are a pipe": (replaced_by_pipe(WEIGHTS), Message(WEIGHTS, "FIFO"), TRAIN | CHAT | REWARD),
    "weights that are a pickle": (
        both(removed(WEIGHTS), content("pytorch_model.bin", PICKLE)), Message("safetensors", "save_pretrained"),
        TRAIN | CHAT | REWARD),
    "a header that the library refuses": (
        header(lambda known: known.update(__metadata__={"a": 1})), Message(WEIGHTS, "metadata"), TRAIN | CHAT | REWARD),
    "adapters beside a whole model": (
        content(ADAPTER_CONFIG, b'{"base_model_name_or_path": "/nowhere"}'), Message("model", ADAPTER_CONFIG, "move"),
        TRAIN | CHAT | REWARD),
    "100,000 layers": (
        config(num_hidden_layers=100_000), Message("num_hidden_layers", "100000", "10000", "choose another model"),
        TRAIN | PLAN | CHAT | REWARD),
    "100,000 layers of a family that cannot be trained": (
        config(architectures=["StableLmForCausalLM"], model_type="stablelm", num_hidden_layers=100_000),
        Message("config.json", "CPU time", "download"), CHAT_ONLY),
    "10^9 labels": (
        both(AS_REWARD_MODEL, config(num_labels=10**9)), Message("config.json", "CPU time", "another model"), REWARD),
    "10^12 parameters": (
        config(architectures=["Other"], vocab_size=10**12), Message("config.json", "parameters", "download"), CHAT_ONLY),
    "an architecture that is a number": (
        config(architectures=[5]), Message("config.json", "architectures", "[5]", "choose another model"),
        TRAIN | PLAN | CHAT | REWARD),
    "a template without end": (content(TEMPLATE, ENDLESS), TIME, CHAT),
    "a template without end of a reward model": (both(AS_REWARD_MODEL, content(TEMPLATE, ENDLESS)), TIME, REWARD),
    "a template that needs all memory": (
        content(TEMPLATE, b"{{ 'a' * 10**10 }}"), Message("template", "1", "GiB", "memory"), CHAT_ONLY),
    "a template that writes nothing": (content(TEMPLATE, b"{{ '' }}"), Message("template", "text", "none"), CHAT_ONLY),
    "settings that lead out": (
        both(lambda folder: (folder.parent / "secret").write_text("{}"), linked(SETTINGS, "../secret", new=True)),
        Message(SETTINGS, "link", "outside"), CHAT_ONLY),
    **{
        f"{name} {value}": (
            content(SETTINGS, json.dumps({name: value}).encode()), Message(SETTINGS, f"{name} must be", str(value)),
            CHAT_ONLY)
        for name, value in (("top_k", -2), ("repetition_penalty", -1), ("repetition_penalty", float("nan")), ("top_p", 2.0),
                            ("typical_p", 0.0), ("suppress_tokens", [-1]), ("max_new_tokens", 0))
    },
}  # fmt: skip
ADAPTERS: dict[str, tuple[Break, Message, dict[str, str]]] = {
    "a link that leads out": (
        moved_out(ADAPTER_WEIGHTS, by=linked(ADAPTER_WEIGHTS, "../secret.safetensors", new=True)),
        Message(ADAPTER_WEIGHTS, "link", "outside"), TRAIN_ADAPTERS | ADAPTED),
    "weights that are a pipe": (
        replaced_by_pipe(ADAPTER_WEIGHTS), Message(ADAPTER_WEIGHTS, "FIFO"), TRAIN_ADAPTERS | ADAPTED),
    "weights that are a pickle": (
        both(removed(ADAPTER_WEIGHTS), content("adapter_model.bin", PICKLE)), Message(ADAPTER_WEIGHTS, "missing"),
        TRAIN_ADAPTERS | ADAPTED),
    **{
        f"{name} {value}": (
            fields(ADAPTER_CONFIG, **{name: value}), Message(f"{name} must be", str(value)), TRAIN_ADAPTERS | ADAPTED)
        for name, value in (("peft_type", "PROMPT_TUNING"), ("peft_type", ["LORA"]), ("r", "2"), ("target_modules", 5))
    },
    "rows of another size": (
        shapes({"base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": (2, 5)}, file=ADAPTER_WEIGHTS),
        Message("adapter", "peft", "mismatch for", "q_proj", "name the run"), ADAPTED),
    "weights of one layer": (
        shapes({"base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": None}, file=ADAPTER_WEIGHTS),
        Message("adapter", "must have all weights", "q_proj", "name the run"), ADAPTED),
    "a rank of 10^9": (
        fields(ADAPTER_CONFIG, r=10**9), Message(ADAPTER_CONFIG, "parameters", "bytes"), {"chat": ADAPTED["chat"]}),
    "modules by an endless expression": (
        fields(ADAPTER_CONFIG, target_modules="(([a-z_.0-9]+)+)+!"), Message(ADAPTER_CONFIG, "CPU time"),
        {"chat": ADAPTED["chat"]}),
}  # fmt: skip
TABLES = {"model": MODELS, "adapter": ADAPTERS}
TRIED = [(of, case, command) for of, table in TABLES.items() for case, row in table.items() for command in row[2]]


def started(*_: object) -> NoReturn:
    raise AssertionError("it was started")


@pytest.fixture
def place(here: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model, an adapter on it, another model, and files for all commands."""
    monkeypatch.chdir(here)
    monkeypatch.setattr(job.Job, "_train", started)
    monkeypatch.setattr("nemo_kto.tools.inference.chat_model.bf16_slowdown", lambda **_: 2.0)
    monkeypatch.setattr(rendering, "MAX_SECONDS", 0.5)
    monkeypatch.syspath_prepend(here)
    (here / "scores.py").write_text("def length(prompt, answer):\n    return len(answer)\n")
    (here / "prompts.txt").write_text("hi\n")
    for name, answer in (("answers", "yes"), ("others", "no")):
        write_rows(here / f"{name}.jsonl", [{"prompt": "hi", "answer": answer, "model": name, "line": 1, "index": 0}])
    fields(ADAPTER_CONFIG, base_model_name_or_path=str(here / "model"))(here / "adapter")
    (here / "plain").symlink_to("plain-model")
    (here / "model").rename(here / "plain-model")
    (here / "model").mkdir()
    for file in (here / "plain-model").iterdir():
        (here / "model" / file.name).write_bytes(file.read_bytes())
    return here


def error_of_command(words: Sequence[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        sys.exit(main.main([*words]))
    printed = capsys.readouterr().err
    assert ended.value.code in (2, 1), printed
    return printed


@pytest.mark.parametrize(("of", "case", "command"), TRIED, ids=lambda value: value)
def test_each_command_refuses_it(
    place: Path, of: str, case: str, command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    damage, expected, commands = TABLES[of][case]
    damage(place / of)
    monkeypatch.setattr(opening, "MAX_SECONDS", 60 if expected is TIME or "CPU time" not in expected.parts else 0.5)
    printed = error_of_command(commands[command].split(), capsys)
    assert printed == expected
    assert "Traceback" not in printed
    assert_harmless(printed)
    assert not (place / "marker").exists()


@pytest.mark.parametrize("name", ["stop_strings", "num_beams", "return_dict_in_generate", "temperature", "top_k"])
def test_settings_that_a_chat_ignores_or_obeys(place: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    value = {"stop_strings": ["x"], "num_beams": 100_000, "return_dict_in_generate": True, "temperature": 0, "top_k": -1}
    content(SETTINGS, json.dumps({"do_sample": True, "max_new_tokens": 2, name: value[name]}).encode())(place / "model")
    main.main(["chat", "model", "-p", "hi", "--json"])
    printed = capsys.readouterr()
    assert json.loads(printed.out)["tokens"] in (1, 2)
    ignored = [f"nemo-kto chat: model: a chat ignores {name} of its generation settings\n"]
    assert [printed.err] == (ignored if name in ("stop_strings", "num_beams") else [""])
