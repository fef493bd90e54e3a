"""The weights of a model that a format for the frozen weights of linear layers under adapters applies to."""

from __future__ import annotations

from collections.abc import Iterator

from nemo_kto.architecture.architecture import Architecture
from nemo_kto.architecture.segments import held, segments, shards, source_shapes, split_dimension
from nemo_kto.layers.layer_settings import FORMATS
from nemo_kto.mixers.param_mapping import ParamMapping


def is_quantized(name: str, architecture: Architecture) -> bool:
    """Return whether ``architecture.base_format`` applies to a parameter, given its name in the table of the family.

    It applies to the weights of linear layers in the transformer layers. MXFP4 applies to experts only, if there are any, as
    in the files of gpt-oss.
    """
    if architecture.base_format is None or ".linear_" not in name or not name.endswith(".weight"):
        return False
    return architecture.base_format != "mxfp4" or architecture.experts is None or ".experts." in name


def width_problem(architecture: Architecture) -> str | None:
    """Return what is wrong with a weight whose rows on a rank are not divided into whole blocks; None if all are."""
    if architecture.base_format is None:
        return None
    block = FORMATS[architecture.base_format].block[1]
    for mapping in architecture.family.mappings:
        has_any = any(architecture.instances(mapping, range(architecture.num_layers), experts=1))
        if not has_any or not is_quantized(mapping.mcore_name, architecture):
            continue
        width = next((width for width in _widths(mapping, architecture) if width % block), None)
        if width is not None:
            name = next(iter(mapping.hf_names)).format(layer="N", expert="N")
            return f"{width} columns of {name} that are stored together on a rank are not a multiple of {block}"
    return None


def _widths(mapping: ParamMapping, architecture: Architecture) -> Iterator[int]:
    """Yield the beginnings and widths of the parts of a weight's columns that ranks hold, padding included."""
    if split_dimension(mapping) != 1:
        yield from (shape[1] for shape in source_shapes(mapping, architecture))
        return
    ranks = shards(mapping, architecture)
    length = sum(part.length for part in segments(mapping, architecture)) // ranks
    for rank in range(ranks):
        for _, part in held(mapping, architecture, rank=rank, length=length):
            yield from (part.start, part.length)
