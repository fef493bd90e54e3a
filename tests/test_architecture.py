"""Rules of the layout: imports, sizes of folders, files and functions, and uses of the device.

Every test gathers all offenders before it fails.
"""

from __future__ import annotations

import ast
import functools
import itertools
import re
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from nemo_kto.architecture.families import FAMILIES
from tests.families import MODELS

REPOSITORY = Path(__file__).resolve().parent.parent
PACKAGE = REPOSITORY / "nemo_kto"
MAX_FILE_LINES, MAX_FUNCTION_LINES, MAX_FILES = 600, 59, 12
# Functions that are a list of phases -> lines that each may have; cut into parts or compressed, they would read worse.
PHASES = {"run/train.py:train": 70, "run/build_trainer.py:build_trainer": 110, "run/summary.py:start_lines": 80}
parsed = functools.cache(ast.parse)  # a file is read by several rules


@dataclass(frozen=True, kw_only=True)
class Package:
    """Allowed imports of one package.

    Attributes:
        own: other packages of this project.
        outside: third-party packages with their submodules.
        never: exceptions from ``outside``.
        only_in: packages of others that only some files may import.
    """

    own: frozenset[str] = frozenset()
    outside: frozenset[str] = frozenset()
    never: frozenset[str] = frozenset()
    only_in: tuple[tuple[str, frozenset[str]], ...] = ()


def names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# docs/internals/design.md has the figure. A folder within a package may have a separate row.
PACKAGES = {
    "utils": Package(outside=names("pydantic pydantic_core annotated_types"), only_in=(("yaml", names("files.py")),)),
    "losses": Package(
        own=names("utils"), outside=names("torch annotated_types"), never=names("torch.distributed torch.cuda")
    ),
    "telemetry": Package(
        own=names("utils"),
        outside=names("torch pytorch_lightning lightning_fabric tqdm rich psutil annotated_types"),
        never=names("torch.distributed torch.cuda"),
    ),
    "device": Package(own=names("utils"), outside=names("torch megatron.core")),
    "processes": Package(
        own=names("device utils"),
        outside=names("torch"),
        only_in=(
            ("cloudpickle", names("ranks.py")),
            ("lightning_fabric", names("ranks.py")),
            ("psutil", names("launcher.py ranks.py rendezvous.py")),
        ),
    ),
    "distributed": Package(own=names("device processes utils"), outside=names("torch numpy megatron.core")),
    "layers": Package(own=names("device distributed utils"), outside=names("torch megatron.core")),
    "mixers": Package(own=names("layers device utils"), outside=names("torch megatron.core")),
    "architecture": Package(
        own=names("mixers layers utils"),
        outside=names("pydantic annotated_types"),
        only_in=(("transformers", names("architecture.py rope.py")),),
    ),
    "model_files": Package(
        own=names("architecture utils"),
        outside=names("pydantic annotated_types safetensors"),
        only_in=(("huggingface_hub", names("hub.py")),),
    ),
    "data": Package(
        own=names("losses model_files utils"),
        outside=names("torch"),
        never=names("torch.distributed torch.cuda"),
        only_in=(
            # not where a command line is checked, which would take a third longer
            ("numpy", names("cache.py collate.py dataset.py loader.py splits.py")),
            ("transformers", names("chat_template.py dataset.py drawn.py rendering.py splits.py")),
            ("datasets", names("cache.py dataset.py splits.py data_sources.py")),
            ("fsspec", names("data_sources.py")),
            ("pyarrow", names("data_sources.py row_files.py forms.py cache.py dataset.py")),
        ),
    ),
    "models": Package(
        own=names("losses data device distributed layers mixers architecture model_files utils"),
        outside=names("torch numpy megatron.core"),
    ),
    "checkpoint": Package(
        own=names("models device processes distributed architecture model_files utils"),
        outside=names("torch numpy megatron.core"),
    ),
    "huggingface": Package(
        own=names("checkpoint models device distributed layers mixers architecture model_files utils"),
        outside=names("torch megatron.core safetensors"),
        only_in=(("transformers", names("importing.py")),),
    ),
    "algorithms": Package(
        own=names("losses data telemetry utils"), outside=names("torch"), never=names("torch.distributed torch.cuda")
    ),
    "algorithms/recipes": Package(own=names("losses data utils"), outside=names("pydantic annotated_types")),
    "config": Package(
        own=names("losses data device processes telemetry layers architecture model_files algorithms utils"),
        outside=names("hydra omegaconf yaml pydantic annotated_types"),
        never=names("hydra._internal"),
    ),
    "memory": Package(own=names("device telemetry layers mixers architecture model_files models config utils")),
    "records": Package(
        own=names("telemetry model_files config utils"),
        outside=names("numpy annotated_types"),
        only_in=(("matplotlib", names("plots.py")),),
    ),
    "run": Package(
        own=names("losses data device processes distributed telemetry architecture model_files algorithms models utils")
        | names("layers mixers checkpoint huggingface config records memory"),
        outside=names("torch numpy transformers megatron.core"),
        only_in=(("yaml", names("card.py")),),
    ),
    "cli": Package(
        own=names("losses data device processes telemetry architecture model_files algorithms huggingface config")
        | names("records run memory utils"),
        outside=names("click hydra omegaconf"),
        never=names("hydra._internal"),
        only_in=(("pandas", names("api.py")), ("transformers", names("api.py"))),
    ),
    "tools/inference": Package(
        # config: the saved configuration of a run; layers, architecture: formats of a quantized base
        own=names("cli config device data layers architecture model_files telemetry utils"),
        outside=names("click torch transformers"),
        never=names("torch.distributed torch.cuda"),
        only_in=(("peft", names("opening.py")),),
    ),
    "tools/chat": Package(own=names("tools/inference cli data model_files telemetry utils"), outside=names("click")),
    "tools/convert": Package(
        own=names("cli huggingface checkpoint device mixers telemetry architecture model_files utils"),
        outside=names("click torch megatron.core safetensors"),
        only_in=(("transformers", names("importing.py")),),
    ),
    "tools/inspect": Package(
        own=names("cli config data run memory algorithms model_files telemetry utils"), outside=names("click numpy")
    ),
    "tools/plan": Package(
        own=names("cli run memory config algorithms models mixers architecture telemetry processes device data utils"),
        outside=names("click"),
    ),
    "tools/report": Package(
        own=names("cli records data telemetry model_files config utils"),
        outside=names("click numpy annotated_types"),
        only_in=(
            ("jinja2", names("report_page.py")),
            ("markupsafe", names("report_page.py")),
            ("matplotlib", names("svg.py")),
        ),
    ),
    "tools/rounds": Package(
        own=names("tools/inference cli data model_files records telemetry utils"),
        outside=names("click"),
        only_in=(("httpx", names("endpoint.py")), ("httpx2", names("endpoint.py"))),
    ),
    "tools/translate": Package(
        own=names("cli config algorithms model_files data utils"), outside=names("click omegaconf yaml")
    ),
    "tools/ui": Package(
        own=names("cli config data records telemetry utils"),
        outside=names("click"),
        only_in=tuple((name, names("server.py workbench_page.py")) for name in ("gradio", "fastapi", "uvicorn")),
    ),
}
# Modules of the top level; they import only the standard library, and each other.
ALL_MAY_IMPORT = names("__version__ errors redaction")
_TOP_LEVEL = frozenset(f"nemo_kto.{name}" for name in ALL_MAY_IMPORT)
# The files that may name torch.cuda: one uses it, the other puts answers for the CPU in its place.
DEVICE_FILES = names("device/device.py device/patches.py")


def is_in(module: str, packages: frozenset[str]) -> bool:
    return any(module == package or module.startswith(package + ".") for package in packages)


def for_types_only(tree: ast.AST) -> set[int]:
    """Ids of the nodes under ``if TYPE_CHECKING:``, which nothing imports when the program runs."""
    guarded: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            guarded |= {id(inner) for statement in node.body for inner in ast.walk(statement)}
    return guarded


def imports(tree: ast.AST, *, types_too: bool = False) -> Iterator[tuple[int, str]]:
    """Line and full name of everything imported: ``from a import b`` is ``a.b``, which may be a module or a name in one."""
    guarded = set[int]() if types_too else for_types_only(tree)
    for node in ast.walk(tree):
        if id(node) in guarded:
            continue
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield node.lineno, f"{'.' * node.level}{node.module or ''}.{alias.name}"


def import_offence(package_name: str, package: Package, file: Path, module: str) -> str | None:
    """The error of this import, or None."""
    if module.startswith("."):
        return "relative import; write the full name"
    top = module.split(".")[0]
    if top in sys.stdlib_module_names:
        return None
    if top == "nemo_kto":
        parts = module.split(".")
        target = "/".join(parts[1:3]) if parts[1:2] == ["tools"] else "".join(parts[1:2])
        of_same = package_name if package_name.startswith("tools/") else package_name.split("/")[0]
        good = target in ALL_MAY_IMPORT or target == of_same or target in package.own
        return None if good else f"{package_name} must not import {module}"
    for other, files in package.only_in:
        if is_in(module, frozenset({other})):
            return None if file.name in files else f"{other} only in {', '.join(sorted(files))} of {package_name}"
    if is_in(module, package.never) or not is_in(module, package.outside):
        return f"{package_name} must not import {module}"
    return None


def dotted(node: ast.AST) -> str:
    """``a.b.c`` of an attribute access; an empty string where the chain does not start at a name."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def scan_imports(root: Path) -> list[str]:
    found: list[str] = []
    for file in sorted(root.rglob("*.py")):
        path = file.relative_to(root)
        if path.name == "__main__.py":  # starts the command, and no file imports it
            continue
        if len(path.parts) == 1 or path.as_posix() == "tools/__init__.py":  # the package itself, and modules for all
            found += [
                f"{path}:{line}: a module of every package must not import {module}"
                for line, module in imports(parsed(file.read_text()))
                if module.split(".")[0] not in sys.stdlib_module_names and not is_in(module, _TOP_LEVEL)
            ]
            continue
        if not any(path.is_relative_to(row) for row in PACKAGES):
            found.append(f"{path}: there is no package {path.parts[0]}; add it here and to docs/internals/design.md")
            continue
        row = next(row for row in sorted(PACKAGES, reverse=True) if path.is_relative_to(row))
        for line, module in imports(parsed(file.read_text())):
            offence = import_offence(row, PACKAGES[row], file, module)
            if offence:
                found.append(f"{path}:{line}: {offence}")
    return found


def scan_device(root: Path) -> list[str]:
    """Uses of torch.cuda and ``.cuda()`` outside the files that answer for the device."""
    found: list[str] = []
    for file in sorted(root.rglob("*.py")):
        path = file.relative_to(root)
        if path.as_posix() in DEVICE_FILES:
            continue
        tree = parsed(file.read_text())
        for line, module in imports(tree):
            if is_in(module, names("torch.cuda")):
                found.append(f"{path}:{line}: imports {module}; ask nemo_kto.device.device")
        for node in ast.walk(tree):
            if not isinstance(node, ast.expr):
                continue
            called = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "cuda"
            if called or (isinstance(node, ast.Attribute) and dotted(node) == "torch.cuda"):
                found.append(f"{path}:{node.lineno}: names cuda; ask nemo_kto.device.device")
    return found


def scan_sizes(root: Path) -> list[str]:
    found, limits = list[str](), dict(PHASES)
    for folder in sorted({file.parent for file in root.rglob("*.py")}):
        files = [file for file in folder.glob("*.py") if file.name != "__init__.py"]
        if len(files) > MAX_FILES and folder.name != "families":  # which has one for each series of models
            found.append(f"{folder.relative_to(root)}: {len(files)} files, at most {MAX_FILES}")
    for file in sorted(root.rglob("*.py")):
        text, path = file.read_text(), file.relative_to(root)
        lines = len(text.splitlines())
        if lines > MAX_FILE_LINES:
            found.append(f"{path}: {lines} lines, at most {MAX_FILE_LINES}")
        for node in ast.walk(parsed(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                documented = ast.get_docstring(node) is not None
                first = node.body[0].end_lineno if documented else node.lineno - 1
                length, most = (node.end_lineno or 0) - (first or 0), limits.pop(f"{path}:{node.name}", MAX_FUNCTION_LINES)
                if length > most:
                    found.append(f"{path}:{node.lineno}: {node.name} has {length} lines, at most {most}")
    return found + [f"{stale}: no such function; remove it from PHASES" for stale in limits]


# Classes of other projects' making: what derives from them is built as they are built.
POSITIONAL_BASES = names(
    "Function Module RMSNorm LayerNorm GPTModel ColumnParallelLinear MegatronModule IdentityOp "
    "Exception ValueError RuntimeError dict"
)
MAX_POSITIONAL_FIELDS = 3  # of a frozen dataclass: a value of two or three parts reads well without names


def scan_constructors(root: Path) -> list[str]:
    """Public classes whose constructor (written or made by dataclass) takes positional arguments."""
    found: list[str] = []
    for file in sorted(root.rglob("*.py")):
        path = file.relative_to(root)
        for node in ast.walk(parsed(file.read_text())):
            if not isinstance(node, ast.ClassDef) or node.name.startswith("_"):
                continue
            where = f"{path}:{node.lineno}: {node.name}"
            bases = {ast.unparse(base).split("[")[0].split(".")[-1] for base in node.bases}
            for decorator in node.decorator_list:
                text = ast.unparse(decorator)
                fields = sum(isinstance(statement, ast.AnnAssign) for statement in node.body)
                small = "frozen=True" in text and fields <= MAX_POSITIONAL_FIELDS
                if text.split("(")[0].endswith("dataclass") and "kw_only=True" not in text and not small:
                    found.append(f"{where} is a dataclass without kw_only=True")
            if bases & POSITIONAL_BASES:
                continue
            for method in node.body:
                if isinstance(method, ast.FunctionDef) and method.name == "__init__":
                    positional = [argument.arg for argument in (*method.args.posonlyargs, *method.args.args)][1:]
                    if positional:
                        found.append(f"{where} takes {', '.join(positional)} by position; put * before them")
    return found


def scan_inheritance(root: Path) -> list[str]:
    """Classes with more than one level of inheritance in the project."""
    bases: dict[str, tuple[str, list[str]]] = {}
    for file in sorted(root.rglob("*.py")):
        for node in ast.walk(parsed(file.read_text())):
            if isinstance(node, ast.ClassDef):
                parents = [ast.unparse(base).split("[")[0].split(".")[-1] for base in node.bases]
                bases[node.name] = (f"{file.relative_to(root)}:{node.lineno}", parents)
    found: list[str] = []
    for name, (where, parents) in bases.items():
        for parent in parents:
            for grandparent in bases.get(parent, ("", []))[1]:
                if grandparent in bases and "Error" not in name:
                    found.append(f"{where}: {name} -> {parent} -> {grandparent}; inherit from one class of ours at most")
    return found


# Names of several files: the loss and the trainer of KTO, which users import by these paths.
SAME_NAMES = names("__init__.py kto.py")


def scan_names(root: Path) -> list[str]:
    """Files of one name, among which an editor cannot find the one that is meant."""
    found: dict[str, list[str]] = {}
    for file in sorted(root.rglob("*.py")):
        found.setdefault(file.name, []).append(str(file.relative_to(root)))
    return [f"{name}: {', '.join(paths)}" for name, paths in found.items() if len(paths) > 1 and name not in SAME_NAMES]


def scan_circles(root: Path) -> list[str]:
    """Files that import each other in a circle, for types or within functions too."""
    modules = {}
    for file in sorted(root.rglob("*.py")):
        parts = file.relative_to(root.parent).with_suffix("").parts
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    edges: Arrows = set()
    for name, file in modules.items():
        for _, module in imports(parsed(file.read_text()), types_too=True):
            target = module if module in modules else module.rpartition(".")[0]
            if target in modules and target not in (
                name,
                root.name,
            ):  # the package itself has the version, and hands names on
                edges.add((name, target))
    return [f"{name} imports a file that imports it" for name in sorted(modules) if name in reachable(edges, name)]


def scan_mixers(root: Path) -> list[str]:
    """Sequence mixers whose parts (settings, weights, memory, module) are not in one file of mixers/."""
    homes: dict[str, Path] = {}
    names_of: dict[Path, set[str]] = {}
    for file in sorted(root.rglob("*.py")):
        names_of[file] = {file.stem}
        for node in ast.walk(parsed(file.read_text())):
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                names_of[file].add(node.name)
            if isinstance(node, ast.ClassDef) and "SequenceMixer" in map(ast.unparse, node.bases) and node.name != "NoMixer":
                homes[node.name] = file
    found = [f"{name} is in {file.relative_to(root)}" for name, file in homes.items() if file.parent != root / "mixers"]
    found += [f"{file.name} has several mixers" for file in set(homes.values()) if [*homes.values()].count(file) > 1]
    for name, home in homes.items():
        words = {name.lower(), home.stem.replace("_", "")}
        for file in names_of.keys() - {home}:
            strays = sorted(each for each in names_of[file] if words & part_names(each))
            found += [f"{file.relative_to(root)}: {each} belongs to {home.relative_to(root)}" for each in strays]
    return found


@functools.cache
def part_names(name: str) -> set[str]:
    """The runs of words of a name, joined: ``mla``, ``module`` and ``mlamodule`` for ``mla_module``."""
    words = re.findall(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])", name)
    runs = itertools.combinations(range(len(words) + 1), 2)
    return {"".join(words[first:last]).lower() for first, last in runs}


SCANS = {
    "imports": scan_imports,
    "names": scan_names,
    "circles": scan_circles,
    "mixers": scan_mixers,
    "device": scan_device,
    "sizes": scan_sizes,
    "constructors": scan_constructors,
    "inheritance": scan_inheritance,
}


@pytest.mark.parametrize("rule", SCANS)
def test_the_rules_of_the_layout(rule: str) -> None:
    offenders = SCANS[rule](PACKAGE)
    assert not offenders, f"{len(offenders)} against the rule on {rule}:\n" + "\n".join(offenders)


Arrows = set[tuple[str, str]]


def arrows(root: Path) -> Arrows:
    """(importer, imported) for the packages and the modules of the top level; imports within functions count too."""
    found: Arrows = set()
    for file in sorted(root.rglob("*.py")):
        if file.name == "__main__.py":
            continue
        here = file.relative_to(root).parts[0].removesuffix(".py")
        for _, module in imports(parsed(file.read_text())):
            there = module.split(".")[1] if module.startswith("nemo_kto.") else ""
            if there not in ("", here, "__version__"):
                found.add((here, there))
    return found


def reachable(edges: Arrows, start: str) -> set[str]:
    """Packages that the arrows lead to, in one or more steps."""
    found: set[str] = set()
    left = [there for here, there in edges if here == start]
    while left:
        found.add(there := left.pop())
        left += [further for here, further in edges if here == there and further not in found]
    return found


def without_shortcuts(edges: Arrows) -> Arrows:
    """The arrows that no path of other arrows replaces."""
    return {(here, there) for here, there in edges if there not in reachable(edges - {(here, there)}, here)}


def test_the_figure_shows_the_imports() -> None:
    text = (REPOSITORY / "docs/internals/design.md").read_text(encoding="utf-8")
    figure = text.split("```mermaid")[1].split("```")[0]
    drawn = {tuple(line.split(" --> ")) for line in map(str.strip, figure.splitlines()) if " --> " in line}
    expected = without_shortcuts(arrows(PACKAGE))
    assert drawn == expected, "\n".join(["draw:", *(f"    {here} --> {there}" for here, there in sorted(expected))])


def test_no_package_imports_one_that_imports_it() -> None:
    edges = arrows(PACKAGE)
    assert not [here for here, _ in edges if here in reachable(edges, here)]


SHARED = (
    *(f"algorithms/{name}.py" for name in ("dpo", "callbacks", "duration", "protocols", "recipes/recipe")),
    *(f"models/engine/{name}.py" for name in ("engine", "sequences", "reference")),
    "models/preference_model.py",
    *(
        str(file.relative_to(PACKAGE))
        for package in ("config", "run", "memory", "cli")
        for file in sorted((PACKAGE / package).rglob("*.py"))
        if file.name != "keys.py"  # has examples
    ),
)  # fmt: skip


@pytest.mark.parametrize("file", SHARED)
def test_shared_code_does_not_depend_on_an_algorithm(file: str) -> None:
    """The loop, the engine, the reference and the command line are those of every algorithm: a name of KTO's is a leak."""
    tree = parsed((PACKAGE / file).read_text(encoding="utf-8"))
    found = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    found |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    found |= {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    docstrings = {ast.get_docstring(node, clean=False) for node in ast.walk(tree) if isinstance(node, _DOCUMENTED)}
    of_kto = ("kto", "desirable", "kl_samples", "kl_rows", 'preference"')
    names_of_ours = ("nemo-kto", "nemo_kto", "NEMO_KTO")
    leaks = []
    for name in found - docstrings:
        text = str(name)
        for own in names_of_ours:
            text = text.replace(own, "")
        leaks += [name for word in of_kto if word in text.lower()]
    assert not leaks


_DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef


def test_the_deliberate_faults_apply_to_the_code_as_it_is() -> None:
    """Each text of mutants.toml occurs once in its file; `make mutants` runs too rarely to notice."""
    mutants = tomllib.loads((REPOSITORY / "tests/mutants.toml").read_text())["mutant"]
    stale = [each["name"] for each in mutants if (REPOSITORY / each["file"]).read_text().count(each["text"]) != 1]
    assert len(mutants) > 100
    assert stale == []


# Families that tests choose for a trait, or as any model. The others are in no test but the matrices over all families.
SAMPLES = names(
    "apertus cohere deepseek_v3 falcon_h1 gemma2 gemma3_text gemma4_text glm4 glm4_moe gpt_oss granitemoehybrid lfm2 "
    "lfm2_moe llama llama4_text ministral3 mistral mixtral nemotron_h olmo2 phi3 qwen2 qwen2_moe qwen3 qwen3_5_text "
    "qwen3_moe qwen3_next smollm3"
)


def test_a_family_is_one_source_file_and_one_file_of_tests() -> None:
    """Generated docs, data, and tests of single fields of config.json (tests/unit/architecture) do not count."""
    texts = {
        str(file.relative_to(REPOSITORY)): file.read_text(encoding="utf-8")
        for folder in ("nemo_kto", "tests")
        for file in (REPOSITORY / folder).rglob("*.py")
        if not file.is_relative_to(REPOSITORY / "tests/unit/architecture") and file != Path(__file__)
    }
    for family in FAMILIES.values():
        own = {name for name, model in MODELS.items() if model.model_type == family.name}
        assert own, f"{family.name}: add a model to tests/families"
        if family.name in SAMPLES:
            continue
        quoted = {f'"{name}"' for name in (*own, family.name, family.hf_architecture)}
        found = sorted(file for file, text in texts.items() if any(name in text for name in quoted))
        folders = [file.rpartition("/")[0] for file in found]
        assert folders == ["nemo_kto/architecture/families", "tests/families"], f"{family.name} is named in {found}"
