"""Formats in which the frozen weights of linear layers are stored under adapters, and which weights these are."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from nemo_kto.architecture.architecture import Architecture
from nemo_kto.architecture.segments import held, segments, shards, source_shapes, split_dimension
from nemo_kto.mixers.param_mapping import ParamMapping


@dataclass(frozen=True, kw_only=True)
class BaseFormat:
    """A format of quantized weights [out, in]: codes of ``bits`` bits, and one scale for each block."""

    name: str
    bits: int  # of the code of a value
    block: tuple[int, int]  # rows and columns of a weight in the files that have one scale
    scale_bytes: int

    def bytes_of(self, shape: tuple[int, ...]) -> int:
        """Return the bytes of a rank's weight of this shape; in memory each row has scales of its own."""
        values = math.prod(shape)
        return values * self.bits // 8 + values // self.block[1] * self.scale_bytes


FORMATS: dict[str, BaseFormat] = {
    # 4-bit NormalFloat (Dettmers et al. 2023, arXiv 2305.14314), without double quantization, as bitsandbytes stores it
    "nf4": BaseFormat(name="nf4", bits=4, block=(1, 64), scale_bytes=4),
    # e4m3 with fp32 scales, as in the files of DeepSeek-V3 (arXiv 2412.19437, section 3.3.2)
    "fp8": BaseFormat(name="fp8", bits=8, block=(128, 128), scale_bytes=4),
    # e2m1 with e8m0 scales (OCP Microscaling Formats 1.0), as in the files of gpt-oss
    "mxfp4": BaseFormat(name="mxfp4", bits=4, block=(1, 32), scale_bytes=1),
}


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
