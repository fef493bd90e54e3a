"""Opening of models and adapters for inference, whose files are checked before a library loads them.

Weights, configuration and adapters are read as for training. What no check can foresee, such as a regular expression that
never ends or a configuration of 10^9 labels, is tried without weights in a process with limits.
"""

from __future__ import annotations

import contextlib
import importlib.util
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_kto.data.tokens.workers import BoundedProcess, LimitError, WorkError
from nemo_kto.errors import UserError, printable
from nemo_kto.model_files.adapter_files import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    MODULES,
    beginning_of,
    key_mapping,
    text_model_prefix,
)
from nemo_kto.model_files.model_folders import check_files
from nemo_kto.model_files.safetensors_files import read_header

if TYPE_CHECKING:
    import torch

MAX_SECONDS: float = 20  # of CPU time to build a model without weights; the largest take a few
_PER_BYTE, _MORE = 8, 10**8  # parameters for each byte of weights, and more; others would be drawn at random
_MAX_NAMES = 3  # of missing weights, in a message
_PEFT_MUST = "peft must load the adapters, got"
_ADAPTER_REMEDY = "name the run, whose merged model is used"
_FROM_FOLDER: Mapping[str, Any] = {"local_files_only": True, "trust_remote_code": False}
# Of all models of a command. With these modules most of transformers is imported before the time of a model is measured.
trial = BoundedProcess(imports=("transformers.modeling_utils", "nemo_kto.data.tokens.chat_template"), max_bytes=2**32)


def open_model(
    folder: Path,
    *,
    adapters: Path | None = None,
    base_format: str | None = None,
    class_name: str,
    dtype: torch.dtype,
    remedy: str,
    accept: Callable[[Mapping[str, Any]], None] = lambda config: None,
) -> Any:
    """Load a model with a class of transformers, and merge adapters in PEFT format, without network access and foreign code.

    With ``base_format``, a name in ``layer_settings.FORMATS``, the base model is quantized, and the adapters are not merged.
    ``accept`` gets architectures and num_labels of config.json before weights are read, and may raise a UserError. Raises
    UserError if a file is damaged or outside its folder, weights are missing, or building the model reaches a limit.
    """
    if adapters is not None and importlib.util.find_spec("peft") is None:
        text = f"{adapters}: the package peft must be installed for adapters ({ADAPTER_CONFIG}), got none"
        raise UserError(f"{text}; pip install peft, or {_ADAPTER_REMEDY}")
    weights_bytes = check_files(folder, adapters)
    name = f"{folder}: config.json" if adapters is None else f"config.json in {folder} and {ADAPTER_CONFIG} in {adapters}"
    try:
        paths = [folder.absolute(), adapters and adapters.absolute()]
        config = trial(_build, *paths, class_name, remedy, max_seconds=MAX_SECONDS)
    except LimitError as error:
        raise UserError(f"{name} must describe a model that can be built{error}; {remedy}") from None
    except WorkError as error:
        raise UserError(str(error)) from None
    if config["parameters"] > _PER_BYTE * weights_bytes + _MORE:
        text = f"got {config['parameters']:,} parameters and files of {weights_bytes:,} bytes"
        raise UserError(f"{name} must describe the model whose weights are in the folder, {text}; {remedy}")
    accept(config)
    model = _load(folder, class_name, dtype, remedy)
    return model if adapters is None else _adapt(model, folder, adapters, base_format)


def _load(folder: Path, class_name: str, dtype: torch.dtype, remedy: str) -> Any:
    with _named(f"{folder}: the model cannot be loaded", remedy):
        import transformers

        from nemo_kto.data.tokens.chat_template import hf_config

        model, info = getattr(transformers, class_name).from_pretrained(
            folder,
            config=hf_config(folder),
            dtype=dtype,
            use_safetensors=True,
            generation_config=transformers.GenerationConfig(),  # else that of the folder, without checks
            output_loading_info=True,
            **_FROM_FOLDER,
        )
    if missing := sorted(info["missing_keys"]):  # transformers draws them at random
        raise UserError(f"{folder} must have all weights of the model, got none for {_some(missing)}; {remedy}")
    return model


def _adapt(model: Any, folder: Path, adapters: Path, base_format: str | None) -> Any:
    mapping = key_mapping(adapters, folder)
    with warnings.catch_warnings(record=True) as said, _named(f"{adapters}: {_PEFT_MUST}", _ADAPTER_REMEDY):
        from peft import PeftModel

        warnings.simplefilter("always")
        named: Any = {"config": _peft_config(adapters), "key_mapping": mapping}
        adapted = PeftModel.from_pretrained(model, str(adapters), **named)
    # Without effect in other parts, such as those for images, whose modules may have the same names.
    prefix, names = text_model_prefix(folder), read_header(adapters / ADAPTER_WEIGHTS)[0]
    start = MODULES + prefix if prefix is not None else beginning_of(names) or MODULES
    absent = [name for each in said for name in re.findall(r"'([^']+)'", str(each.message)) if name.startswith(start)]
    if absent:
        raise UserError(f"{adapters} must have all weights of the adapters, got none for {_some(absent)}; {_ADAPTER_REMEDY}")
    if base_format is None:
        return adapted.merge_and_unload()
    from nemo_kto.tools.inference.quantized_base import quantize_base

    quantize_base(adapted, folder, base_format, start=start)
    return adapted.get_base_model()


def _some(names: Sequence[str]) -> str:
    return ", ".join([*names[:_MAX_NAMES], *["..."] * (len(names) > _MAX_NAMES)])


def _build(folder: Path, adapters: Path | None, class_name: str, remedy: str) -> dict[str, Any]:
    """Build the model of a folder with its adapters on the device "meta", without values; return facts about it."""
    import torch

    with torch.device("meta"):
        with _named(f"{folder}: the model cannot be loaded", remedy):
            import transformers

            from nemo_kto.data.tokens.chat_template import hf_config

            config = hf_config(folder)
            model = getattr(transformers, class_name).from_config(config, trust_remote_code=False)
        if adapters is not None:
            with _named(f"{adapters}: {_PEFT_MUST}", _ADAPTER_REMEDY):
                from peft import inject_adapter_in_model

                inject_adapter_in_model(_peft_config(adapters), model)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return {"architectures": config.architectures, "num_labels": config.num_labels, "parameters": parameters}


def _peft_config(adapters: Path) -> Any:
    from peft import PeftConfig

    config = PeftConfig.from_pretrained(str(adapters), local_files_only=True)
    config.megatron_config = None  # PEFT would import the module that megatron_core names
    return config


@contextlib.contextmanager
def _named(start: str, remedy: str) -> Iterator[None]:
    """Turn the exceptions of a library, which may raise any for invalid files, into a UserError; silence its progress."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:
        raise UserError(f"{start}: {type(error).__name__}: {printable(str(error), 600)}; {remedy}") from error
