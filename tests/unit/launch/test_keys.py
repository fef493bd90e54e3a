"""The YAML files say everything: each key of the types once, with a comment, and the documentation is their copy."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_type_hints

import yaml

from nemo_kto.launch import compose, keys
from nemo_kto.launch.schema import KTOConfig

REPOSITORY = Path(__file__).resolve().parents[3]


def leaves(hint: type, prefix: str = "") -> list[str]:
    names = []
    for name, inner in get_type_hints(hint).items():
        names += leaves(inner, f"{prefix}{name}.") if hasattr(inner, "__dataclass_fields__") else [prefix + name]
    return names


def test_files_types_and_comments_have_the_same_keys() -> None:
    documented = [key.name for key in keys.all_keys()]
    assert sorted(documented) == sorted(leaves(KTOConfig))
    assert sorted(documented) == sorted(compose.known_keys(compose.load()))
    assert len(documented) == len(set(documented))


def test_every_key_has_a_comment() -> None:
    assert [key.name for key in keys.all_keys() if len(key.comment) < 8] == []


def test_a_default_is_what_hydra_makes_of_it() -> None:
    config = compose.load()
    for key in keys.all_keys():
        if "${" in key.default or key.default == "???":
            continue
        section, _, name = key.name.rpartition(".")
        node = compose.OmegaConf.select(config, section)
        expected = yaml.safe_load(key.default)
        assert node[name] == (float(expected) if isinstance(node[name], float) else expected), key.name


def test_the_page_in_docs_is_up_to_date() -> None:
    page = REPOSITORY / "docs" / "configuration.md"
    assert page.read_text() == keys.as_markdown(), "python -m nemo_kto.launch.keys > docs/configuration.md"


def test_every_key_is_read_by_something() -> None:
    """A key that is accepted and changes nothing would be a lie."""
    launch = REPOSITORY / "nemo_kto" / "launch"
    code = "".join((launch / name).read_text() for name in ("build.py", "cli.py", "ranks.py"))
    handed_on_whole = ("exp_manager.wandb_logger_kwargs.", "exp_manager.mlflow_logger_kwargs.")
    only_one_value = {  # validate.py refuses all others
        "model.virtual_pipeline_model_parallel_size",
        "model.context_parallel_size",
        "model.expert_model_parallel_size",
        "model.fp8",
        "model.peft.peft_scheme",
        "model.optim.name",
    }
    within_yaml = {"exp_manager.exp_dir", "exp_manager.name"}  # explicit_log_dir is made of them
    unread = [
        key.name
        for key in keys.all_keys()
        if not re.search(rf"\.{key.name.rsplit('.', 1)[-1]}\b", code) and not key.name.startswith(handed_on_whole)
    ]
    assert [name for name in unread if name not in only_one_value | within_yaml] == []


def test_kto_adds_to_the_shared_files_and_repeats_nothing() -> None:
    own = {key.name for key in keys._keys((REPOSITORY / "conf/gpt_kto.yaml").read_text(), "")}
    assert own == {
        "model.kto.preference_loss",
        "model.kto.desirable_loss_weight",
        "model.kto.undesirable_loss_weight",
        "exp_manager.name",
    }


def test_hardware_files_compose() -> None:
    names = sorted(file.stem for file in (REPOSITORY / "conf" / "hardware").glob("*.yaml"))
    assert names == ["cpu", "gpu_node"]
    for name in names:
        compose.load([f"hardware={name}"])
