"""Help, suggestions and completions of the commands, and commands of tools that are absent."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from nemo_kto.algorithms.recipes import RECIPES
from nemo_kto.cli import main as cli
from nemo_kto.cli.command import tool
from nemo_kto.config import compose
from nemo_kto.config.checker import read_positions
from nemo_kto.errors import UserError
from tests.helpers.commands import CLI, environment, run, run_here
from tests.helpers.documented import REPOSITORY
from tests.helpers.messages import Message, raises
from tests.helpers.outputs import assert_output


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")


@pytest.mark.parametrize("command", ["", "data", "checkpoint", *cli.COMMANDS], ids=lambda command: command or "nemo-kto")
def test_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_here(*command.split(), "--help") == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    assert_output("_".join(["help", *command.split()]), printed.out)


@pytest.mark.parametrize("words", [(), ("help",), ("-h",)], ids=" ".join)
def test_the_list_of_commands(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_here(*words) == 0
    assert_output("help", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("words", "error"),
    {
        "comand": Message("nemo-kto:", "command", "nemo-kto --help", "got comand"),
        "train": Message("nemo-kto:", "got train, did you mean kto or dpo?"),
        "cmopare": Message("nemo-kto:", "got cmopare", "did you mean compare?"),
        "checkpiont ls x": Message("nemo-kto:", "got checkpiont", "did you mean checkpoint?"),
        "data chekc": Message("nemo-kto:", "preview, check or tokenise", "did you mean check?", "nemo-kto data --help"),
        "data": Message("nemo-kto:", "command", "nemo-kto data --help"),
        "--verison": Message("nemo-kto:", "no option --verison", "did you mean --version?", "nemo-kto --help"),
        "plan kto --gpu-memroy 80": Message("nemo-kto plan:", "--gpu-memroy", "--gpu-memory", "nemo-kto plan --help"),
        "plan sft": Message("nemo-kto plan:", "kto|dpo", "must be kto or dpo", "sft"),
        "plan kto --gpus": Message("nemo-kto plan:", "--gpus", "argument", "--help"),
        "check": Message("nemo-kto check:", "kto|dpo", "given", "none", "nemo-kto check --help"),
        "label answers.jsonl": Message("nemo-kto label:", "--out", "given", "none", "nemo-kto label --help"),
        "report a b --watch 0": Message("nemo-kto report:", "--watch", "above 0", "0", "--watch 30"),
        "chat m --device tpu": Message("nemo-kto chat:", "--device", "auto, cpu or gpu", "tpu"),
        "compare": Message("nemo-kto compare:", "MODEL", "BASE", "--out", "given", "none"),
        "compare --help --out": Message("nemo-kto compare:", "--out", "argument", "--help"),
        "sample --out x": Message("nemo-kto sample:", "PROMPTS", "given", "none"),
        "data check --out x": Message("nemo-kto data check:", "no option --out", "nemo-kto data check --help"),
        "checkpoint ls": Message("nemo-kto checkpoint ls:", "RUN", "given", "none", "nemo-kto checkpoint ls --help"),
        "ui a b": Message("there must be no argument, got a b", "nemo-kto ui --help"),
        "checkpoint ls a b": Message("RUN must be the last argument, got b after it", "nemo-kto checkpoint ls --help"),
        "kto": Message("nemo-kto kto: MODEL and DATA", "none", "thumbs.csv", "nemo-kto chat results/gpt_kto --against"),
        "kto --config-name": Message("nemo-kto kto:", "--config-name", "argument", "--help"),
    }.items(),
    ids=str,
)
def test_mistakes_on_a_command_line(words: str, error: Message, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_here(*words.split()) == 2
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", error)


@pytest.fixture
def without_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package without the folder tools/plan."""

    class Absent:
        @staticmethod
        def find_spec(name: str, *_: object) -> None:
            if name.startswith("nemo_kto.tools.plan"):
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    for name in [name for name in sys.modules if name.startswith("nemo_kto.tools.plan")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Absent, *sys.meta_path])


@pytest.mark.usefixtures("without_plan")
def test_a_tool_that_is_absent(capsys: pytest.CaptureFixture[str]) -> None:
    """Its commands vanish, and what needs it says so; the others work."""
    assert run_here("--help") == 0
    listed = capsys.readouterr().out
    assert ("  plan " in listed, "  check " in listed, "  data check " in listed) == (False, False, True)
    assert run_here("plan", "kto") == 2
    assert capsys.readouterr().err == Message("nemo-kto", "command", "got plan")
    assert run_here("data", "check", "--help") == 0
    with raises(UserError, "nemo_kto.tools.plan", "installed", "install the whole package nemo-kto"):
        tool("plan.auto")


def test_completions() -> None:
    """As the shell asks for them."""

    def completed(*words: str) -> list[str]:
        env = {**environment(), "_NEMO_KTO_COMPLETE": "bash_complete", "COMP_WORDS": " ".join(words)}
        env["COMP_CWORD"] = str(len(words) - 1)
        done = run(CLI, cwd=REPOSITORY, env=env)
        assert done.stderr == ""
        return [line.partition(",")[2] for line in done.stdout.splitlines()]

    assert completed("nemo-kto", "ch") == ["chat", "check", "checkpoint"]
    assert completed("nemo-kto", "data", "t") == ["tokenise"]
    assert completed("nemo-kto", "plan", "d") == ["dpo"]
    assert completed("nemo-kto", "compare", "--re") == ["--reward-model"]
    assert completed("nemo-kto", "data", "chekc", "") == ["preview", "check", "tokenise"]
    source = {**os.environ, "_NEMO_KTO_COMPLETE": "bash_source"}
    printed = subprocess.run(
        [sys.executable, "-m", "nemo_kto"], env=source, capture_output=True, text=True, check=True
    ).stdout
    assert "complete -o default -o nosort" in printed, "bash completes names of files"


@pytest.mark.parametrize("name", RECIPES)
def test_the_example_of_a_command_without_arguments(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(REPOSITORY)
    assert run_here(name) == 2
    check, train, chat = (line.split()[1:] for line in capsys.readouterr().err.splitlines()[1:])
    assert run_here(*check) == 0
    overrides, errors = read_positions(train[1:], RECIPES[name])
    config = compose.load(overrides, source=compose.our_source(RECIPES[name]))
    assert (errors, config.model.data.apply_chat_template) == ([], True)
    assert chat == ["chat", f"results/{RECIPES[name].config_name}", "--against"]
