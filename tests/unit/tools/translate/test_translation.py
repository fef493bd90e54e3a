"""Options of TRL and ms-swift as keys of this project."""

from __future__ import annotations

import itertools
import json
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

from nemo_kto.algorithms.recipes import DPO, KTO, RECIPES
from nemo_kto.cli.job import Job
from nemo_kto.config.compose import our_source
from nemo_kto.config.saved_config import read_saved
from nemo_kto.config.schema import config_type
from nemo_kto.errors import UserError
from nemo_kto.tools.translate import translate_command as command
from nemo_kto.tools.translate.option_files import read_options
from nemo_kto.tools.translate.trainer_options import table
from nemo_kto.tools.translate.translation import translate
from nemo_kto.utils.fields import names
from nemo_kto.utils.text import shell_word
from tests.helpers.messages import Message, raises

TUNING, SCHEDULE = "model.peft.lora_tuning", "model.optim.sched"

MEGATRON_SWIFT = r"""
NPROC_PER_NODE=4 \
CUDA_VISIBLE_DEVICES=0,1,2,3 \
megatron rlhf \
    --rlhf_type kto \
    --model Qwen/Qwen2.5-7B-Instruct \
    --dataset 'AI/pairs#20000' \
    --split_dataset_ratio 0.01 \
    --tensor_model_parallel_size 4 \
    --micro_batch_size 1 \
    --global_batch_size $(expr 16 / 4) \
    --recompute_granularity full --recompute_method uniform --recompute_num_layers 1 \
    --sequence_parallel true \
    --no_save_optim true
"""


def values_of(text: str, name: str, folder: Path, **options: Any) -> tuple[str, dict[str, object], list[str]]:
    """The algorithm, our keys, and the remarks of a file."""
    (folder / name).write_text(text)
    given = read_options(folder / name)
    found = translate(given.values, trainer=given.trainer, method=given.method, **options)
    assert command.remaining_errors(found) == []
    return found.recipe.name, found.overrides, found.remarks()


def test_a_script_of_megatron_swift(tmp_path: Path) -> None:
    algorithm, keys, remarks = values_of(MEGATRON_SWIFT, "kto.sh", tmp_path)
    assert algorithm == "kto"
    expected = {
        "trainer.devices": 4,
        "model.global_batch_size": 4,
        "model.micro_batch_size": 1,
        "model.tensor_model_parallel_size": 4,
        "model.sequence_parallel": True,
        "model.activations_checkpoint_granularity": "full",
    }
    assert {key: keys.get(key) for key in expected} == expected
    assert [line for line in remarks if "20000" in line or "no_save_optim" in line] == [
        Message("20000", "all rows"),
        Message("no_save_optim", "resumed"),
    ]
    assert [line.partition(":")[0] for line in remarks if "ModelScope" in line] == ["Qwen/Qwen2.5-7B-Instruct", "AI/pairs"]


@pytest.mark.parametrize(
    ("options", "data", "remarks"),
    [
        ({"dataset": "HF::a/b:en/de#50"}, ["hf:a/b:en", "hf:a/b:de"], 0),
        ({"dataset": "MS::a/b", "val_dataset": ["c/d"]}, {"train": "hf:a/b", "validation": "hf:c/d"}, 2),
        ({"dataset": ["a/b", "c/d.jsonl"], "use_hf": True}, ["hf:a/b", "c/d.jsonl"], 0),
    ],
)
def test_names_on_modelscope(options: dict[str, object], data: object, remarks: int) -> None:
    found = translate({"rlhf_type": "dpo", **options}, trainer="ms-swift")
    assert found.overrides["model.data.data_prefix"] == data
    assert sum("ModelScope" in line for line in found.remarks()) == remarks


@pytest.mark.parametrize(
    ("losses", "weights", "reason"),
    [
        (["sft"], None, "a preference loss"),
        (["sigmoid", "sft"], [1.0], "a number for each loss"),
        (["sigmoid", "kto"], None, "no such loss"),
        (["sigmoid", "ipo"], None, "sums and means"),
        (["sigmoid", "sigmoid"], None, "twice"),
    ],
)
def test_losses_that_a_run_cannot_have_leave_a_command_that_asks_for_one(losses: Any, weights: Any, reason: str) -> None:
    found = translate({**TRL, "loss_type": losses, "loss_weights": weights}, trainer="trl", recipe=DPO)
    assert command.remaining_errors(found) == [Message("model.dpo.preference_loss", "???")]
    assert any(Message("loss_type", reason) == line or Message("loss_weights", reason) == line for line in found.remarks())


TRL = {"model_name_or_path": "m", "dataset_name": "d.jsonl"}
# Options of TRL, and our keys; None for a key that is not set.
CONVERTED: list[tuple[dict[str, object], dict[str, object]]] = [
    ({"max_steps": 100}, {"trainer.dpo.max_steps": 100, "trainer.dpo.max_epochs": 1_000_000}),
    ({"num_train_epochs": 2.5}, {"trainer.dpo.max_epochs": 3}),
    ({"warmup_steps": 20}, {f"{SCHEDULE}.warmup_ratio": None, f"{SCHEDULE}.warmup_steps": 20}),
    ({"rpo_alpha": 2}, {"model.dpo.sft_loss_weight": 2, "model.dpo.sft_token_mean": True}),
    (
        {"loss_type": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 1.0]},  # MPO
        {
            "model.dpo.preference_losses": {"dpo": 0.8, "bco_pair": 0.2},
            "model.dpo.preference_loss": None,
            "model.dpo.sft_loss_weight": 1.0,
            "model.dpo.sft_token_mean": True,
        },
    ),
    ({"loss_type": "sigmoid bco_pair"}, {"model.dpo.preference_losses": {"dpo": 1.0, "bco_pair": 1.0}}),
    ({"loss_type": "sigmoid_norm"}, {"model.dpo.preference_loss": "sigmoid_norm"}),
    (
        {"f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 0.3, "ld_alpha": 0.5, "use_weighting": True},
        {
            "model.dpo.f_divergence_type": "alpha_divergence",
            "model.dpo.f_alpha_divergence_coef": 0.3,
            "model.dpo.ld_alpha": 0.5,
            "model.dpo.use_weighting": True,
        },
    ),
    (
        {"loss_type": "alphapo", "alpha": 0.2, "simpo_gamma": 1},
        {"model.dpo.preference_loss": "alphapo", "model.dpo.alphapo_alpha": 0.2, "model.dpo.simpo_gamma": 1},
    ),
    ({"fp16": True}, {"trainer.precision": "bf16"}),
    ({"dtype": "float32", "bf16": False}, {"trainer.precision": "32"}),
    ({"eval_strategy": "epoch"}, {"trainer.dpo.val_check_interval": 1.0}),
    ({"eval_strategy": "steps", "eval_steps": 0.1}, {"trainer.dpo.val_check_interval": pytest.approx(0.3)}),
    ({"save_total_limit": 2}, {"exp_manager.checkpoint_callback_params.save_top_k": 1}),
    ({"ddp_timeout": 90}, {"trainer.timeout_minutes": 2}),
    ({"sync_ref_model": True, "ref_model_sync_steps": 64}, {"model.reference.sync_interval": 64}),
    (
        {"use_peft": True, "lora_target_modules": "all-linear", "layers_to_transform": "0 3"},
        {f"{TUNING}.target_modules": ["all-linear"], f"{TUNING}.layer_selection": [1, 4]},
    ),
    ({"gradient_checkpointing": True}, {"model.activations_checkpoint_granularity": "full"}),
    (
        {"metric_for_best_model": "eval_rewards/margins"},
        {"exp_manager.checkpoint_callback_params.monitor": "val_rewards_margin"},
    ),
    ({"per_device_train_batch_size": 2, "nproc_per_node": 4, "nnodes": 2}, {"model.global_batch_size": 16}),
    ({"max_shard_size": "3GB"}, {"export.max_shard_size_gb": 3}),
    (
        {"dataset_test_split": "test", "dataset_name": "a/b"},
        {"model.data.data_prefix": {"train": "hf:a/b", "validation": "hf:a/b:test"}},
    ),
]  # fmt: skip


@pytest.mark.parametrize(("options", "expected"), CONVERTED)
def test_values_are_converted(options: dict[str, object], expected: dict[str, object]) -> None:
    found = translate({**TRL, **options}, trainer="trl", recipe=DPO)
    assert {key: found.overrides.get(key) for key in expected} == expected
    assert command.remaining_errors(found) == []


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"learning_rate": "fast"}, Message("learning_rate=fast", "number")),
        ({"num_train_epochs": "inf"}, Message("num_train_epochs=inf", "number")),
        ({"gradient_checkpointing": {"a": 1}}, Message("gradient_checkpointing={a:1}", "not supported")),
        ({"loss_type": "sigmoid sft", "rpo_alpha": 2}, Message("loss_type", "sft_loss_weight", "rpo_alpha=2")),
        ({"dtype": "bfloat16", "torch_dtype": "float32"}, Message("torch_dtype=float32", "dtype")),
        ({"datasets": ["e.jsonl"]}, Message("dataset_name=d.jsonl", "datasets is used", "model.data.data_prefix")),
        ({"lr_scheduler_kwargs": {"num_cycles": 2}}, Message("lr_scheduler_kwargs", "min_lr_rate")),
        ({"use_peft": True, "layers_to_transform": "0 all"}, Message("layers_to_transform", "numbers")),
        ({"shuffle_dataset": False}, Message("shuffle_dataset=false", "no option of TRL")),
        ({"desirable_weight": 2}, Message("desirable_weight=2", "dpo", "no such option")),
        ({"lora_r": 8}, Message("lora_r=8", "LoRA")),
        ({"optim": "adamw_8bit"}, Message("optim=adamw_8bit", "fp32")),
        ({"load_in_4bit": True}, Message("load_in_4bit", "quantised")),
        ({"label_smoothing": 0.1}, Message("label_smoothing=0.1", "ignores", "model.dpo.label_smoothing")),
        ({"f_alpha_divergence_coef": 0.3}, Message("f_alpha_divergence_coef=0.3", "alpha_divergence")),
        ({"loss_type": "ipo", "f_divergence_type": "forward_kl"}, Message("f_divergence_type=forward_kl", "mean")),
        ({"alpha": 0.3}, Message("alpha=0.3", "AlphaPO")),
        ({"frobnicate": 1}, Message("frobnicate=1", "no option of TRL")),
        ({"deepspeed": "zero3.json"}, Message("deepspeed=zero3.json", "ZeRO-1")),
    ],
)
def test_options_without_a_counterpart_have_a_reason(options: dict[str, object], reason: Message) -> None:
    found = translate({**TRL, **options}, trainer="trl", recipe=DPO)
    assert [line for line in found.remarks() if "no counterpart" in line] == [reason]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            {},
            {"preference_loss": "cpo", "cpo_alpha": 0, "sft_loss_weight": 1.0, "sft_token_mean": True, "simpo_gamma": None},
        ),
        ({"loss_type": "sigmoid", "cpo_alpha": 0}, {"preference_loss": "cpo", "cpo_alpha": 0, "sft_loss_weight": None}),
        ({"loss_type": "simpo"}, {"preference_loss": "simpo", "sft_loss_weight": 1.0, "simpo_gamma": 1.0}),
        (
            {"loss_type": "hinge", "cpo_alpha": 0.5},
            {"preference_loss": "hinge", "reference_free": True, "sft_loss_weight": 0.5, "sft_token_mean": True},
        ),
        ({"rlhf_type": "dpo", "reference_free": True, "ld_alpha": 0.3}, {"reference_free": True, "ld_alpha": 0.3}),
        (
            {"rlhf_type": "dpo", "f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 0.3},
            {"f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 0.7},  # the paper's alpha
        ),
    ],
)
def test_losses_of_ms_swift(options: dict[str, object], expected: dict[str, object]) -> None:
    found = translate({"rlhf_type": "cpo", "model": "m", "dataset": "d.jsonl", **options}, trainer="ms-swift")
    assert {key: found.overrides.get(f"model.dpo.{key}") for key in expected} == expected
    assert command.remaining_errors(found) == []


def test_the_algorithm_is_found_or_asked_for() -> None:
    assert translate({**TRL, "desirable_weight": 1.2}).recipe is KTO
    assert translate({**TRL, "loss_type": "sigmoid"}).recipe is DPO
    assert translate({"model": "m", "dataset": "d", "rlhf_type": "orpo"}).overrides["model.dpo.preference_loss"] == "orpo"
    key = "model.dpo.ref_policy_kl_penalty"
    assert translate({"model": "m", "dataset": "d", "rlhf_type": "simpo"}).overrides[key] == 2.0
    assert translate(TRL | {"loss_type": "simpo"}, method="cpo").overrides[key] == 0.1, "the default of TRL's CPOConfig"
    with pytest.raises(UserError) as error:
        translate(TRL)
    assert str(error.value) == Message("--algorithm", "kto", "dpo", "none")
    with pytest.raises(UserError) as error:
        translate({"rlhf_type": "grpo", "model": "m"})
    assert str(error.value) == Message("method", "kto", "grpo")
    with pytest.raises(UserError) as error:
        translate({"stage": "sft", "cutoff_len": 5})
    assert str(error.value) == Message("TRL or ms-swift", "cutoff_len, stage of LLaMA-Factory", "from-llama-factory.md")


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
    file.write_text(json.dumps({**TRL, "dataset_name": "it's $a.jsonl", "learning_rate": 5e-7, "frobnicate": 1}))
    command.main([str(file), "--algorithm", "kto", "--ranks", "4"])
    out = capsys.readouterr().out
    script, _, comments = out.partition("\n\n")
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


PROGRAM = """
from trl import KTOConfig as Config, KTOConfig, KTOTrainer
MODEL = "org/model"
raise SystemExit("it must not run")
model = transformers.AutoModelForCausalLM.from_pretrained(MODEL)
rows = datasets.load_dataset("json", data_files="rows.jsonl")
arguments = KTOConfig("out", learning_rate=5e-6, desirable_weight=1.5)
trainer = KTOTrainer(model=model, args=arguments, peft_config=LoraConfig(r=32, target_modules=["q_proj", "v_proj"]))
"""


def test_a_program_that_uses_trl_is_read_and_not_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command is the one of the same options in a YAML file; peft's defaults are those of LoraConfig."""
    (tmp_path / "train.py").write_text(PROGRAM)
    options: dict[str, Any] = {"learning_rate": 5e-6, "desirable_weight": 1.5, "output_dir": "out"}
    options |= {"model_name_or_path": "org/model", "dataset_name": "rows.jsonl", "use_peft": True, "lora_r": 32}
    options |= {"lora_alpha": 8, "lora_dropout": 0.0, "lora_target_modules": ["q_proj", "v_proj"]}
    (tmp_path / "train.json").write_text(json.dumps(options))
    said = []
    for arguments in (["train.py"], ["train.json", "--trainer", "trl", "--algorithm", "kto"]):
        command.main([str(tmp_path / arguments[0]), *arguments[1:]])
        said.append(capsys.readouterr().out.partition("\n")[2])
    assert said[0] == said[1]
    assert "model.peft.lora_tuning.alpha=8.0" in said[0]


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


DATA, MODEL = "model.data.data_prefix", "pretrained_checkpoint.restore_from_path"
LOAD = "rows = load_dataset('json', data_files={'train': 'a.jsonl', 'test': 'b.jsonl'})\n"
EXPERTS = {"router_aux_loss_coef": 0.001, "output_router_logits": False, "num_experts_per_tok": 8, "num_hidden_layers": 48}
# Programs and scripts, the values that their commands have, and the parts of remarks; None for a key that is not set.
READ: list[tuple[str, str, dict[str, object], list[Message]]] = [
    ("a.py", f"{LOAD}KTOTrainer(model='o/m', train_dataset=rows['train'], eval_dataset=rows['test'])",
     {DATA: {"train": "a.jsonl", "validation": "b.jsonl"}, MODEL: "hf:o/m", "model.global_batch_size": 8,
      "trainer.kto.val_check_interval": 0}, []),
    ("a.py", f"{LOAD}KTOTrainer('o/m', train_dataset=rows['train'], callbacks=[mine()])",
     {DATA: "a.jsonl"},
     [Message("data_files.test=b.jsonl"), Message("callbacks=[mine()]", "docs/guides/python.md")]),
    ("a.py", "rows = load_dataset('o/d', split='train[:1000]')\nDPOTrainer('o/m', train_dataset=rows.map(f))",
     {DATA: "hf:o/d"},
     [Message("split=train[:1000]", "all rows"), Message("map in", "a.py:2", "not applied")]),
    ("a.py", "a = DPOConfig('o', max_length=None, model_init_kwargs={'dtype': 'bfloat16', 'foo': 1})\na.beta = 0.5\n"
     "m = AutoModelForCausalLM.from_pretrained('o/m', revision='r').to('cuda')\nDPOTrainer(m, ref_model='o/n', args=a)",
     {MODEL: "hf:o/m@r", "model.reference.restore_from_path": "hf:o/n", "model.dpo.ref_policy_kl_penalty": 0.5,
      "model.data.seq_length": None, "trainer.precision": "bf16"}, [Message("model_init_kwargs.foo=1")]),
    ("a.py", "rows = load_dataset('o/d')\nrows = rows['train'].train_test_split(test_size=0.1)\n"
     "ORPOTrainer('o/m', args=ORPOConfig(), train_dataset=rows['train'], eval_dataset=rows['test'])",
     {DATA: "hf:o/d", "model.data.splits_string": "90,10", "model.dpo.preference_loss": "orpo"}, []),
    ("a.py", "m, t = FastLanguageModel.from_pretrained(model_name='o/m', dtype=None)\n"
     "m = FastLanguageModel.get_peft_model(m, r=64, lora_alpha=32, target_modules=['q_proj'], bias='none')\n"
     "DPOTrainer(model=m, args=DPOConfig(beta=0.2), tokenizer=t)",
     {MODEL: "hf:o/m", f"{TUNING}.adapter_dim": 64, f"{TUNING}.alpha": 32.0, f"{TUNING}.target_modules": ["q_proj"]},
     [Message("bias=none", "no adapters")]),
    ("a.py", "m = FastModel.get_peft_model(FastModel.from_pretrained('o/m'))\nKTOTrainer(m)",
     {f"{TUNING}.adapter_dim": 16, f"{TUNING}.alpha": 16.0, f"{TUNING}.target_modules": ["all-linear"]}, []),
    ("a.py", "m = PeftModel.from_pretrained(AutoModel.from_pretrained('o/m'), model_id='o/a', is_trainable=True)\n"
     "KTOTrainer(m)", {MODEL: "hf:o/m", "model.peft.restore_from_path": "hf:o/a", "model.peft.peft_scheme": "lora"},
     [Message("is_trainable=true")]),
    ("a.py", "m = AutoModel.from_pretrained('o/m', quantization_config=BitsAndBytesConfig(), token=os.environ['T'])\n"
     "a = load_dataset('o/d')\na = a.map(f)\nDPOTrainer(m, train_dataset=a['x'], eval_dataset=a['y'])",
     {MODEL: "hf:o/m", DATA: {"train": "hf:o/d:x", "validation": "hf:o/d:y"}},
     [Message("quantization_config='BitsAndBytesConfig()'", "not quantised"), Message("token='os.environ")]),
    ("a.sh", "swift rlhf --rlhf_type kto --adapters ./a ./b", {"model.peft.restore_from_path": "./a"},
     [Message("adapters=[./a,./b]", "one folder")]),
    ("a.py", "a, b = load_dataset('o/d', split=['train', 'test'])\nKTOTrainer('o/m', train_dataset=a, eval_dataset=b)",
     {DATA: {"train": "hf:o/d", "validation": "hf:o/d:test"}}, []),
    ("a.py", "def get():\n    rows = load_dataset('o/d')\n    return rows['train'], rows['test']\na, b = get()\n"
     "KTOTrainer('o/m', train_dataset=a, eval_dataset=b)", {DATA: "hf:o/d"}, [Message("eval_dataset=b", "validation")]),
    ("a.py", "from trl import DPOTrainer as T, DPOConfig as C\nclass MyTrainer(T):\n    pass\nrate: float = 4e-6\n"
     "a: C = C('o', learning_rate=rate)\nsetattr(a, 'beta', 0.3)\nm = AutoModel.from_pretrained('o/m')\n"
     "MyTrainer(m, create_reference_model(m), a)",
     {MODEL: "hf:o/m", "model.reference.restore_from_path": None, "model.optim.lr": 4e-6,
      "model.dpo.ref_policy_kl_penalty": 0.3}, [Message("methods of MyTrainer", "a.py:2")]),
    ("a.py", "import trl\nclass DPOTrainer(trl.DPOTrainer):\n    pass\nDPOTrainer('o/m', args=trl.DPOConfig(beta=0.3))",
     {MODEL: "hf:o/m", "model.dpo.ref_policy_kl_penalty": 0.3}, [Message("methods of DPOTrainer", "a.py:2")]),
    ("a.py", "rate, beta = 4e-6, 0.3\n"
     "CPOTrainer('o/m', CPOConfig(loss_type='simpo', cpo_alpha=0.0, learning_rate=rate, beta=beta))",
     {"model.dpo.preference_loss": "simpo", "model.dpo.sft_loss_weight": None, "model.optim.lr": 4e-6,
      "model.dpo.ref_policy_kl_penalty": 0.3}, [Message("without effect", "cpo_alpha=0.0")]),
    ("a.py", "def make():\n    return DPOConfig('o', learning_rate=4e-6)\na = make()\na.beta = 0.3\n"
     "DPOTrainer('o/m', args=a)",
     {"model.optim.lr": 4e-6, "model.dpo.ref_policy_kl_penalty": 0.3, "exp_manager.explicit_log_dir": "o"}, []),
    ("a.sh", "accelerate launch --num_processes 8 --num_machines 2 --mixed_precision bf16 scripts/run_kto.py "
     "--dataset_name o/d --eval_strategy epoch --no_remove_unused_columns 2>&1 | tee log &",
     {DATA: {"train": "hf:o/d", "validation": "hf:o/d:test"}, "trainer.devices": 4, "trainer.num_nodes": 2},
     [Message("--mixed_precision", "launcher"), Message("remove_unused_columns=false")]),
    ("a.sh", "torchrun --nproc_per_node 2 mine.py --config a.yaml --beta 0.3",
     {"model.kto.ref_policy_kl_penalty": 0.3, "model.optim.lr": 5e-7, "model.global_batch_size": 16}, []),
    ("a.sh", "ARGS=(--beta 3)\nsrun torchrun --nnodes=2 --nproc-per-node=8 -m trl.scripts.kto \"${ARGS[@]}\" "
     "--dataset_name o/d\npython -m trl.scripts.dpo", {DATA: "hf:o/d", "model.global_batch_size": 128, "trainer.devices": 8},
     [Message("${ARGS[@]}", "a.sh:2", "write it there")]),
    ("a.yaml", "{loss_type: kto, max_steps: 1000, num_train_epochs: 2, eval_strategy: steps, eval_steps: 0.1, "
     "save_steps: 0.25}",
     {"trainer.kto.val_check_interval": 100, "trainer.kto.save_interval": 250}, []),
    ("a.yaml", "{loss_type: kto, num_train_epochs: 2, eval_strategy: steps, eval_steps: 0.1}",
     {"trainer.kto.val_check_interval": 0.2}, []),
    ("a.sh", "export NPROC_PER_NODE=2\nLR=1e-5 # it's fast\nswift rlhf --rlhf_type kto --dataset 'a#b.jsonl' c.jsonl#20 \\\n"
     " --lr $LR --beta $NONE --output_dir \"out/${SIZE:-7b}/$((4 / 2))\"",
     {DATA: ["a", "c.jsonl"], "model.optim.lr": 1e-5, "trainer.devices": 2, "exp_manager.explicit_log_dir": "out/7b/2",
      "model.kto.ref_policy_kl_penalty": 0.1}, [Message("beta=$NONE", "a.sh:3"), Message("c.jsonl", "20")]),
    ("a.sh", "trl kto --dataset_name a.jsonl --max_steps 1 2>&1 | tee log\ntrl dpo --dataset_name b.jsonl",
     {DATA: "a.jsonl", "trainer.kto.max_steps": 1},
     [Message("line 2")]),
    ("a.yaml", "{loss_type: [exo_pair, robust], label_smoothing: 0.1}",
     {"model.dpo.label_smoothing": 0.1, "model.dpo.exo_label_smoothing": 0.1}, []),
    ("a.yaml", "{loss_type: [sigmoid, aot], label_smoothing: 0.1}", {"model.dpo.label_smoothing": 0.1},
     [Message("label_smoothing", "sigmoid is smoothed as well")]),
    ("a.yaml", "{loss_type: hinge, label_smoothing: 0.1, warmup_ratio: 0.1, warmup_steps: 5}",
     {"model.dpo.label_smoothing": None},
     [Message("label_smoothing=0.1", "ignores"), Message("warmup_ratio=0.1", "warmup_steps")]),
    ("a.yaml", "{loss_type: kto, model_name_or_path: experts}", {"model.moe_aux_loss_coeff": 0.000167},
     [Message("router_aux_loss_coef=0.001", "8 experts", "48 layers")]),
    ("a.yaml", "{loss_type: kto, model_name_or_path: experts, router_aux_loss_coef: 0.9}",
     {"model.moe_aux_loss_coeff": 0.15}, [Message("router_aux_loss_coef=0.9", "8 experts", "48 layers")]),
    ("a.yaml", "{loss_type: kto, model_name_or_path: o/m}", {"model.moe_aux_loss_coeff": None},
     [Message("router_aux_loss_coef")]),
    ("a.yaml", "{loss_type: kto, router_aux_loss_coef: 0.02}", {"model.moe_aux_loss_coeff": None},
     [Message("router_aux_loss_coef=0.02", "experts per token / layers")]),
    ("a.yaml", "{loss_type: kto, router_aux_loss_coef: 0}", {"model.moe_aux_loss_coeff": 0}, []),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "values", "remarks"), READ)
def test_programs_and_scripts_are_read(
    name: str, text: str, values: dict[str, object], remarks: list[Message], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.yaml").write_text("{learning_rate: 5.0e-7, beta: 0.2}")
    (tmp_path / "mine.py").write_text("TrlParser((ScriptArguments, KTOConfig))")
    (tmp_path / "experts").mkdir()
    (tmp_path / "experts/config.json").write_text(json.dumps(EXPERTS))
    (tmp_path / name).write_text(text)
    given = read_options(Path(name))
    found = translate(given.values, trainer=given.trainer, method=given.method)
    lines = [*given.notes, *found.remarks(), *(f"{option}: {reason}" for option, reason in given.without.items())]
    assert {key: found.overrides.get(key) for key in values} == values
    assert [remark for remark in remarks if remark not in lines] == []


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
