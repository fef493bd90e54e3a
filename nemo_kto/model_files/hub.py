"""Models of the Hugging Face hub, named hf:ORGANISATION/NAME[@REVISION], in huggingface_hub's own cache.

A name is pinned first: its revision becomes the hash of a commit, whose files are then in one folder of the cache. Only
safetensors, JSON and tokenizer files, the model card and the license are downloaded. huggingface_hub is imported where a hub
name is used.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

from nemo_kto.errors import UserError
from nemo_kto.utils.locks import one_writer

HUB = "hf:"
_NAME = re.compile(r"hf:(?P<repository>[\w-][\w.-]*/[\w-][\w.-]*)(?:@(?P<revision>(?!.*\.\.)\w[\w./-]*))?", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SMALL = ("*.json", "*.jinja", "tokenizer*", "*.model", "*.tiktoken", "merges.txt", "vocab.txt")
_ABOUT = ("README.md", "LICENSE*", "NOTICE*", "USE_POLICY*", "*.py")  # code is copied to exports, and never run
_CACHED = re.compile(
    r"(?:.*/)?models--(?P<organisation>[\w-][\w.-]*?)--(?P<name>[\w-][\w.-]*)/snapshots/(?P<commit>[0-9a-f]{40})/?", re.ASCII
)
_LEFT_OUT = ("*/*", "consolidated*")  # copies of the model in other formats
_MAIN = "main"
_TOKEN = "HF_TOKEN"  # nosec B105  # name of the variable


def is_hub_name(name: str) -> bool:
    """Return whether a model is named by its repository on the hub, not by a folder."""
    return name.startswith(HUB)


def local_folder(name: str) -> Path:
    """Return the folder of a model: ``name`` itself, or the folder of a pinned hub name in huggingface_hub's cache."""
    if (found := _NAME.fullmatch(name)) is None or not _COMMIT.fullmatch(found["revision"] or ""):
        return Path(name)
    return _cache_folder(found["repository"]) / "snapshots" / found["revision"]


def hub_name(name: str) -> tuple[str, str] | None:
    """Return repository and commit of a pinned hub name or of a folder in huggingface_hub's cache; None for others."""
    if found := _CACHED.fullmatch(name):
        return f"{found['organisation']}/{found['name']}", found["commit"]
    found = _NAME.fullmatch(name)
    return (found["repository"], found["revision"]) if found and found["revision"] else None


def pin(name: str, *, earlier: object = None, leads: bool = True, weights: bool = True) -> str:
    """Download a model if the cache lacks it, and return its name with the hash of the commit as revision.

    One process of a machine downloads while the others wait.

    Args:
        name: hf:ORGANISATION/NAME[@REVISION]; the default revision is the newest.
        earlier: the pinned name in the record of an earlier start of the same run, whose commit is the default revision.
        leads: ask the hub for the newest commit; other ranks of a machine take the commit in the cache, if it is complete.
        weights: also download the weights; otherwise only the files that describe the model.

    Raises:
        UserError: the name has another form, there is no such model, or it cannot be downloaded.
    """
    if (found := _NAME.fullmatch(name)) is None:
        raise UserError(f"must be {HUB}ORGANISATION/NAME or {HUB}ORGANISATION/NAME@REVISION, got {name}; correct the name")
    repository, revision = found["repository"], found["revision"]
    if revision is None and (recorded := _NAME.fullmatch(str(earlier))) and recorded["repository"] == repository:
        revision = recorded["revision"]
    commit = _download(str(_cache_folder(repository)), repository, revision, leads, weights)
    if isinstance(commit, UserError):
        raise commit
    return f"{HUB}{repository}@{commit}"


def _cache_folder(repository: str) -> Path:
    from huggingface_hub.constants import HF_HUB_CACHE

    return Path(HF_HUB_CACHE).expanduser() / f"models--{repository.replace('/', '--')}"


@cache
def _download(folder: str, repository: str, revision: str | None, leads: bool, weights: bool) -> str | UserError:
    """Return the hash of the commit, or the error; both are kept, because a command line is checked more than once."""
    from huggingface_hub.constants import HF_HUB_OFFLINE

    offline = bool(HF_HUB_OFFLINE)
    try:
        if offline or not leads:
            try:
                return _snapshot(repository, revision, weights, local_files_only=True)
            except FileNotFoundError:
                if offline:
                    raise
        Path(folder).parent.mkdir(parents=True, exist_ok=True)
        with one_writer(Path(folder), private=False):
            return _snapshot(repository, revision, weights, local_files_only=False)
    except Exception as error:  # of huggingface_hub, of the HTTP library below it, or an OSError
        return _explained(error, repository, revision, offline=offline)


def _snapshot(repository: str, revision: str | None, weights: bool, *, local_files_only: bool) -> str:
    from huggingface_hub import snapshot_download

    patterns = [*_SMALL, *_ABOUT, *(["*.safetensors"] if weights else [])]
    folder = snapshot_download(
        repository,
        revision=revision,
        allow_patterns=patterns,
        ignore_patterns=[*_LEFT_OUT],
        local_files_only=local_files_only,
    )
    return Path(folder).name


def _explained(error: Exception, repository: str, revision: str | None, *, offline: bool) -> UserError:
    """Return the UserError for a failed download."""
    from huggingface_hub import errors
    from huggingface_hub.constants import HF_HUB_CACHE

    version = "" if revision is None else f" --revision {revision}"
    elsewhere = (
        f"on a machine with a network run `hf download {repository}{version}` with the same cache "
        f"(HF_HUB_CACHE={HF_HUB_CACHE}), or copy the model here and name its folder"
    )
    got = f"got {HUB}{repository}{'' if revision is None else f'@{revision}'}"
    if isinstance(error, errors.GatedRepoError):
        page = f"https://huggingface.co/{repository}"
        text = f"must be a model that you may download, {got}, which is gated"
        return UserError(f"{text}; accept its terms at {page}, and set HF_TOKEN or run `hf auth login`")
    if isinstance(error, errors.RepositoryNotFoundError):
        text = f"must be a model on the Hugging Face hub, {got}, which does not exist or is private"
        return UserError(f"{text}; correct the name, or for a private model set HF_TOKEN or run `hf auth login`")
    if isinstance(error, errors.RevisionNotFoundError):
        text = f"must be a branch, tag or commit of {repository}, got {revision}"
        return UserError(f"{text}; see https://huggingface.co/{repository}/tree/main")
    if getattr(getattr(error, "response", None), "status_code", None) in (401, 403):
        text = f"cannot be downloaded, {got}: the hub does not accept the token"
        return UserError(f"{text}; set HF_TOKEN to a valid one or unset it, or run `hf auth login`")
    if offline:
        text = f"must be in the cache of the Hugging Face hub with HF_HUB_OFFLINE=1, {got}, which is not"
        return UserError(f"{text}; unset HF_HUB_OFFLINE, or {elsewhere}")
    if isinstance(error, errors.LocalEntryNotFoundError | ConnectionError):
        return UserError(f"cannot be downloaded, {got}: this machine cannot reach the Hugging Face hub; {elsewhere}")
    reason = (error.strerror if isinstance(error, OSError) else None) or (str(error).splitlines() or [""])[0]
    return UserError(f"cannot be downloaded, {got}: {type(error).__name__}: {reason}; correct the cause, or {elsewhere}")


class Repository(NamedTuple):
    """A model repository of the hub and a branch of it."""

    name: str  # organisation/name
    branch: str

    @classmethod
    def of(cls, text: str) -> Repository:
        """Parse hf:ORGANISATION/NAME[@BRANCH]; raise UserError for another form."""
        if (found := _NAME.fullmatch(text)) is None:
            raise UserError(f"must be {HUB}USER/NAME or {HUB}USER/NAME@BRANCH, got {text}; correct the name")
        return cls(found["repository"], found["revision"] or _MAIN)


@dataclass(frozen=True, kw_only=True)
class Upload:
    """An upload that has passed the checks that need no network.

    Raises UserError if there is no token, or HF_HUB_OFFLINE is set.
    """

    target: Repository
    private: bool
    token_variable: str | None = None  # environment variable with the token; None for that of huggingface_hub

    def __post_init__(self) -> None:
        from huggingface_hub.constants import HF_HUB_OFFLINE

        if HF_HUB_OFFLINE:
            raise UserError("--push must be used without HF_HUB_OFFLINE=1, which is set; unset it")
        self._token()

    def _token(self) -> str:
        if self.token_variable is not None:
            if token := os.environ.get(self.token_variable):
                return token
            text = f"--token must be the name of an environment variable that holds a token, got {self.token_variable}"
            raise UserError(f"{text}, which is not set; export it")
        from huggingface_hub import get_token

        if token := get_token():
            return token
        remedy = f"set {_TOKEN} or run `hf auth login`; https://huggingface.co/settings/tokens makes one"
        raise UserError(f"--push must have a token with write access to the hub, got none; {remedy}")

    def send(self, folder: Path, *, message: str, instead: Mapping[str, bytes]) -> str:
        """Create the repository and the branch if they do not exist, upload the files in one commit, and return its URL.

        ``instead``: content of files that differ from those in the folder. Raises UserError if the hub refuses or cannot be
        reached; nothing is then committed.
        """
        from huggingface_hub import CommitOperationAdd, HfApi

        files = {file.relative_to(folder).as_posix(): file for file in sorted(folder.rglob("*")) if file.is_file()}
        contents = {name: instead.get(name, file) for name, file in files.items()}
        operations = [CommitOperationAdd(path_in_repo=name, path_or_fileobj=each) for name, each in contents.items()]
        api, (name, branch) = HfApi(token=self._token()), self.target
        try:
            api.create_repo(name, private=self.private or None, exist_ok=True)
            if branch != _MAIN:
                api.create_branch(name, branch=branch, exist_ok=True)
            return str(api.create_commit(name, operations, commit_message=message, revision=branch).commit_url)
        except Exception as error:  # of huggingface_hub, of the HTTP library below it, or an OSError
            raise self._explained(error) from error

    def _explained(self, error: Exception) -> UserError:
        text = f"--push cannot upload to {HUB}{self.target.name}"
        status, first = getattr(getattr(error, "response", None), "status_code", None), (str(error).splitlines() or [""])[0]
        if status in (401, 403):
            reason = f"the hub does not accept the token for it (status {status})"
            remedy = f"use a token of {self.target.name.partition('/')[0]} with write access"
        elif status is None:
            reason, remedy = f"{type(error).__name__}: {first}", "check the network, and repeat"
        else:
            reason, remedy = f"status {status}: {first}", "correct the cause, and repeat"
        return UserError(f"{text}: {reason}; {remedy}")
