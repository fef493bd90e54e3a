# nemo_kto on NVIDIA's PyTorch image, with CUDA, NCCL, torch and Transformer Engine that were built for each other.
#
#   docker build -t nemo_kto .
#   docker build -t nemo_kto --build-arg EXTRAS=wandb,mlflow --build-arg KERNELS="flash-linear-attention mamba-ssm" .
#   docker run --rm --gpus all --ipc=host --ulimit memlock=-1 -v "$PWD:/workspace" nemo_kto nemo-kto kto ...
#
# docs/scale/kubernetes.md has a table of base images, and which of them this code can use.
ARG BASE_IMAGE=nvcr.io/nvidia/pytorch:26.06-py3
FROM ${BASE_IMAGE}

# The image's constraint file pins libraries that we need in other versions; the next step pins what must stay.
ENV PIP_CONSTRAINT="" \
    PIP_BREAK_SYSTEM_PACKAGES=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_NO_CACHE_DIR=1 \
    PIP_ROOT_USER_ACTION=ignore

WORKDIR /opt/nemo_kto
# The packages are a layer of their own, which a change of the sources leaves as it is. torch and everything compiled against it
# must not change: with these constraints pip fails instead of replacing them. The others are those of our constraints, or what
# the base image has if that will do.
ARG EXTRAS=""
COPY pyproject.toml constraints.txt constraints-py312.txt benchmarks/gpu_versions.py ./
RUN python3 gpu_versions.py --pins > /opt/constraints.txt \
    && python3 -c 'import sys, tomllib; \
project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
extras = project["optional-dependencies"]; \
print(*project["dependencies"], *(each for name in sys.argv[1].split(",") if name for each in extras[name]), sep="\n")' \
        "${EXTRAS}" > /opt/requirements.txt \
    && python3 -m pip install --constraint /opt/constraints.txt --requirement /opt/requirements.txt

# Kernels of hybrid models, compiled for this torch where there is no wheel.
ARG KERNELS=""
RUN python3 -c 'import sys; print(*sys.argv[1].split(), sep="\n")' "${KERNELS}" > /opt/kernels.txt \
    && python3 -m pip install --no-build-isolation --constraint /opt/constraints.txt --requirement /opt/kernels.txt

COPY setup.py README.md LICENSE ./
COPY nemo_kto nemo_kto
COPY conf conf
COPY examples examples
# A package that does not fit torch fails here, where no GPU is needed, and not in a run.
RUN python3 -m pip install --no-deps . \
    && python3 -P -c 'from importlib import import_module, util; \
engine = ["transformer_engine.pytorch"] if util.find_spec("transformer_engine") else []; \
print(*(import_module(name).__name__ for name in ["torch", *engine, "megatron.core", "nemo_kto.cli.main"]))'

ARG BASE_IMAGE
ARG VERSION=""
ARG REVISION=""
LABEL org.opencontainers.image.title="nemo_kto" \
      org.opencontainers.image.description="KTO, DPO and their variants on megatron-core" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.base.name="${BASE_IMAGE}"

# Works for any user: caches and runs go to a folder that every user may write to.
ENV HOME=/workspace \
    USER=nemo \
    PYTHONUNBUFFERED=1
RUN mkdir -p /workspace && chmod 1777 /workspace
WORKDIR /workspace
USER 1000:1000
CMD ["nemo-kto", "--help"]
