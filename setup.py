"""What pyproject.toml cannot say: conf/ is shipped inside the package, and the README is shown outside of the repository."""

from __future__ import annotations

import os
import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
# Of the repository, such as https://HOST/OWNER/nemo_kto, for the package's page on an index.
REPOSITORY = os.environ.get("NEMO_KTO_REPOSITORY", "").rstrip("/")
_LINK = re.compile(r"\[([^\]]+)\]\((?!\w+:|#)([^)]+)\)")  # to a file of the repository


def long_description(repository: str) -> str:
    """The README, whose links to files lead to the repository; without one they are text, since they would lead nowhere."""
    text = (HERE / "README.md").read_text(encoding="utf-8")
    return _LINK.sub(rf"[\1]({repository}/blob/main/\2)" if repository else r"\1", text)


setup(
    long_description=long_description(REPOSITORY),
    long_description_content_type="text/markdown",
    project_urls={"Repository": REPOSITORY, "Changelog": f"{REPOSITORY}/blob/main/CHANGELOG.md"} if REPOSITORY else {},
    # conf/ lies beside the package so that it is the first thing one sees.
    packages=[*find_packages(include=["nemo_kto", "nemo_kto.*"]), "nemo_kto.conf"],
    package_dir={"nemo_kto": "nemo_kto", "nemo_kto.conf": "conf"},
)
