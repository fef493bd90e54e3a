"""Text of model cards from checkpoints and configurations of all kinds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard

from nemo_kto.algorithms.recipes import RECIPES
from nemo_kto.model_files.companion_files import copy_companions, read_companions
from nemo_kto.model_files.hub import hub_name
from nemo_kto.run.card import CardSources, card_text, write_card

COMMIT = "0" * 40


def facts_of(original: Path, **info: Any) -> CardSources:
    """Those of a checkpoint outside of a run; ``info``: content of its trainer.json."""
    return CardSources(info=info, run=None, original=original, adapters=False)


@pytest.mark.parametrize(
    ("algorithm", "loss"), [(recipe.name, loss) for recipe in RECIPES.values() for loss in recipe.losses]
)
def test_each_loss_has_its_formula_and_paper(algorithm: str, loss: str, tokenizer_folder: Path) -> None:
    facts = {"algorithm": algorithm, f"model.{algorithm}.preference_loss": loss}
    text = card_text(facts_of(tokenizer_folder, run=facts), has_picture=False)
    section = text.split("## Training\n\n")[1].split("\n| ")[0]
    assert section.startswith("The loss is the ")
    assert "https://arxiv.org/abs/" in section or loss == "rpo_fwd_kl"  # which is defined by the one before it
    assert "beta" in section
    assert "log-ratio" in section  # the notation
    assert ":func:" not in section or loss == "rpo_fwd_kl"


def test_a_mixture_has_the_names_of_its_losses(tokenizer_folder: Path) -> None:
    facts = {"algorithm": "dpo", "model.dpo.preference_loss": "dpo", "model.dpo.preference_losses": {"ipo": 0.5, "dpo": 1}}
    text = card_text(facts_of(tokenizer_folder, run=facts), has_picture=False)
    assert "with the loss `0.5 ipo + 1 dpo` of" in text
    assert "The loss is `0.5 ipo + 1 dpo`." in text


def test_a_checkpoint_that_records_nothing(tokenizer_folder: Path) -> None:
    text = card_text(facts_of(tokenizer_folder), has_picture=False)
    loaded = ModelCard(text)
    assert loaded.data.to_dict() == {
        "library_name": "transformers", "pipeline_tag": "text-generation", "tags": ["nemo-kto", "alignment"],
    }  # fmt: skip
    assert "does not record its training" in text
    assert "## Results" not in text


def test_adapters_of_a_model_with_image_input_are_loaded_into_its_own_class(tmp_path: Path) -> None:
    for vision, loader in (
        (True, "PeftModel.from_pretrained(AutoModelForImageTextToText"),
        (False, "AutoPeftModelForCausalLM"),
    ):
        (tmp_path / "config.json").write_text('{"vision_config": {}}' if vision else "{}")
        text = card_text(CardSources(info={}, run=None, original=tmp_path, adapters=True), has_picture=False)
        assert f"model = {loader}.from_pretrained(" in text
        assert ("AutoPeftModelForCausalLM" in text) != vision
        code = text.split("```python\n")[1].split("```")[0]
        compile(code, "card", "exec")
        assert not vision or 'from_pretrained("path/to/the/base/model"), "path/to/this/folder")' in code


FOREIGN = "a\x1b[31m\n\n# Heading\n<script>x</script>|`b`\u202e\x9b"


def test_nothing_that_a_checkpoint_names_is_imported_or_becomes_markdown(
    tokenizer_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "evil.py").write_text("open('ran', 'w')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    facts: dict[str, Any] = {"algorithm": "kto", "model.kto.preference_loss": "evil.Loss", "model.kto.x": FOREIGN}
    text = card_text(facts_of(tokenizer_folder, run=facts), has_picture=False)
    assert "The loss is `evil.Loss`." in text
    assert not (tmp_path / "ran").exists()
    facts["model.kto.preference_loss"] = FOREIGN
    facts["model.data.data_prefix"] = {"sha256": FOREIGN, "from": FOREIGN}
    facts["pretrained_checkpoint.restore_from_path"] = {"sha256": "", "from": FOREIGN}
    text = card_text(facts_of(tokenizer_folder, run=facts, versions={FOREIGN: FOREIGN}), has_picture=False)
    assert {character for character in text if not character.isprintable()} == {"\n"}
    assert [line for line in text.splitlines() if line.startswith("# H")] == []
    assert "<script>" not in text
    widths = {line.count(" | ") for line in text.split("### Data")[1].splitlines() if line.startswith("| ")}
    assert widths == {3}


CONFIG = """\
algorithm: dpo
pretrained_checkpoint:
  restore_from_path: /home/jane/models/base
model:
  dpo:
    preference_loss: ipo
  data:
    data_prefix:
      train: ["hf:org/pairs@main:train", "https://jane:secret@host/private/rows.jsonl?token=abc"]
      validation: {helpful: /home/jane/helpful.jsonl, short: /home/jane/short.jsonl}
"""


def test_names_without_paths_and_secrets_and_sets_with_names(tokenizer_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(CONFIG)
    facts: dict[str, Any] = {"algorithm": "dpo", "model.dpo.preference_loss": "ipo"}
    facts["pretrained_checkpoint.restore_from_path"] = {"sha256": "1" * 64, "from": "/home/jane/models/base"}
    for key in ("model.data.data_prefix", "validation rows"):
        facts[key] = {"sha256": "2" * 64, "from": "40 rows"}
    metrics = {"val_helpful_loss": 0.25, "val_short_loss": 0.5, "val_helpful_acc": 0.75, "val_short_acc": float("nan")}
    info = {"run": facts, "metrics": metrics, "trainer": {"step": 7}}
    text = card_text(CardSources(info=info, run=tmp_path, original=tokenizer_folder, adapters=False), has_picture=True)
    assert ModelCard(text).data.to_dict()["datasets"] == ["org/pairs"]
    for part in ("`base`", "| loss | 0.2500 | 0.5000 |", "| accuracy | 0.7500 | nan |", "helpful | short", "`rows.jsonl`"):
        assert part in text, part
    for part in ("jane", "secret", "abc", "/home", "host"):
        assert part not in text, part
    assert "![Curves of the run](card.png)" in text


@pytest.mark.parametrize(("rows", "cell"), [(40, "| AUC | 0.8000 (95 %: 0.63 to 0.90) |"), (19, "")])
def test_an_auc_has_its_interval_or_too_few_rows(rows: int, cell: str, tokenizer_folder: Path, tmp_path: Path) -> None:
    counts = {"rows": rows, "tokens": 1, "longest": 1, "cut_prompts": 0, "cut_responses": 0, "desirable": rows // 2}
    (tmp_path / "data.json").write_text(json.dumps({"sets": {"validation": counts}}))
    info = {"metrics": {"val_loss": 0.4, "val_auc": 0.8, "val_rows": rows, "train_loss": 0.3}, "trainer": {"step": 7}}
    text = card_text(CardSources(info=info, run=tmp_path, original=tokenizer_folder, adapters=False), has_picture=False)
    assert (cell in text, "AUC" in text, "the last batch of training" in text) == (True, bool(cell), not cell)


def test_a_card_that_cannot_be_made_does_not_prevent_the_export(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_card(tmp_path, facts_of(tmp_path, metrics={"val_loss": "high"}, trainer={"step": 1}))
    assert not (tmp_path / "README.md").exists()
    assert "no model card" in caplog.text


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (f"hf:org/model@{COMMIT}", ("org/model", COMMIT)),
        (f"/a/hub/models--org--my--model/snapshots/{COMMIT}", ("org/my--model", COMMIT)),
        ("hf:org/model", None),
        (f"/a/hub/models--..--x/snapshots/{COMMIT}", None),
        ("/a/hub/models--org--model/snapshots/main", None),
    ],
)
def test_the_hub_name_of_a_model(name: str, expected: tuple[str, str] | None) -> None:
    assert hub_name(name) == expected


def test_license_and_card_of_the_original_model(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    for folder in (source, target):
        folder.mkdir()
    for name in ("LICENSE.txt", "NOTICE", "USE_POLICY.md", "README.md", "model.py"):
        (source / name).write_text(name)
    (tmp_path / "elsewhere").write_text("elsewhere")
    (source / "LICENSE.other").symlink_to(tmp_path / "elsewhere")
    assert read_companions(source, into="a checkpoint")["README.md"] == b"README.md"
    copy_companions(source, target)
    assert {path.name for path in target.iterdir()} == {"LICENSE.txt", "NOTICE", "USE_POLICY.md"}
    assert "LICENSE.other" in caplog.text
