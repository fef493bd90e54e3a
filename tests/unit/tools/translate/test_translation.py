"""Options of TRL and ms-swift as keys of this project."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import shlex
import subprocess
import tempfile
from pathlib import Path

import pytest
from hypothesis import strategies as st

from nemo_kto.algorithms.recipes import KTO, RECIPES
from nemo_kto.cli.job import Job
from nemo_kto.config.compose import our_source
from nemo_kto.config.saved_config import read_saved
from nemo_kto.config.schema import config_type
from nemo_kto.errors import UserError
from nemo_kto.tools.translate import translate_command as command
from nemo_kto.tools.translate.option_files import read_options
from nemo_kto.tools.translate.trainer_options import table
from nemo_kto.tools.translate.translation import find_trainer, translate
from nemo_kto.utils.fields import names
from nemo_kto.utils.text import shell_comment, shell_word
from tests.conftest import REPOSITORY
from tests.helpers.messages import Message, raises

# Blocks: "=== FILE [OPTION=VALUE ...]", the content of the file, "---", and its translation. The translations are written by
# python -m tests.unit.tools.translate.test_translation
OUTPUTS = REPOSITORY / "tests/data/outputs/translate.txt"
BLOCK = re.compile(r"^=== (.*?)\n(.*?)\n---\n(.*?)\n(?==== |\Z)", re.DOTALL | re.MULTILINE)
BLOCKS: list[tuple[str, str, str]] = BLOCK.findall(OUTPUTS.read_text(encoding="utf-8"))
USUAL = {"model_name_or_path": "m", "dataset_name": "d.jsonl"}
EXPERTS = {"router_aux_loss_coef": 0.001, "output_router_logits": False, "num_experts_per_tok": 8, "num_hidden_layers": 48}
NAMED_FILES = {  # in the files of the blocks
    "a.yaml": "{learning_rate: 5.0e-7, beta: 0.2}",
    "mine.py": "TrlParser((ScriptArguments, KTOConfig))",
    "experts/config.json": json.dumps(EXPERTS),
}


def translated(header: str, text: str, folder: Path) -> str:
    """A command with its comments; without the option ``whole``, how it differs from the one of USUAL."""
    name, *words = header.split()
    options = dict(word.partition("=")[::2] for word in words)
    (folder / "experts").mkdir()
    for file, content in {**NAMED_FILES, name: text}.items():
        (folder / file).write_text(content)
    with contextlib.chdir(folder):
        given = read_options(Path(name))
        values = given.values | ({"nproc_per_node": options["ranks"]} if "ranks" in options else {})
        trainer = options.get("trainer") or given.trainer or find_trainer(values)
        found = translate(values, trainer=trainer, method=given.method, recipe=RECIPES.get(options.get("algorithm", "")))
    found = found._replace(without=given.without | found.without, notes=[*given.notes, *found.notes])
    comments = [*found.remarks(), *(f"to be corrected: {error}" for error in command.remaining_errors(found))]
    if "whole" in options:
        return "\n".join([found.command(), *map(shell_comment, comments)])
    usual = translate(USUAL, trainer=trainer, recipe=found.recipe)
    lines, known = [*found.words(), *map(shell_comment, comments)], [*usual.words(), *map(shell_comment, usual.remarks())]
    added, missing = ([line for line in a if line not in b] for a, b in ((lines, known), (known, lines)))
    signed = [*(f"+ {line}" for line in added), *(f"- {line}" for line in missing)]
    return "\n".join([f"{found.trainer}: nemo-kto {found.recipe.name}", *signed])


@pytest.mark.parametrize(("header", "text", "expected"), BLOCKS)
def test_the_translation_of_a_file(header: str, text: str, expected: str, tmp_path: Path) -> None:
    assert translated(header, text, tmp_path) == expected


def test_a_program_has_the_command_of_the_same_options() -> None:
    """It is read and not run; peft's defaults are those of LoraConfig."""
    of_file = {header: expected for header, _, expected in BLOCKS}
    assert of_file["train.py"] == of_file["train.json trainer=trl algorithm=kto"]


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (USUAL, ["--algorithm", "kto", "dpo", "none"]),
        ({"rlhf_type": "grpo", "model": "m"}, ["method", "kto", "grpo"]),
        ({"stage": "sft", "cutoff_len": 5}, ["TRL or ms-swift", "cutoff_len, stage of", "from-llama-factory.md"]),
    ],
)  # fmt: skip
def test_options_without_an_algorithm_of_this_program(options: dict[str, object], parts: list[str]) -> None:
    with raises(UserError, *parts):
        translate(options)


def test_every_key_in_the_tables_exists() -> None:
    known = set().union(*(names(config_type(recipe)) for recipe in RECIPES.values())) | {"hardware"}
    tables = [*table()["values"].values(), table()["losses"]]
    found = {text.split("=")[0] for values in tables for texts in values.values() for text in texts}
    found |= {key.replace("NAME", name) for key in table()["keys"].values() for name in RECIPES}
    assert len(found) >= 50
    assert found - known == set()
    for trainer in table()["trainers"].values():
        assert trainer["title"]
        assert trainer["signs"]


def test_the_printed_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "trl.json"
    file.write_text(json.dumps({**USUAL, "dataset_name": "it's $a.jsonl", "learning_rate": 5e-7, "frobnicate": 1}))
    command.main([str(file), "--algorithm", "kto", "--ranks", "4"])
    script, _, comments = capsys.readouterr().out.partition("\n\n")
    words = shlex.split(script.replace("\\\n", ""), comments=True)
    assert words[:2] == ["nemo-kto", "kto"]
    assert {"model.optim.lr=5e-07", "model.global_batch_size=32", "trainer.devices=4"} <= set(words)
    assert r"model.data.data_prefix='it\'s $a.jsonl'" in words
    assert all(line.startswith("# ") for line in comments.splitlines())
    assert "frobnicate=1" in comments


LAUGHS = "".join(f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in itertools.pairwise("abcdefghi"))


@pytest.mark.parametrize(
    "text",
    [
        "a: &a [x, x, x]\n" + LAUGHS,
        "a: &a [1, *a]",
        "a: &a {<<: *a}",
        "a: &a {k: 1}\nb: &b {<<: [*a, *a]}\nc: &c {<<: [*b, *b]}".ljust(100) + "\nd: {<<: [" + "*c, " * 9000 + "*c]}",
        "[" * 600 + "]" * 600,
        "[" * 100_000,
        "a: !!timestamp x",
        "a: !!int ''",
        "a: 2024-13-45",
        b"\xff",
    ],
    ids=lambda text: repr(text[:20]),
)
def test_yaml_without_a_bound_or_with_wrong_values(tmp_path: Path, text: str | bytes) -> None:
    (tmp_path / "a.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UserError, match=r"^FILE must"):
        read_options(tmp_path / "a.yaml")
    assert read_saved(tmp_path / "a.yaml") == {}


CONTROLS = st.text(st.characters(codec="utf-8") | st.sampled_from("\n\r\x1b\x85\u2028\u202e'\"\\$`!#"), min_size=1)


@pytest.mark.parametrize("text", ["a\nid", "it's \x1b[1m\\n $HOME", "\x80\xa0\u2028é\U000e0001", "a'b", "\t'\\'"])
def test_a_shell_reads_a_printed_word_as_it_was(text: str) -> None:
    assert shell_word(text).isprintable()
    script = f"export LC_ALL=C.UTF-8\nprintf %s {shell_word(text)}"
    assert subprocess.run(["bash", "-c", script], capture_output=True, check=True).stdout.decode() == text


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("KTOConfig(learning_rate=2 * lr, beta=0.1)", ["learning_rate=2 * lr", "line 1", "literal"]),
        ("lr = 1e-5\nlr = 2e-5\nKTOConfig(learning_rate=lr)", ["learning_rate=lr", "line 3", "literal"]),
        ("def f(lr):\n    KTOConfig(learning_rate=lr)\nlr = 1e-5", ["learning_rate=lr", "literal"]),
        ("KTOConfig(beta=0.1)\nKTOConfig(beta=0.2)", ["KTOConfig", "several"]),
        ("KTOConfig()\nDPOConfig()", ["KTOConfig and DPOConfig"]),
        ("DPOConfig(**settings)", ["**=settings", "literal"]),
        (
            "m = PeftModel.from_pretrained(n, 'o/a')\nKTOTrainer(m.merge_and_unload())",
            ["model_name_or_path=m.merge_and_unload()"],
        ),
        ("SFTConfig(learning_rate=1e-5)", ["KTOConfig", "DPOConfig", "train.py"]),
        ("a = KTOConfig()\na.beta = 1\nif b:\n    a.beta = 2", ["beta=a.beta", "line 4", "literal"]),
        ("a = KTOConfig(beta=1)\na.beta *= 2", ["beta=a.beta", "line 2", "literal"]),
        ("m = 'a/b'\nm = c[0]\nKTOTrainer(m)", ["model_name_or_path=m", "line 3", "literal"]),
        ("KTOConfig(", ["Python program", "train.py"]),
    ],
)
def test_programs_that_cannot_be_read(program: str, words: list[str], tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(program)
    with raises(UserError, *words):
        command.main([str(tmp_path / "train.py")])


@pytest.mark.parametrize(
    ("options", "title", "key"),
    [
        (["--lr=3"], "the options as keys", "model.optim.lr=3"),
        (["--learning_rate=3"], "the options of TRL as keys", "model.optim.lr=3"),
        (["--lora_rank=3"], "the options of ms-swift as keys", "adapter_dim=3"),
    ],
)
def test_options_on_our_command_line_are_refused_with_their_keys(
    options: list[str], title: str, key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    job = Job(recipe=KTO, source=our_source(KTO), world=None, elsewhere=False)
    with pytest.raises(SystemExit):
        command.refuse_options(job, options, ["m", "d.jsonl"])
    assert Message(title, key, "data_prefix='d.jsonl'") == capsys.readouterr().err


if __name__ == "__main__":
    blocks = []
    for header, text, _ in BLOCKS:
        with tempfile.TemporaryDirectory() as folder:
            blocks.append(f"=== {header}\n{text}\n---\n{translated(header, text, Path(folder))}\n")
    OUTPUTS.write_text("".join(blocks), encoding="utf-8")
