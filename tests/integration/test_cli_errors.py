"""A wrong command line: everything that is wrong, once, status 2, and nothing was started or written."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from nemo_kto.recipes import RECIPES
from tests.integration.commands import CLI, GOOD, REPOSITORY, of_every_algorithm, pretend, run, run_anew

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
SAID = """\
nemo-kto: 9 mistakes in the configuration, nothing was started
  pretrained_checkpoint.restore_from_path must be a Hugging Face folder (with config.json) or one of our checkpoints (with \
trainer.json), got nowhere; download it or correct the path
  model.tensor_model_parallel_size * pipeline_model_parallel_size = 2 * 1 = 2 must divide the number of ranks, got 3; \
use a multiple of 2 ranks (trainer.devices) or smaller sizes
  model.micro_batchsize is not a key of the configuration, got model.micro_batchsize=2; did you mean model.micro_batch_size?
  model.global_batch_size must be an integer, got 'many'
  model.ALGORITHM.preference_loss must be LOSSES, got none
  model.peft.peft_scheme must be none or lora, got dora
  trainer.max_time must be written DD:HH:MM:SS (days:hours:minutes:seconds), got 5h; e.g. trainer.max_time=00:03:45:00
  model.optim.betas must be two numbers from 0 to below 1, got [0.9, 1.5]; e.g. model.optim.betas=[0.9,0.98]
  model.sequence_parallel must be true or false, got 'perhaps'
"""


LOSSES = {
    "kto": "kto, apo_zero_unpaired or bco",
    "dpo": "dpo, ipo, hinge, robust, exo_pair, nca_pair, bco_pair, sppo_hard, "
    "apo_zero, apo_down, discopop, aot, aot_unpaired, rpo_sq, rpo_bwd_kl, rpo_fwd_kl, simpo or orpo",
}


@of_every_algorithm("kto")
def test_all_mistakes_at_once(tmp_path: Path, name: str) -> None:
    env = pretend(tmp_path, "raise AssertionError('started')")
    before = sorted(tmp_path.iterdir())
    script = str(REPOSITORY / f"examples/nlp/gpt/train_gpt_{name}.py")
    wrong = [override.replace("ALGORITHM", name) for override in WRONG]
    said = SAID.replace("ALGORITHM", name).replace("LOSSES", LOSSES[name])
    for command in ([sys.executable, script], [*CLI, name]):
        done = run([*command, *wrong], cwd=tmp_path, env=env)
        assert (done.returncode, done.stdout, done.stderr) == (2, "", said)
    assert sorted(tmp_path.iterdir()) == before


TOO_FEW = (
    "nemo-kto: 2 mistakes in the configuration, nothing was started\n"
    "  model.seeds is not a key of the configuration, got model.seeds=1; did you mean model.seed?\n"
    "  trainer.devices must fit the ranks that were started (trainer.num_nodes * trainer.devices = 1 * 4 = 4), got 2; "
    "start 4 ranks or set trainer.num_nodes and trainer.devices to what you started\n"
)


@pytest.mark.full
@pytest.mark.parametrize("name", RECIPES)
def test_printed_once_and_not_once_a_rank(tmp_path: Path, name: str) -> None:
    env = {**pretend(tmp_path, "raise AssertionError('started')"), "OMP_NUM_THREADS": "1"}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "nemo_kto.launch.cli", name]
    done = run_anew([*torchrun, *GOOD, "model.seeds=1", "trainer.devices=4"], cwd=tmp_path, env=env)
    assert done.returncode != 0
    assert done.stderr.count("nothing was started") == 1
    assert TOO_FEW in done.stderr


@pytest.mark.parametrize(("rank", "said"), [(0, TOO_FEW), (1, "")])
def test_the_first_rank_speaks_for_all(tmp_path: Path, rank: int, said: str) -> None:
    env = pretend(tmp_path, "raise AssertionError('started')")
    env |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    done = run([*CLI, "kto", *GOOD, "model.seeds=1", "trainer.devices=4"], cwd=tmp_path, env=env)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", said)


def test_what_must_be_given_and_machines_that_are_not_there(tmp_path: Path) -> None:
    env = pretend(tmp_path, "raise AssertionError('started')")
    done = run([*CLI, "kto", "hardware=cpu", "trainer.num_nodes=2"], cwd=tmp_path, env=env)
    assert done.returncode == 2
    assert done.stderr == (
        "nemo-kto: 3 mistakes in the configuration, nothing was started\n"
        "  trainer.num_nodes must be 1 where no ranks were started for it, got 2; "
        "start the ranks with torchrun or srun, see examples/slurm\n"
        "  pretrained_checkpoint.restore_from_path must be given, got nothing; name the folder of a Hugging Face model\n"
        "  model.data.data_prefix must be given, got nothing; name a jsonl file, a folder or a list of them\n"
    )


def test_a_configuration_of_ones_own_that_is_wrong(tmp_path: Path) -> None:
    env = pretend(tmp_path, "raise AssertionError('started')")
    (tmp_path / "mine.yaml").write_text("defaults:\n  - gpt_kto\n  - _self_\nmodel:\n  optim:\n    learning_rate: 1\n")
    done = run([*CLI, "kto", "--config-dir", ".", "--config-name", "mine", *GOOD], cwd=tmp_path, env=env)
    assert done.returncode == 2
    assert done.stderr == (
        "nemo-kto: 1 mistake in the configuration, nothing was started\n"
        "  model.optim.learning_rate (mine.yaml:6) is model.optim.lr here, got 1\n"
    )


def test_keys_of_one_algorithm_given_to_the_other(tmp_path: Path) -> None:
    env = pretend(tmp_path, "raise AssertionError('started')")
    given = ["trainer.kto.max_steps=3", "model.kto.auto_balance=true", "model.dpo.label_smoothing=0.1"]
    done = run([*CLI, "dpo", *GOOD, *given, "model.dpo.preference_loss=ipo"], cwd=tmp_path, env=env)
    assert done.returncode == 2
    assert done.stderr == (
        "nemo-kto: 3 mistakes in the configuration, nothing was started\n"
        "  trainer.kto.max_steps is not a key of the configuration, got trainer.kto.max_steps=3; "
        "did you mean trainer.dpo.max_steps?\n"
        "  model.kto.auto_balance is not a key of the configuration, got model.kto.auto_balance=true; "
        "`nemo-kto dpo --help` lists all keys\n"
        "  model.dpo.label_smoothing must be left out with ipo, which does not take it, got 0.1; "
        "it is for dpo, robust, aot, aot_unpaired or simpo\n"
    )


@pytest.mark.parametrize(("name", "other"), [("kto", "dpo"), ("dpo", "kto")])
def test_the_configuration_of_the_other_algorithm(tmp_path: Path, name: str, other: str) -> None:
    env = pretend(tmp_path, "raise AssertionError('started')")
    (tmp_path / "mine.yaml").write_text(f"defaults:\n  - gpt_{other}\n  - _self_\n")
    done = run([*CLI, name, "--config-dir", ".", "--config-name", "mine", *GOOD], cwd=tmp_path, env=env)
    assert done.returncode == 2
    assert done.stderr == (
        "nemo-kto: 1 mistake in the configuration, nothing was started\n"
        f"  mine.yaml must be a configuration for {name}, got one for {other}; run `nemo-kto {other}`\n"
    )


def test_a_configuration_without_the_types_of_an_algorithm(tmp_path: Path) -> None:
    env = pretend(tmp_path, "raise AssertionError('started')")
    (tmp_path / "mine.yaml").write_text("model:\n  seed: 7\n")
    done = run([*CLI, "dpo", "--config-dir", ".", "--config-name", "mine"], cwd=tmp_path, env=env)
    assert done.returncode == 2
    assert done.stderr == (
        "nemo-kto: 1 mistake in the configuration, nothing was started\n"
        "  mine.yaml does not compose: its defaults must begin with gpt_kto or gpt_dpo, which bring the keys\n"
    )
    assert not (tmp_path / "outputs").exists()  # where Hydra writes unless it is told otherwise


def test_a_loss_that_does_not_take_an_option_and_one_that_does_in_a_sweep(tmp_path: Path) -> None:
    env = pretend(tmp_path, "print(cfg.loss.preference_loss, cfg.loss.loss_options())")
    done = run([*CLI, "dpo", *GOOD, "model.dpo.simpo_gamma=1.0"], cwd=tmp_path, env=env)
    assert (done.returncode, done.stdout) == (2, "")
    text = "model.dpo.simpo_gamma must be left out with dpo, which does not take it, got 1.0; it is for simpo\n"
    assert done.stderr == f"nemo-kto: 1 mistake in the configuration, nothing was started\n  {text}"
    sweep = ["--multirun", "model.dpo.preference_loss=dpo,simpo", "model.dpo.simpo_gamma=1.0"]
    done = run([*CLI, "dpo", *GOOD, *sweep], cwd=tmp_path, env=env)
    assert (done.returncode, done.stdout) == (0, "dpo {}\nsimpo {'simpo_gamma': 1.0}\n")
    assert done.stderr == f"nemo-kto: not used in this job: {text}"


def test_the_ranks_of_a_job_of_a_sweep_are_not_given_what_its_loss_does_not_take(tmp_path: Path) -> None:
    env = pretend(tmp_path, "open(f'rank{rank}', 'w').write(str(cfg.loss.loss_options()))")
    sweep = ["--multirun", "model.dpo.preference_loss=dpo", "model.dpo.simpo_gamma=1.0", "trainer.devices=2"]
    done = run([*CLI, "dpo", *GOOD, *sweep], cwd=tmp_path, env=env)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert [(tmp_path / f"rank{rank}").read_text() for rank in (0, 1)] == ["{}", "{}"]


def test_a_sweep_with_a_value_that_cannot_be_starts_no_job(tmp_path: Path) -> None:
    env = pretend(tmp_path, "print('started')")
    done = run([*CLI, "dpo", *GOOD, "--multirun", "model.dpo.label_smoothing=0.1,some"], cwd=tmp_path, env=env)
    assert (done.returncode, done.stdout, done.stderr) == (
        2,
        "",
        "nemo-kto: 1 mistake in the configuration, nothing was started\n"
        "  model.dpo.label_smoothing must be a float or null, got 'some'\n",
    )


def test_options_of_the_command_lines_of_other_trainers(tmp_path: Path) -> None:
    env = pretend(tmp_path, "raise AssertionError('started')")
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
        "nemo-kto: 6 mistakes in the configuration, nothing was started\n"
        "  model_name_or_path is pretrained_checkpoint.restore_from_path here, got --model_name_or_path=model\n"
        "  learning_rate is model.optim.lr here, got --learning_rate=1e-5\n"
        "  beta is model.kto.ref_policy_kl_penalty here, got --beta=0.1\n"
        "  lora-target-modules is model.peft.lora_tuning.target_modules here, got --lora-target-modules=q_proj k_proj\n"
        "  bf16 is trainer.precision here (bf16), got --bf16=true\n"
        "  model.seed must be written KEY=VALUE, without hyphens before it, got --model.seed=3\n"
    )


def test_an_unknown_command(tmp_path: Path) -> None:
    done = run([*CLI, "ktoo"], cwd=tmp_path, env=pretend(tmp_path, "pass"))
    assert done.returncode == 2
    assert done.stderr.startswith(
        "nemo-kto: the command must be kto, dpo, plan, export, checkpoint, data preview or data check, got ktoo\n"
    )


def test_export_of_nothing(tmp_path: Path) -> None:
    done = run([*CLI, "export", "nowhere", "out"], cwd=tmp_path, env=pretend(tmp_path, "pass"))
    assert done.returncode == 2
    assert done.stderr.endswith("nemo-kto export: error: CHECKPOINT must be a folder that exists, got nowhere\n")
