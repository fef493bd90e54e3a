"""MODEL and DATA by position, and the length of sequences that follows from the model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from nemo_kto.algorithms.recipes import KTO, RECIPES, Recipe
from nemo_kto.architecture.families import FAMILIES
from nemo_kto.config.checker import POSITIONS, read_positions
from nemo_kto.config.resolved import ModelFiles, ResolvedRun
from tests.helpers.messages import Message
from tests.unit.conftest import FindErrors, Load, composed, mistakes

MODEL, DATA = POSITIONS.values()
_FAMILY = next(family for family in FAMILIES.values() if family.chosen_keys)
INDEXED = {"architectures": [_FAMILY.hf_architecture], "model_type": _FAMILY.name, "max_position_embeddings": 8192}


@pytest.mark.parametrize("path", ["models/a", "~/models/a", "hf:org/a@main", "a b", "ends\\", "it\\'s", "[x]", "a,b", "12"])
def test_positions_are_values_of_their_keys(recipe: Recipe, path: str) -> None:
    overrides, errors = read_positions([path, "model.seed=7", "rows.jsonl"], recipe)
    assert errors == []
    config = composed(overrides, recipe)
    model, rows = config.pretrained_checkpoint.restore_from_path, config.model.data.data_prefix
    assert (model, rows, config.model.seed) == (path, "rows.jsonl", 7)


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("a b.jsonl,c.jsonl", ["a b.jsonl", "c.jsonl"]),
        ("0.7,a.jsonl,0.3,b.jsonl", ["0.7", "a.jsonl", "0.3", "b.jsonl"]),
        ("[0.7,a.jsonl,0.3,b.jsonl]", [0.7, "a.jsonl", 0.3, "b.jsonl"]),
        ("{train:a.jsonl,validation:b.jsonl}", {"train": "a.jsonl", "validation": "b.jsonl"}),
        ("there,is.jsonl", "there,is.jsonl"),
    ],
)
def test_the_second_position_names_any_data(
    word: str, value: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there,is.jsonl").touch()
    assert composed(read_positions(["model", word], KTO)[0]).model.data.data_prefix == value


def test_a_model_or_data_given_twice(good: list[str]) -> None:
    model, data, *rest = good
    assert mistakes(["models/b", model, data, *rest]) == [Message(MODEL, "models/b", model, "MODEL", "once")]
    assert mistakes([model.partition("=")[2], "b.jsonl", data, *rest])[0] == Message(DATA, "b.jsonl", data, "DATA", "once")


def test_a_config_group_given_twice(good: list[str]) -> None:
    """Hydra would take the last file, and recipe=auto would be ignored beside another recipe."""
    files = ["hardware=cpu", "recipe=qwen3_8b", "hardware=gpu_node", "recipe=auto"]
    assert mistakes([*good, *files]) == [
        Message("hardware", "once", "hardware=cpu and hardware=gpu_node", "leave one out"),
        Message("recipe", "once", "recipe=qwen3_8b and recipe=auto", "leave one out"),
    ]
    assert mistakes([*good, "hardware=cpu", "hardware=cpu"]) == []


def test_every_misplaced_word_is_named_with_the_other_mistakes(good: list[str]) -> None:
    places = [text.partition("=")[2] for text in good[:2]]
    assert mistakes([*places, "more.jsonl", "model.optim.lr", "1e-6", "model.optim.lr=fast"]) == [
        Message("MODEL", "DATA", "more.jsonl, 1e-6", "KEY=VALUE", "FILE,FILE"),
        Message("model.optim.lr", "KEY=VALUE"),
        Message("model.optim.lr", "fast"),
    ]


@pytest.mark.parametrize(
    ("limits", "given", "length", "why"),
    [
        ({"max_position_embeddings": 256}, [], 256, "max_position_embeddings of the model"),
        ({"max_position_embeddings": 256}, ["model.data.seq_length=128"], 128, "set by the user"),
        ({"max_position_embeddings": 8192}, [], 2048, "the default"),
        ({"max_position_embeddings": 8192}, ["model.data.seq_length=8192"], 8192, "set by the user"),
        ({}, [], 2048, "the default"),
        (
            {
                "max_position_embeddings": 8192,
                "rope_parameters": {"rope_type": "longrope", "original_max_position_embeddings": 1024},
            },
            [],
            1024,
            "original_max_position_embeddings of the model",
        ),
        (INDEXED | {"index_topk": 512}, [], 512, "index_topk of the model"),
        (INDEXED, [], 2048, "the default"),
        (INDEXED | {"index_topk": 4096}, [], 2048, "the default"),
        (INDEXED | {"index_topk": 4096, "max_position_embeddings": 1024}, [], 1024, "max_position_embeddings of the model"),
    ],
)
def test_the_length_of_sequences_follows_from_the_model(
    load: Load, tmp_path: Path, limits: dict[str, object], given: list[str], length: int, why: str
) -> None:
    cfg = load(*given)
    file = tmp_path / "model" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **limits}))
    run = ResolvedRun.of(cfg)
    assert (run.cfg.seq_length, run.cfg.model.data.seq_length, run.length_reason) == (length, length, why)


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ({"max_position_embeddings": 256}, ["max_position_embeddings = 256"]),
        (INDEXED | {"index_topk": 256}, ["index_topk = 256", "an indexer chooses the keys of longer sequences"]),
    ],
)
def test_longer_sequences_are_refused(
    find_errors: FindErrors, load: Load, limits: dict[str, object], words: list[str], tmp_path: Path
) -> None:
    folder = Path(load().pretrained_checkpoint.restore_from_path)
    (folder / "config.json").write_text(json.dumps({**json.loads((folder / "config.json").read_text()), **limits}))
    assert find_errors("model.data.seq_length=256") == []
    (error,) = find_errors("model.data.seq_length=257")
    assert error == Message("model.data.seq_length", "at most", *words, f"{folder}", "got 257", "use 256 or fewer")
    limit = ModelFiles(source=folder).attention_line
    assert limit == (
        {"attention": Message("all keys", "index_topk = 256 tokens", "not trained")} if "index_topk" in limits else {}
    )


def test_an_indexer_of_the_reference_chooses_as_many_keys(find_errors: FindErrors, load: Load, tmp_path: Path) -> None:
    folder = Path(load().pretrained_checkpoint.restore_from_path)
    config = {**json.loads((folder / "config.json").read_text()), **INDEXED}
    shutil.copytree(folder, tmp_path / "reference")
    for each, chosen in ((folder, 256), (tmp_path / "reference", 128)):
        (each / "config.json").write_text(json.dumps(config | {"index_topk": chosen}))
    (error,) = find_errors("model.data.seq_length=200", f"model.reference.restore_from_path={tmp_path}/reference")
    assert error == Message(
        "model.reference.restore_from_path", "same shape", "index_topk 128 instead of 256", "name another"
    )


def test_short_words_for_keys() -> None:
    words = ["MODEL", "DATA", "lr=1e-6,2e-6", "beta=0.3", "epochs=2", "steps=5", "batch=8"]
    for name, recipe in RECIPES.items():
        overrides, errors = read_positions(words, recipe)
        loop = [f"trainer.{name}.max_epochs=2", f"trainer.{name}.max_steps=5"]
        keys = ["model.optim.lr=1e-6,2e-6", f"model.{name}.ref_policy_kl_penalty=0.3", *loop, "model.global_batch_size=8"]
        assert (overrides[:5], errors) == (keys, [])
    data, _ = read_positions(["M", "D", "template=true", "fields=prompt:my question,label:thumb", "fields={label:a}"], KTO)
    assert data[:3] == [
        "model.data.apply_chat_template=true",
        "model.data.fields={prompt:'my question',label:thumb}",
        "model.data.fields={label:a}",
    ]
    data, _ = read_positions(["M", "D", "fields=prompt:", "fields=null"], KTO)
    assert data[:2] == ["model.data.fields=prompt:", "model.data.fields=null"]
    _, (error,) = read_positions(["lr=1e-6", "model.optim.lr=2e-6"], RECIPES["kto"])
    assert str(error) == Message("model.optim.lr", "once", "lr=1e-6", "model.optim.lr=2e-6", "leave one out")
