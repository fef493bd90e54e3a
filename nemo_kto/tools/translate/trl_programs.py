"""Python programs that use TRL: their options, read from the syntax tree; the program is not run."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nemo_kto.algorithms.recipes import RECIPES
from nemo_kto.errors import UserError
from nemo_kto.tools.translate.trainer_options import table

# Positional arguments of the trainers, which have no ref_model if the method has no reference, and of load_dataset.
_ARGUMENTS = ("model", "ref_model", "args", "data_collator", "train_dataset", "eval_dataset", "processing_class")
_DATA_ARGUMENTS = ("path", "name", "data_dir", "data_files")
# Defaults of peft's LoraConfig, and of unsloth's get_peft_model.
_LORA: dict[str, Any] = {"lora_r": 8, "lora_alpha": 8, "lora_dropout": 0.0}
_UNSLOTH = {"lora_r": 16, "lora_alpha": 16, "lora_dropout": 0.0, "lora_target_modules": "all-linear"}
_OWN_NAMES = {  # of LoraConfig and from_pretrained -> TRL's
    "r": "lora_r", "target_modules": "lora_target_modules", "modules_to_save": "lora_modules_to_save",
    "revision": "model_revision", "torch_dtype": "dtype", "model_id": "adapter_name_or_path",
}  # fmt: skip
_LOADERS = ("AutoModel", "Fast")  # beginnings of classes with from_pretrained
# Functions and methods that change the rows of a data set, or make one.
_CHANGES = tuple(
    "map filter select take skip shard rename_column rename_columns remove_columns cast concatenate_datasets "
    "interleave_datasets train_test_split from_list from_dict from_generator from_pandas from_json from_csv".split()
)
_DATA = ("load_dataset", "load_from_disk")
_MAX_STEPS = 20  # calls, names and indices between a trainer's argument and the call that loads it


def find_method(text: str) -> str | None:
    """Return the method whose configuration or trainer the text of a program names, if it names one."""
    methods = "|".join(table()["methods"])
    found = {match[1].lower() for match in re.finditer(rf"\b({methods.upper()})(Config|Trainer)\b", text)}
    return found.pop() if len(found) == 1 else None


def read_program(text: str, file: Path) -> tuple[dict[str, Any], str, str, dict[str, str], list[str]]:
    """Return the options, trainer, method, unread options with the reason, and notes on a program that uses TRL.

    Values of the calls of the trainer and of those whose results it gets must be literals, or names of a literal.
    """
    program = _Program(text=text, file=file)
    names = [name for name in program.calls if find_method(name) is not None]
    method = find_method(" ".join(names))
    parsers = [program.calls[name][0] for name in ("TrlParser", "HfArgumentParser") if name in program.calls]
    if parsers and not any(name.endswith("Config") for name in names) and find_method(text) is not None:
        got = f"a program that reads them from its command line ({file}:{parsers[0].lineno})"
        remedy = "translate the shell script with this command line, or the YAML file of --config"
        raise UserError(f"FILE must have the options, got {got}; {remedy}")
    if method is None:
        known, got = ", ".join(f"{name.upper()}Config" for name in RECIPES), " and ".join(names) or "no such call"
        raise UserError(f"FILE must call one of {known}, or a trainer, if it is a Python program, got {got} in {file}")
    order = [name for name in _ARGUMENTS if name != "ref_model" or method not in ("cpo", "orpo")]
    arguments = program.arguments(program.only(f"{method.upper()}Trainer"), order)
    own = arguments.pop("args", None)
    config = program.value(own)
    kind = f"{method.upper()}Config"
    config = config if config in program.calls.get(kind, []) else program.only(kind)
    given = program.arguments(config, ("output_dir",)) | program.assigned_to(config, own)
    given |= program.model(arguments.pop("model", None)) | program.adapters(arguments.pop("peft_config", None))
    reference = program.model(arguments.pop("ref_model", ast.Constant(None))).get("model_name_or_path")
    if reference is not None and program.segment(reference) != program.segment(given.get("model_name_or_path", reference)):
        given["ref_model"] = reference
    train, test = (arguments.pop(name, None) for name in ("train_dataset", "eval_dataset"))
    for name in ("processing_class", "tokenizer"):
        arguments.pop(name, None)
    simple = {name: node for name, node in arguments.items() if isinstance(node, ast.Constant)}
    values = program.literals(simple | given) | program.rows(train, test)
    reason = "objects are not translated; callbacks are in docs/guides/python.md"
    without = {f"{name}={program.segment(node)}": reason for name, node in arguments.items() if name not in simple}
    lines = {name: program.calls[name][0].lineno for name in _CHANGES if name in program.calls}
    notes = [f"rows: {name} in {file}:{line} is not applied; write the rows that it returns" for name, line in lines.items()]
    classes = [(name, line) for name, line in program.classes.items() if name.endswith("Trainer")]
    notes += [f"methods of {name} ({file}:{line}) are not translated; it is read as TRL's trainer" for name, line in classes]
    return values, "trl", method, without, notes


class _Program:
    """The syntax tree of a program, with its calls and assignments by name."""

    def __init__(self, *, text: str, file: Path) -> None:
        try:
            tree = ast.parse(text)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise UserError(f"FILE must be a Python program, got {file}: {error}") from error
        self.file, self.lines, self.assigned = file, re.split(rb"\r\n?|\n", text.encode()), Counter[str]()
        self.calls: dict[str, list[ast.Call]] = {}
        self.values: dict[str, ast.expr] = {}
        self.attributes: dict[str, dict[str, ast.expr]] = {}
        self.classes = dict[str, int]()  # subclasses that are called
        renamed = dict[str, str]()  # imports and subclasses
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                self.calls.setdefault(_called(node), []).append(node)
                if _called(node) == "setattr" and len(node.args) == 3 and isinstance(key := node.args[1], ast.Constant):
                    self._assign(ast.copy_location(ast.Attribute(node.args[0], str(key.value)), node), node.args[2])
            elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    self._assign(target, node.value)
            elif isinstance(node, ast.AugAssign):
                self._assign(node.target, node.target)
            elif isinstance(node, ast.ClassDef):
                renamed[node.name] = "".join(map(_name, node.bases[:1]))
                self.classes[node.name] = node.lineno
            elif isinstance(node, ast.alias) and node.asname:
                renamed[node.asname] = node.name
            elif isinstance(node, ast.arg) or (isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)):
                self.assigned[node.arg if isinstance(node, ast.arg) else node.id] += 1
        self.classes = {name: line for name, line in self.classes.items() if name in self.calls}
        for called in [name for name in self.calls if name in renamed]:
            name = called
            for _ in range(_MAX_STEPS):
                name = renamed.get(name, name)
            calls = self.calls.pop(called)
            self.calls.setdefault(name, []).extend(calls)

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        """Record a value by its name; an attribute with several values has itself as its value, which is no literal."""
        if isinstance(target, ast.Name):
            self.values[target.id] = value
        elif isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name):
            given = self.attributes.setdefault(target.value.id, {})
            given[target.attr] = target if target.attr in given and _shape(given[target.attr]) != _shape(value) else value
        elif isinstance(target, ast.Tuple | ast.List):
            parts = value.elts if isinstance(value, ast.Tuple | ast.List) and len(value.elts) == len(target.elts) else []
            for number, each in enumerate(target.elts):
                part = ast.copy_location(ast.Subscript(value, ast.Constant(number)), value)
                self._assign(each, parts[number] if parts else part)

    def segment(self, node: ast.expr) -> str:
        """Return the beginning of an expression as the program has it, in one line."""
        end = node.end_col_offset if node.end_lineno == node.lineno else None
        return self.lines[node.lineno - 1][node.col_offset : end][:60].decode("utf-8", errors="ignore")

    def value(self, node: ast.expr | None) -> ast.expr | None:
        """Return the value of a name that is assigned once; other expressions as they are."""
        for _ in range(_MAX_STEPS):
            if isinstance(node, ast.Name) and self.assigned[node.id] == 1:
                node = self.values.get(node.id, node)
        return node

    def only(self, name: str) -> ast.Call | None:
        """Return the call of a function that all its calls are equal to; None if there is none."""
        found = self.calls.get(name, [])
        if len({_shape(call) for call in found}) > 1:
            text = f"FILE must call {name} with one set of arguments, got several in {self.file}"
            raise UserError(f"{text}; leave the others out")
        return found[0] if found else None

    def arguments(self, node: ast.expr | None, order: Sequence[str] = ()) -> dict[str, ast.expr]:
        """Return the arguments of a call by name; further positional ones as "argument N", and ** as "**"."""
        if not isinstance(node, ast.Call):
            return {}
        names = [*order, *(f"argument {number}" for number in range(len(order), len(node.args)))]
        given = dict(zip(names, node.args, strict=False)) | {each.arg or "**": each.value for each in node.keywords}
        return {_OWN_NAMES.get(name, name): value for name, value in given.items()}

    def assigned_to(self, config: ast.expr | None, argument: ast.expr | None) -> dict[str, ast.expr]:
        """Return the values that the program assigns to attributes of a configuration, or of the trainer's argument."""
        own = argument.id if isinstance(argument, ast.Name) else None
        names = [name for name in self.attributes if name == own or (config and self.values.get(name) is config)]
        return {attribute: value for name in names for attribute, value in self.attributes[name].items()}

    def model(self, node: ast.expr | None) -> dict[str, ast.expr]:
        """Return the name of a model, which may be the argument of from_pretrained, and the other arguments as options."""
        found, adapters = self.value(node), dict[str, ast.expr]()
        for _ in range(_MAX_STEPS):
            if isinstance(found, ast.Subscript):  # MODEL, TOKENIZER = ...
                found = self.value(found.value)
            elif isinstance(found, ast.Call) and _called(found) == "PeftModel":
                given = self.arguments(found, ("model", "adapter_name_or_path"))
                found = self.value(given.pop("model", None))
                adapters = {"use_peft": ast.Constant(True), **given}
            elif isinstance(found, ast.Call) and _called(found) == "merge_and_unload":
                return {"model_name_or_path": found}
            elif isinstance(found, ast.Call) and _name(found.func) != "from_pretrained":
                found = self.value(self._inner(found))
        if isinstance(found, ast.Constant):
            return {"model_name_or_path": found} if isinstance(found.value, str) else {}
        if not isinstance(found, ast.Call):
            found = next((self.only(name) for name in self.calls if name.startswith(_LOADERS)), None)
        if found is None:
            return {} if node is None else {"model_name_or_path": node}
        given = self.arguments(found, ("pretrained_model_name_or_path",))
        quantised = self.value(given.get("quantization_config"))
        if isinstance(quantised, ast.Call) and _called(quantised) == "BitsAndBytesConfig":
            parts = self.arguments(quantised, ("load_in_8bit", "load_in_4bit"))
            given |= {f"quantization_config.{part}": value for part, value in parts.items()}
            del given["quantization_config"]
        own = [given.pop(name) for name in ("pretrained_model_name_or_path", "model_name") if name in given]
        for name in given.keys() - {"model_revision", "dtype"}:  # objects, such as quantization_config
            if isinstance(self.value(given[name]), ast.Call | ast.Name | ast.Attribute | ast.Subscript):
                given[name] = ast.Constant(self.segment(given[name]))
        return given | adapters | ({"model_name_or_path": own[0]} if own else {})

    def _inner(self, call: ast.Call) -> ast.expr | None:
        """Return the model in a call such as MODEL.to("cuda") or deepcopy(MODEL), or the name in build("NAME")."""
        owner = call.func.value if isinstance(call.func, ast.Attribute) else None
        is_value = owner is not None and (not isinstance(owner, ast.Name) or owner.id in self.values)
        return owner if is_value else next(iter(call.args), owner)

    def adapters(self, node: ast.expr | None) -> dict[str, ast.expr]:
        """Return TRL's options for LoraConfig."""
        found, usual, configs = self.value(node), _LORA, self.calls.get("LoraConfig", [])
        calls = [each.func for each in self.calls.get("get_peft_model", [])]
        if isinstance(found, ast.Constant):
            found = self.only("LoraConfig") if calls else None
        elif found not in configs:
            found = self.only("LoraConfig") or found
        if found is None and any(isinstance(each, ast.Attribute) and _name(each.value).startswith("Fast") for each in calls):
            found, usual = self.only("get_peft_model"), _UNSLOTH
        elif found not in configs:
            return {} if found is None else {"peft_config": found}
        lora = {name: ast.Constant(default) for name, default in usual.items()} | self.arguments(found)
        return {"use_peft": ast.Constant(True), **{name: lora[name] for name in lora if name not in ("model", "argument 0")}}

    def rows(self, train: ast.expr | None, test: ast.expr | None) -> dict[str, Any]:
        """Return the options datasets and test_datasets, with the arguments of load_dataset."""
        parted, found = self.only("train_test_split"), dict[str, Any]()
        if entry := self._entry(train, parted, needs_call=False):
            found["datasets"] = [entry]
        if test is not None and parted is None and not isinstance(self.value(test), ast.Constant):
            entry = self._entry(test, parted, needs_call=True)
            found |= {"test_datasets": [entry]} if entry else {"eval_dataset": self.segment(test)}
        if (size := self.arguments(parted, ("test_size",)).get("test_size")) is not None:
            found["test_split_size"] = size.value if isinstance(size, ast.Constant) else self.segment(size)
        return found

    def _entry(self, node: ast.expr | None, parted: ast.Call | None, *, needs_call: bool) -> dict[str, Any]:
        """Return the arguments of the load_dataset that a value comes from, or else of the only one unless needs_call."""
        split, found = None, self.value(node)
        for _ in range(_MAX_STEPS):
            if isinstance(found, ast.Subscript):
                split, found = found.slice, self.value(found.value)
            elif isinstance(found, ast.IfExp):
                found = self.value(found.body)
            elif isinstance(found, ast.Call) and isinstance(found.func, ast.Attribute) and _called(found) not in _DATA:
                found = self.value(found.func.value)  # such as ROWS.map(...)
        if isinstance(found, ast.Constant):
            return {}
        is_call = isinstance(found, ast.Call) and _called(found) in _DATA
        given = self.arguments(found if is_call else next(filter(None, map(self.only, _DATA)), None), _DATA_ARGUMENTS)
        if isinstance(split, ast.Constant) and isinstance(split.value, int):  # of TRAIN, TEST = load_dataset(split=[...])
            splits = getattr(given.get("split"), "elts", [])
            is_call, split = split.value < len(splits), next(iter(splits[split.value :]), None)
        elif split is not None:  # of the rows by a name with several values, such as ROWS = ROWS.map(...)
            is_call = True
        if not given or (needs_call and not is_call):
            return {}
        return self.literals(given | ({} if split is None or parted or not is_call else {"split": split}))

    def literals(self, given: Mapping[str, ast.expr]) -> dict[str, Any]:
        """Return the values of literals and of types such as torch.bfloat16; UserError lists all other values."""
        wrong, found = [], dict[str, Any]()
        for name, node in given.items():
            value = self.value(node)
            try:
                if isinstance(value, ast.Attribute) and self.segment(value).startswith("torch."):
                    found[name] = value.attr
                else:
                    found[name] = ast.literal_eval("**" if name == "**" or value is None else value)
            except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
                wrong.append(f"{name}={self.segment(node)} (line {node.lineno})")
        if wrong:
            listed = ", ".join(wrong[:9] + ([f"{len(wrong) - 9} more"] if len(wrong) > 9 else []))
            raise UserError(f"FILE must have literal values, got {listed}; write these values into a copy of {self.file}")
        return found


def _shape(call: ast.expr) -> object:
    """Return what equal expressions share; one that is nested too deeply equals only itself."""
    try:
        return ast.dump(call)
    except (RecursionError, ValueError):
        return call


def _called(call: ast.Call) -> str:
    """Return the name of a called function, or of the class whose from_pretrained is called."""
    function = call.func
    while isinstance(function, ast.Attribute) and function.attr == "from_pretrained":
        function = function.value
    return _name(function)


def _name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else function.id if isinstance(function, ast.Name) else ""
