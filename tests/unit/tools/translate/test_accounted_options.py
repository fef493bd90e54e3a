"""Properties of `nemo-kto translate`: no value is dropped, what is printed can be run, and work is bounded."""

from __future__ import annotations

import ast
import importlib.util
import json
import random
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nemo_kto.algorithms.recipes import RECIPES
from nemo_kto.tools.plan import check_command as check_run
from nemo_kto.tools.translate import translate_command as command
from nemo_kto.tools.translate.option_files import read_options
from nemo_kto.tools.translate.translation import Translation, translate
from tests.conftest import REPOSITORY

MODEL_AND_DATA = {"model_name_or_path": "m", "dataset_name": "d.jsonl"}
# Files with the dataclasses of TRL 1.16, in packages that need not be imported for them, and the method of their options.
CONFIGS = {
    "kto": ("transformers.training_args", "trl.trainer.base_config", "trl.trainer.kto_config"),
    "dpo": ("trl.trainer.dpo_config", "trl.trainer.model_config", "trl.scripts.utils"),
    "cpo": ("trl.experimental.cpo.cpo_config",),
    "orpo": ("trl.experimental.orpo.orpo_config",),
}
# Options whose other values need another option.
TOGETHER: dict[str, dict[str, object]] = {
    "loss_weights": {"loss_type": ["sigmoid", "sft"]},
    "lora_target_modules": {"use_peft": True},
}


def fields(module: str) -> Iterator[tuple[str, str, object]]:
    """Name, type and default of the fields of a module's dataclasses, from its source."""
    package, *inner = module.split(".")
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.submodule_search_locations is not None
    file = Path(spec.submodule_search_locations[0], *inner).with_suffix(".py")
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if (
            not isinstance(node, ast.ClassDef)
            or not node.name.endswith(("Config", "Arguments"))
            or node.name == "DatasetConfig"
        ):
            continue
        for each in node.body:
            if not isinstance(each, ast.AnnAssign) or not isinstance(each.target, ast.Name):
                continue
            keywords = each.value.keywords if isinstance(each.value, ast.Call) else []
            given = next((each.value for each in keywords if each.arg == "default"), each.value)
            try:
                default = ast.literal_eval(given) if given is not None else None
            except ValueError:
                default = None
            yield each.target.id, ast.unparse(each.annotation), default


def other_value(kind: str, default: object) -> object:
    """A value of this type that is not the default."""
    if isinstance(default, bool) or (default is None and "bool" in kind):
        return not default
    if isinstance(default, int | float) or (default is None and ("int" in kind or "float" in kind)):
        return 3 if not default else default * 2
    if "list" in kind and "str |" not in kind:
        return ["other"]
    return {"a": 1} if kind.startswith("dict") else "other"


def is_accounted(name: str, found: Translation, without: Translation) -> bool:
    remarks = "\n".join(found.remarks())
    return found.overrides != without.overrides or f"{name}=" in remarks or f"{name}." in remarks


FIELDS = [(method, *each) for method, modules in CONFIGS.items() for module in modules for each in fields(module)]


def test_every_option_of_trl_is_in_the_command_or_a_remark() -> None:
    lost = []
    for method, name, kind, default in FIELDS:
        given = {**MODEL_AND_DATA, **TOGETHER.get(name, {})}
        for value in (other_value(kind, default), None if default is not None else "5"):
            with_it, without = (
                translate(options, trainer="trl", method=method) for options in (given | {name: value}, given)
            )
            if not is_accounted(name, with_it, without):
                lost.append((method, name, value))
    assert len(FIELDS) > 190
    assert lost == []


# Options with values for which a run of this machine is possible.
TRL: dict[str, list[object]] = {
    "learning_rate": [5e-7, "2e-6"], "beta": [0.05, 1], "per_device_train_batch_size": [2],
    "num_train_epochs": [1, 0.5, 2.5], "gradient_accumulation_steps": [4],
    "lr_scheduler_type": ["cosine", "constant_with_warmup", "cosine_with_restarts", "polynomial"],
    "warmup_steps": [0.1, 3], "warmup_ratio": [0.2], "max_length": [64, None], "bf16": [False], "max_steps": [3, -1],
    "weight_decay": [0.01], "adam_beta2": [0.95], "max_grad_norm": [0.3], "use_peft": [True], "lora_r": [4],
    "lora_alpha": [16], "lora_target_modules": [["q_proj", "v_proj"], "all-linear"],
    "lora_modules_to_save": [["lm_head"]], "logging_steps": [1, 0.5], "save_steps": [5], "save_strategy": ["epoch", "no"],
    "eval_strategy": ["epoch", "steps"], "eval_steps": [2], "seed": [7], "precompute_ref_log_probs": [True],
    "report_to": ["none", "wandb", ["tensorboard"]], "optim": ["adamw_torch", "adafactor"], "push_to_hub": [True, False],
    "remove_unused_columns": [False], "gradient_checkpointing": [True, False], "trackio_space_id": ["x"],
    "router_aux_loss_coef": [0.0], "lr_scheduler_kwargs": [{"min_lr_rate": 0.1}], "dataloader_num_workers": [1],
    "run_name": ["it's $x"], "save_total_limit": [2], "sync_ref_model": [True], "torch_compile": [True],
    "neftune_noise_alpha": [5],
}  # fmt: skip
OF_METHOD: dict[str, dict[str, list[object]]] = {
    "kto": {"desirable_weight": [1.5], "undesirable_weight": [0.5], "loss_type": ["kto", "apo_zero_unpaired"]},
    "dpo": {
        "loss_type": ["sigmoid", ["sigmoid", "robust"], ["exo_pair", "aot"]],
        "label_smoothing": [0.1],
        "ld_alpha": [0.5],
    },
}
SWIFT: dict[str, list[object]] = {
    "tuner_type": ["lora", "full"], "lora_rank": [4], "learning_rate": [2e-5], "max_length": [64],
    "num_train_epochs": [1], "per_device_train_batch_size": [2], "gradient_accumulation_steps": [2],
    "split_dataset_ratio": [0.1], "warmup_ratio": [0.05], "attn_impl": ["flash_attn"], "padding_free": [True],
    "deepspeed": ["zero2"], "target_modules": ["all-linear"], "system": ["a b"], "loss_scale": ["last_round", "all"],
    "optimizer": ["muon"], "truncation_strategy": ["delete", "right"], "use_hf": [True],
}  # fmt: skip


def drawn(draw: random.Random, table: dict[str, list[object]], number: int) -> dict[str, object]:
    return {name: draw.choice(table[name]) for name in draw.sample(sorted(table), number)}


def as_script(start: str, options: dict[str, object]) -> str:
    words = []
    for name, value in options.items():
        values = [json.dumps(value)] if isinstance(value, dict) else value if isinstance(value, list) else [value]
        words.append(shlex.join([f"--{name}", *map(str, values)]))
    return f"# it's a comment\nset -e\nLR=3\n{start} \\\n  " + " \\\n  ".join(words) + " 2>&1 | tee log\n"


def written(draw: random.Random, method: str, model: str, rows: str, folder: Path) -> tuple[Path, dict[str, object]]:
    """A file of another trainer in one of its forms, and the options in it."""
    form = draw.choice(["trl", "yaml", "py", "swift"])
    options = drawn(draw, (SWIFT if form == "swift" else TRL) | OF_METHOD[method] if form != "swift" else SWIFT, 14)
    options = {name: value for name, value in options.items() if value is not None or form in ("yaml", "py")}
    file = folder / f"{method}_train.{'sh' if form in ('trl', 'swift') else form}"
    if form == "py":
        lora = {name: options.pop(name) for name in list(options) if name.startswith(("lora", "use_peft"))}
        peft = "peft_config=LoraConfig(r=4), " if lora else ""
        config = ", ".join(f"{name}={value!r}" for name, value in options.items())
        text = f"rows = load_dataset('json', data_files={{'train': {rows!r}}})\nargs = {method.upper()}Config({config})\n"
        file.write_text(f"{text}{method.upper()}Trainer({model!r}, args=args, {peft}train_dataset=rows['train'])\n")
        return file, options
    place = {"model": model, "dataset": rows, "rlhf_type": method} if form == "swift" else {"model_name_or_path": model}
    place |= {} if form == "swift" else {"dataset_name": rows}
    if form == "yaml":
        file.write_text(json.dumps(place | options))
    else:
        file.write_text(as_script("swift rlhf" if form == "swift" else f"trl {method}", place | options))
    return file, options


def printed(file: Path, method: str, capsys: pytest.CaptureFixture[str]) -> tuple[list[str], str]:
    """The words of the printed command, and the comments below it."""
    command.main([str(file), *(["--trainer", "trl", "--algorithm", method] if file.suffix == ".yaml" else [])])
    script, _, comments = capsys.readouterr().out.partition("\n\n")
    return shlex.split(script.replace("\\\n", ""), comments=True)[1:], comments


@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.full) for seed in range(3, 10))])
def test_a_printed_command_passes_the_check_of_a_run(
    seed: int, tiny_llama: Path, kto_rows: Path, dpo_rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    draw = random.Random(seed)
    method, rows = draw.choice([("kto", kto_rows), ("dpo", dpo_rows)])
    file, options = written(draw, method, str(tiny_llama), str(rows), tmp_path)
    words, comments = printed(file, method, capsys)
    assert "to be corrected" not in comments
    given, lost = read_options(file).values, []
    for name in options:
        arguments: dict[str, Any] = {"recipe": RECIPES[method], "trainer": "ms-swift" if "rlhf_type" in given else "trl"}
        without = translate({key: value for key, value in given.items() if key != name}, **arguments)
        if not is_accounted(name, translate(given, **arguments), without):
            lost.append(name)
    assert lost == []
    settings = ("model.data.seq_length=64", f"exp_manager.exp_dir={tmp_path}", f"model.data.cache_dir={tmp_path}/cache")
    assert check_run.main([*words, *settings, "exp_manager.create_wandb_logger=false"]) == 0, file.read_text()


# Files whose work or recursion is not bounded by their size, unless it is limited; the part of the message, if one is due.
LARGE: dict[str, tuple[str, str]] = {
    "blank.sh": ("\n" * 2**20, "got none"),
    "spaces.sh": ((" " * 120 + "\n") * 8000, "got none"),
    "comments.sh": ("#\n" * 2**19, "got none"),
    "words.sh": ("trl kto --report_to " + "a " * 150_000, ""),
    "variables.sh": ("a=" + "x" * 400_000 + "\ntrl kto --a " + "$a" * 200_000, "variables.sh:2"),
    "doubled.sh": ("a=xx\n" + "a=$a$a\n" * 60 + "trl kto --a $a", "values of its variables"),
    "dollars.sh": ("trl kto --a " + "$(" * 100_000, ""),
    "braces.sh": ("${" * 100_000, "got none"),
    "quotes.sh": ("\n\ntrl kto --a '" + "a" * 2**19, "quotes.sh:3"),
    "quotient.sh": (f"trl kto --beta $(expr {'9' * 5000} / 3)", ""),
    "config.sh": ("trl kto --config " + "a" * 5000, "put it beside the script"),
    "program.sh": ("python " + "a" * 5000 + ".py --beta 1 --desirable_weight 1", ""),
    "model.yaml": ("loss_type: kto\nmodel_name_or_path: " + "a" * 5000, ""),
    "operators.py": ("KTOConfig(beta=" + "+".join(["x"] * 500) + ")", "line 1"),
    "calls.py": ("KTOConfig(beta=f" + "()" * 500 + ")\nKTOConfig(beta=g" + "()" * 500 + ")", "several"),
    "subscripts.py": ("KTOTrainer(train_dataset=load_dataset('a/b')" + "[0]" * 500 + ")", ""),
    "names.py": (
        "a=b['x']\nb=a['y']\nm=get_peft_model(n, 1)\nn=get_peft_model(m, 1)\nKTOTrainer(a, train_dataset=a)",
        "model_name_or_path=a",
    ),
    "arguments.py": ("KTOConfig(" + ",".join(f"a{n}=x" for n in range(10_000)) + ")", "9991 more"),
    "digits.py": ("\nKTOConfig(beta=0x" + "f" * 5000 + ")", "digits.py:2"),
    "digits.yaml": ("loss_type: kto\nbeta: 0x" + "f" * 5000, "digits.yaml:2"),
    "list.yaml": ("loss_type: kto\na: [0x" + "f" * 300 + "]", "list.yaml:2"),
    "deep.json": ('{"loss_type": "kto", "a": ' + "[" * 90 + "]" * 90 + "}", "at most 20"),
    "infinite.yaml": ("loss_type: kto\nalpha: .nan\nbeta: -.inf", "below 2^63"),
}
SEEDS = [
    "trl kto --beta $(expr 1 / 2) --report_to 'a b' \"$x\" 2>&1 | tee a\nx=3 # it's\nexport NPROC_PER_NODE=2\n",
    "loss_type: [sigmoid, ipo]\nloss_weights: [1, 2]\ndatasets: [{path: json, data_files: {train: a}}]\nmax_length:\n",
    "x = load_dataset('json', data_files={'train': 'a'})\nargs = KTOConfig('o', beta=0.1)\nargs.bf16 = True\n"
    "m = AutoModel.from_pretrained('a', dtype=torch.half)\npeft = LoraConfig()\n"
    "KTOTrainer(m, args=args, train_dataset=x['train'], peft_config=peft)\n",
]
PROGRAM = """
import contextlib, io, resource, sys
from pathlib import Path
from nemo_kto.tools.translate import translate_command as translate
from nemo_kto.errors import UserError

resource.setrlimit(resource.RLIMIT_CPU, (100, 100))
resource.setrlimit(resource.RLIMIT_AS, (2**32, 2**32))
for file in sorted(Path(sys.argv[1]).iterdir()):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        try:
            translate.main([str(file), *(["--algorithm", "dpo"] if file.name.startswith("fuzz") else [])])
        except UserError as error:
            out.write(f"error: {error}")
    print(file.name, len(out.getvalue()), out.getvalue()[-400:].replace(chr(10), " "))
"""


def test_small_files_end_with_a_command_or_one_error_in_bounded_time_and_memory(tmp_path: Path) -> None:
    """Also files that a seeded generator has changed; the process has limits of CPU time and memory."""
    draw = random.Random(0)
    for name, (text, _) in LARGE.items():
        (tmp_path / name).write_text(text)
    pieces = ["[", "}", "'", '"', "$(", "--", "\\", "0x" + "f" * 99]
    pieces += [piece for seed in SEEDS for piece in seed.replace("\n", " \n ").split(" ")]
    for number in range(150):
        words = SEEDS[number % 3].split(" ")
        for _ in range(draw.randint(1, 6)):
            words[draw.randrange(len(words))] = draw.choice(["", draw.choice(pieces), draw.choice(pieces) * 3])
        (tmp_path / f"fuzz{number}.{['sh', 'yaml', 'py'][number % 3]}").write_text(" ".join(words))
    run = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    done = subprocess.run(run, capture_output=True, text=True, cwd=REPOSITORY, check=False)
    assert (done.returncode, done.stderr[-2000:]) == (0, "")
    lines = {line.split(" ", 1)[0]: line for line in done.stdout.splitlines()}
    wrong = [
        name for name, (_, part) in LARGE.items() if part not in lines[name] or ("error: " in lines[name]) != bool(part)
    ]
    assert wrong == []
    assert max(int(line.split(" ")[1]) for line in lines.values()) < 20_000
    assert 15 < sum("error: " in line for line in lines.values()) < 140, "both ends"
