# nemo_kto on NVIDIA's PyTorch image, with CUDA, NCCL, torch and Transformer Engine that were built for each other.
#
#   docker build -t nemo_kto .
#   docker build -t nemo_kto --build-arg BASE_IMAGE=nvcr.io/nvidia/nemo:26.02 .
#   docker run --rm --gpus all -v "$PWD:/workspace" nemo_kto nemo-kto kto ...
ARG BASE_IMAGE=nvcr.io/nvidia/pytorch:25.11-py3
FROM ${BASE_IMAGE}
ARG MEGATRON_CORE=0.16.1

# The image's constraint file pins libraries that we need in other versions; the next step pins what must stay.
ENV PIP_CONSTRAINT="" \
    PIP_BREAK_SYSTEM_PACKAGES=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_NO_CACHE_DIR=1

WORKDIR /opt/nemo_kto
COPY setup.py pyproject.toml README.md LICENSE ./
COPY nemo_kto nemo_kto
COPY conf conf
COPY examples examples

# torch and everything compiled against it must not change: with these constraints pip fails instead of replacing them.
RUN python3 -c 'from importlib.metadata import distributions as d; \
stay = ("torch", "triton", "pytorch-triton", "transformer-engine", "transformer_engine", "flash", "apex", "nvidia"); \
found = {(p.metadata["Name"], p.version) for p in d()}; \
print(*(f"{n}=={v}" for n, v in sorted(found) if n and n.lower().startswith(stay)), sep="\n")' > /opt/base-image.txt \
    && python3 -m pip install --no-deps "megatron-core==${MEGATRON_CORE}" \
    && python3 -m pip install --constraint /opt/base-image.txt .

# Works for any user: caches and runs go to a folder that every user may write to.
ENV HOME=/workspace \
    USER=nemo \
    PYTHONUNBUFFERED=1
RUN mkdir -p /workspace && chmod 1777 /workspace
WORKDIR /workspace
USER 1000:1000
CMD ["nemo-kto", "--help"]
