"""Substitutes for the CUDA runtime and NVIDIA's other libraries, compiled in seconds and loaded before torch.

torch's build for CUDA is linked with 14 libraries of 3 GB. Here each is an empty library of that name and version: the few
functions that are called are those of runtime.c, and the others are bound when they are first called, which they never are.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_name("runtime.c")
RUNTIME = "libcuda.so.1"  # the driver is looked up in it
runtime: ctypes.CDLL


def load() -> None:
    """Build the substitutes if necessary, and load them into this process; torch must not be imported yet.

    Raises:
        subprocess.CalledProcessError, FileNotFoundError: there is no C compiler (cc) with its binutils.
    """
    global runtime
    built = Path(sys.prefix) / f"emulated_cuda-{hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:12]}"
    if not built.exists():
        build(built)
    runtime = ctypes.CDLL(str(built / RUNTIME), mode=ctypes.RTLD_GLOBAL)  # its functions are found before those of others
    runtime.emulated_take_records.restype = ctypes.c_size_t
    for library in built.glob("*.so.*"):
        ctypes.CDLL(str(library))


def device_count() -> int:
    """Number of devices; torch's own function would forbid processes that are forked afterwards to use one."""
    count = ctypes.c_int()
    runtime.cudaGetDeviceCount(ctypes.byref(count))
    return count.value


def build(folder: Path) -> None:
    """Compile the substitutes into ``folder``, atomically."""
    made = Path(tempfile.mkdtemp(dir=folder.parent))
    compile_c = ["cc", "-O1", "-w", "-shared", "-fPIC"]
    subprocess.run([*compile_c, f"-Wl,-soname,{RUNTIME}", str(SOURCE), "-o", str(made / RUNTIME), "-lpthread"], check=True)
    for name, version in linked_libraries().items():
        script = made / "version"
        script.write_text(f"{version} {{ *; }};")
        names = [f"-Wl,-soname,{name}", f"-Wl,--version-script,{script}"]
        subprocess.run([*compile_c, *names, "-x", "c", "-", "-o", str(made / name)], input=b"int unused;", check=True)
    with contextlib.suppress(OSError):  # another process was faster
        made.rename(folder)


def linked_libraries() -> dict[str, str]:
    """Names of NVIDIA's libraries that torch is linked with, and the version of the symbols that it expects in each."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    files = sorted((Path(spec.origin).parent / "lib").glob("*.so"))
    command = ["readelf", "--wide", "--dynamic", "--version-info", *map(str, files)]
    output = subprocess.run(command, env={**os.environ, "LC_ALL": "C"}, capture_output=True, text=True, check=True).stdout
    versions = dict(re.findall(r"File: (\S+) +Cnt: \d+\n +\w+: +Name: (\S+)", output))
    needed = set(re.findall(r"\(NEEDED\).*\[(lib(?:cu|nccl|nv)[^\]]*)\]", output))
    return {name: versions.get(name, name) for name in sorted(needed - {RUNTIME})}
