"""A cache of the Hugging Face hub, as huggingface_hub lays it out."""

from __future__ import annotations

from pathlib import Path


def add_model(cache: Path, repository: str, model: Path, *, commit: str, revision: str = "main") -> Path:
    """Put the files of a folder into the cache as one commit, to which the revision refers; returns its folder."""
    root = cache / f"models--{repository.replace('/', '--')}"
    snapshot = root / "snapshots" / commit
    for folder in (snapshot, root / "refs", root / "blobs"):
        folder.mkdir(parents=True, exist_ok=True)
    (root / "refs" / revision).write_text(commit)
    for file in model.iterdir():
        blob = root / "blobs" / f"{commit[:8]}-{file.name}"
        blob.write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(Path("../../blobs", blob.name))
    return snapshot
