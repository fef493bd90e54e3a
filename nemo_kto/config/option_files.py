"""Files of other trainers with their options: YAML, JSON, shell scripts with a command line, and programs with TRL."""

from __future__ import annotations

import ast
import itertools
import re
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from nemo_kto.algorithms.recipes import RECIPES
from nemo_kto.errors import UserError
from nemo_kto.utils.files import load_yaml, read_bytes

# Such as $(expr 16 / 4) in a script.
_QUOTIENT = re.compile(r"\$\((?:expr|\() *(\d+) */ *(\d+) *\)\)?")
_RANKS = ("nproc_per_node", "num_processes")  # of torchrun, ms-swift and accelerate
_MAX_BYTES = 2**20
ALGORITHM = "algorithm"  # option of a program that uses TRL: the algorithm of its configuration
_CONFIGS = {f"{name.upper()}Config": name for name in RECIPES}  # TRL's class -> algorithm
# Arguments of peft's LoraConfig: TRL's option, and peft's default.
_LORA: dict[str, tuple[str, float | None]] = {
    "r": ("lora_r", 8),
    "lora_alpha": ("lora_alpha", 8),
    "lora_dropout": ("lora_dropout", 0.0),
    "target_modules": ("lora_target_modules", None),
    "use_rslora": ("use_rslora", None),
    "use_dora": ("use_dora", None),
}
_FILE_LOADERS = ("json", "csv", "parquet", "arrow", "text")  # of load_dataset, with data_files


def read_options(file: Path) -> dict[str, Any]:
    """Return the options in a file of another trainer; raise UserError if there are none."""
    try:
        text = read_bytes(file, limit=_MAX_BYTES).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"FILE must be a text file that can be read, got {file}: {error}") from error
    if file.suffix == ".py":
        return _program_options(text, file)
    is_script = file.suffix not in (".yaml", ".yml", ".json")
    content: Any = dict(_script_options(text)) if is_script else None
    try:
        content = content or load_yaml(text)
    except ValueError as error:
        if not is_script:
            raise UserError(f"FILE must be valid YAML, got {file}: {error}") from error
    if not isinstance(content, dict) or not content:
        raise UserError(f"FILE must have options KEY: VALUE, or a command line with --KEY VALUE, got none in {file}")
    ranks = next((content.pop(name) for name in _RANKS if name in content), None)
    return {str(name): value for name, value in content.items()} | ({} if ranks is None else {"nproc_per_node": ranks})


def _program_options(text: str, file: Path) -> dict[str, Any]:
    """Return the options of a Python program that uses TRL, from the calls in it; the program is not run.

    The configuration of the algorithm, LoraConfig, and the names in from_pretrained and load_dataset are read. Values must
    be literals, or names that are assigned a literal once.
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise UserError(f"FILE must be a Python program, got {file}: {error}") from error
    calls: dict[str, list[ast.Call]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            calls.setdefault(_called(node.func), []).append(node)
    configs = [name for name in _CONFIGS if name in calls]
    if len(configs) != 1:
        got = " and ".join(configs) or "no such call"
        raise UserError(f"FILE must call one of {', '.join(_CONFIGS)} if it is a Python program, got {got} in {file}")
    model = next((name for name in calls if name.startswith("AutoModel")), "")
    read = {name: calls[name] for name in (*configs, "LoraConfig", "load_dataset", model) if name in calls}
    for name, found in read.items():
        if len({ast.dump(call) for call in found}) > 1:
            raise UserError(f"FILE must call {name} with one set of arguments, got several in {file}; leave the others out")
    config, lora, data, of_model = (read.get(name, [None])[0] for name in (configs[0], "LoraConfig", "load_dataset", model))
    assert config is not None
    given = {f"argument {number}": value for number, value in enumerate(config.args)} | _keywords(config) | _data_of(data)
    if config.args:
        given["output_dir"] = given.pop("argument 0")
    if lora is not None:
        arguments = _keywords(lora) | ({"**": lora.args[0]} if lora.args else {})
        given |= {name: arguments.pop(theirs, ast.Constant(default)) for theirs, (name, default) in _LORA.items()}
        given |= {"use_peft": ast.Constant(True)} | {name: value for name, value in arguments.items() if name == "**"}
    if of_model is not None and of_model.args:
        given["model_name_or_path"] = of_model.args[0]
    return {ALGORITHM: _CONFIGS[configs[0]], **_literals(given, tree, file)}


def _literals(given: Mapping[str, ast.expr], tree: ast.Module, file: Path) -> dict[str, Any]:
    """Return the values of literals, and of names that the program assigns a literal once; UserError lists all others."""
    values, assigned = dict[str, ast.expr](), Counter[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            values[node.targets[0].id] = node.value
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            assigned[node.id] += 1
        elif isinstance(node, ast.arg):
            assigned[node.arg] += 1
    wrong, found = [], dict[str, Any]()
    for name, value in given.items():
        variable = value.id if isinstance(value, ast.Name) else ""
        try:
            if name == "**":
                raise ValueError("arguments without names")
            found[name] = ast.literal_eval(values.get(variable, value) if assigned[variable] == 1 else value)
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            wrong.append(f"{name}={ast.unparse(value)[:60]} (line {value.lineno})")
    if wrong:
        raise UserError(f"FILE must have literal values, got {', '.join(wrong)}; write these values into a copy of {file}")
    return {name: value for name, value in found.items() if value is not None}


def _called(function: ast.expr) -> str:
    """Return the name of a called function, or of the class whose from_pretrained is called."""
    if isinstance(function, ast.Attribute):
        return _called(function.value) if function.attr == "from_pretrained" else function.attr
    return function.id if isinstance(function, ast.Name) else ""


def _keywords(call: ast.Call) -> dict[str, ast.expr]:
    """Return the keyword arguments of a call; ** is an argument without a literal value."""
    return {keyword.arg or "**": keyword.value for keyword in call.keywords}


def _data_of(call: ast.Call | None) -> dict[str, ast.expr]:
    """Return TRL's options for the data that load_dataset loads."""
    if call is None or not call.args:
        return {}
    keywords, (name, *others) = _keywords(call), call.args
    if isinstance(name, ast.Constant) and name.value in _FILE_LOADERS and "data_files" in keywords:
        return {"dataset_name": keywords["data_files"]}
    options = {"dataset_name": name, "dataset_train_split": keywords.get("split")}
    options["dataset_config"] = keywords.get("name", next(iter(others), None))
    return {option: value for option, value in options.items() if value is not None}


def _script_options(text: str) -> Iterator[tuple[str, object]]:
    """Yield the options of the longest command line of a shell script, with the algorithm in its name and its ranks."""
    lines = text.replace("\\\n", " ").splitlines()
    line = max(lines, key=lambda each: each.count(" --"), default="")
    assigned = dict(re.findall(r"^\s*(?:export\s+)?(\w+)=(\S+)\s*$", text, re.MULTILINE))
    line = re.sub(r"\$\{?(\w+)\}?", lambda match: assigned.get(match[1], match[0]), line)
    line = _QUOTIENT.sub(lambda match: str(int(match[1]) // max(1, int(match[2]))), line)
    try:
        words = shlex.split(line, comments=True) if " --" in line else []
    except ValueError as error:
        raise UserError(f"FILE must be a shell script with closed quotes, got {line.strip()[:80]}: {error}") from error
    for word in words:
        name, separator, value = word.partition("=")
        if separator and name.lower() in (*_RANKS, "use_hf"):
            yield name.lower(), value
    yield from read_command_line(words)


def read_command_line(words: Sequence[str]) -> Iterator[tuple[str, object]]:
    """Yield the options --NAME VALUE ... and --NAME=VALUE of a command line; an option without a value is true."""
    rest = list(itertools.dropwhile(lambda word: not word.startswith("--"), words))
    while rest:
        name, separator, value = rest.pop(0).partition("=")
        values = [value] if separator else []
        while rest and not rest[0].startswith("--"):
            values.append(rest.pop(0))
        if name.startswith("--"):
            yield name[2:].replace("-", "_"), (values[0] if len(values) == 1 else values or True)
