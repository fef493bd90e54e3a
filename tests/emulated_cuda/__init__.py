"""Emulated GPUs: torch's build for CUDA runs whole jobs on "cuda" devices of a machine that has none.

torch.cuda, streams, events, the caching allocator (and so its figures of memory), page-locked memory and generators are the
real ones, on a stand-in for the CUDA runtime (runtime.c). Operators have other kernels, which call the CPU's on the same
memory (kernels.py) and are as strict about devices as CUDA's. A copy that does not block arrives when the host has waited
for it (copies.py), NCCL is gloo (collectives.py), and each place where the host waits for the device is counted (waits.py),
as are launches, copies to the device, and looks at files and variables of the environment (host_work.py).

Not shown are speed, the precision of CUDA's kernels, Transformer Engine, Triton, torch.compile, and NCCL's order of work.
"""
