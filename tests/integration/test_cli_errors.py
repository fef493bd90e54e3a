"""Wrong command lines: all errors, printed once, status 2, and nothing started or written; trackers that cannot be used."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.helpers.commands import CLI, GOOD, REPOSITORY, TRAINING, environment, of_every_algorithm, run, stub_training
from tests.helpers.messages import Message, assert_names
from tests.helpers.tiny_models import make_rows, write_rows

# ALGORITHM stands for the name of each.
WRONG = [
    "pretrained_checkpoint.restore_from_path=nowhere",
    "model.data.data_prefix=rows.jsonl",
    "trainer.accelerator=cpu",
    "trainer.devices=3",
    "model.tensor_model_parallel_size=2",
    "model.micro_batchsize=2",
    "model.global_batch_size=many",
    "model.ALGORITHM.preference_loss=none",
    "model.reference.mode=adapter",
    "model.peft.peft_scheme=dora",
    "trainer.max_time=5h",
    "model.optim.betas=[0.9,1.5]",
    "model.sequence_parallel=perhaps",
]
SAID = [
    ("nemo-kto", "9"),
    ("pretrained_checkpoint.restore_from_path", "config.json", "trainer.json", "nowhere", "path"),
    ("model.tensor_model_parallel_size", "pipeline_model_parallel_size", "2 * 1 = 2", "3", "trainer.devices"),
    ("model.micro_batchsize", "model.micro_batchsize=2", "model.micro_batch_size?"),
    ("model.global_batch_size", "integer", "'many'"),
    ("model.ALGORITHM.preference_loss", "none"),
    ("model.peft.peft_scheme", "lora", "dora"),
    ("trainer.max_time", "DD:HH:MM:SS", "5h", "trainer.max_time=00:03:45:00"),
    ("model.optim.betas", "0", "1", "[0.9, 1.5]", "model.optim.betas=[0.9,0.98]"),
    ("model.sequence_parallel", "true", "false", "'perhaps'"),
]


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    """An environment in which no training may start."""
    return stub_training(tmp_path, "raise AssertionError('started')")


@of_every_algorithm("kto")
def test_all_errors_in_one_list(tmp_path: Path, env: dict[str, str], name: str) -> None:
    before = sorted(tmp_path.iterdir())
    script = str(REPOSITORY / f"examples/nlp/gpt/train_gpt_{name}.py")
    wrong = [override.replace("ALGORITHM", name) for override in WRONG]
    expected = [Message(*(part.replace("ALGORITHM", name) for part in parts)) for parts in SAID]
    for command in ([sys.executable, script], [*CLI, name]):
        done = run([*command, *wrong], cwd=tmp_path, env=env)
        assert (done.returncode, done.stdout, done.stderr.splitlines()) == (2, "", expected)
    assert sorted(tmp_path.iterdir()) == before


TOO_FEW = (
    *("2", "model.seeds", "model.seeds=1", "model.seed?"),
    *("trainer.devices", "trainer.num_nodes * trainer.devices = 1 * 4 = 4", "start 4 ranks"),
)


@pytest.mark.parametrize(("rank", "expected"), [(0, Message(*TOO_FEW)), (1, "")])
def test_rank_0_prints_for_all_ranks(tmp_path: Path, env: dict[str, str], rank: int, expected: str) -> None:
    env |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    done = run([*CLI, "kto", *GOOD, "model.seeds=1", "trainer.devices=4"], cwd=tmp_path, env=env)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", expected)


def test_missing_keys_and_missing_nodes(tmp_path: Path, env: dict[str, str]) -> None:
    done = run([*CLI, "kto", "hardware=cpu", "trainer.num_nodes=2"], cwd=tmp_path, env=env)
    assert done.returncode == 2
    assert done.stderr == (
        Message(
            "nemo-kto",
            "3",
            "nothing",
            "trainer.num_nodes",
            "1",
            "2",
            "torchrun",
            "srun",
            "examples/slurm",
            "pretrained_checkpoint.restore_from_path",
            "folder",
            "model.data.data_prefix",
            "file",
            "list",
        )
    )


def test_an_invalid_user_configuration(tmp_path: Path, env: dict[str, str]) -> None:
    (tmp_path / "mine.yaml").write_text("defaults:\n  - gpt_kto\n  - _self_\nmodel:\n  optim:\n    learning_rate: 1\n")
    done = run([*CLI, "kto", "--config-dir", ".", "--config-name", "mine", *GOOD], cwd=tmp_path, env=env)
    assert done.returncode == 2
    assert done.stderr == Message("nemo-kto", "1", "nothing", "model.optim.learning_rate", "mine.yaml:6", "model.optim.lr")


def test_a_configuration_without_the_types_of_an_algorithm(tmp_path: Path, env: dict[str, str]) -> None:
    (tmp_path / "mine.yaml").write_text("model:\n  seed: 7\n")
    done = run([*CLI, "dpo", "--config-dir", ".", "--config-name", "mine"], cwd=tmp_path, env=env)
    assert done.returncode == 2
    assert done.stderr == Message("nemo-kto", "1", "nothing", "mine.yaml", "compose", "gpt_kto", "gpt_dpo")
    assert not (tmp_path / "outputs").exists()  # where Hydra writes by default


def test_a_loss_that_does_not_take_an_option_and_one_that_does_in_a_sweep(tmp_path: Path) -> None:
    env = stub_training(tmp_path, "print(cfg.loss.preference_loss, cfg.loss.loss_options())")
    done = run([*CLI, "dpo", *GOOD, "model.dpo.simpo_gamma=1.0"], cwd=tmp_path, env=env)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == Message("nemo-kto", "1", "nothing", "model.dpo.simpo_gamma", "dpo", "1.0")
    sweep = ["--multirun", "model.dpo.preference_loss=dpo,simpo", "model.dpo.simpo_gamma=1.0"]
    done = run([*CLI, "dpo", *GOOD, *sweep], cwd=tmp_path, env=env)
    assert (done.returncode, done.stdout.splitlines()[4:6]) == (0, ["dpo {}", "simpo {'simpo_gamma': 1.0}"])
    assert done.stderr == Message("nemo-kto", "job", "model.dpo.simpo_gamma", "dpo", "1.0")


def test_a_sweep_with_an_invalid_value_starts_no_job(tmp_path: Path) -> None:
    env = stub_training(tmp_path, "print('started')")
    done = run([*CLI, "dpo", *GOOD, "--multirun", "model.dpo.label_smoothing=0.1,some"], cwd=tmp_path, env=env)
    assert (done.returncode, done.stdout, done.stderr) == (
        2,
        "",
        Message("1", "model.dpo.label_smoothing", "null", "'some'"),
    )


def test_options_of_the_command_lines_of_other_trainers(tmp_path: Path, env: dict[str, str]) -> None:
    given = [
        "--model_name_or_path",
        "model",
        "--learning_rate=1e-5",
        "--beta",
        "0.1",
        "--lora-target-modules",
        "q_proj",
        "k_proj",
    ]
    done = run([*CLI, "kto", *GOOD, *given, "--bf16", "--cfg", "job", "--model.seed", "3"], cwd=tmp_path, env=env)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        Message(
            "nemo-kto",
            "6",
            "nothing",
            "model_name_or_path",
            "pretrained_checkpoint.restore_from_path",
            "--model_name_or_path=model",
            "learning_rate",
            "model.optim.lr",
            "--learning_rate=1e-5",
            "model.kto.ref_policy_kl_penalty",
            "--beta=0.1",
            "model.peft.lora_tuning.target_modules",
            "--lora-target-modules=q_proj",
            "k_proj",
            "bf16",
            "trainer.precision",
            "--bf16=true",
            "model.seed",
            "KEY=VALUE",
            "--model.seed=3",
        )
    )


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("sys.exit(0)", ["SystemExit", "sys.exit(0)"]),
        ("raise KeyboardInterrupt", ["KeyboardInterrupt"]),
        ("raise ValueError(os.environ['MY_TOKEN'])", ["ValueError: ***"]),
    ],
)
def test_code_in_a_run_that_ends_its_process(tmp_path: Path, body: str, said: list[str], devices: int) -> None:
    env = stub_training(tmp_path, body) | {"MY_TOKEN": "0123456789abcdef"}
    done = run([*CLI, "kto", *GOOD, f"trainer.devices={devices}"], cwd=tmp_path, env=env)
    if (body, devices) == ("raise KeyboardInterrupt", 1):  # Ctrl-C
        assert (done.returncode, done.stderr) == (130, "")
        return
    assert done.returncode == 1
    assert_names(done.stderr, *said)
    assert "0123456789abcdef" not in done.stdout + done.stderr


def test_an_mlflow_address_of_no_known_kind(tiny_llama: Path, tmp_path: Path) -> None:
    file = write_rows(tmp_path / "rows.jsonl", make_rows(40))
    words = [f"pretrained_checkpoint.restore_from_path={tiny_llama}", f"model.data.data_prefix={file}", "hardware=cpu"]
    words += [f"model.data.cache_dir={tmp_path / 'cache'}", "model.data.seq_length=64", "model.global_batch_size=16"]
    words.append("export.report=false")
    words += ["exp_manager.create_mlflow_logger=true", "exp_manager.mlflow_logger_kwargs.tracking_uri=mlfow://host"]
    done = run([*CLI, "kto", *words], cwd=tmp_path, env=environment(), preload=TRAINING, timeout=300)
    assert done.returncode == 2, done.stderr
    assert_names(done.stderr, "mlflow", "mlfow://host", "exp_manager.create_mlflow_logger=false")
