"""Upload of an export to the Hugging Face hub; huggingface_hub is imported where it is used."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from nemo_kto.artifacts.hub import HUB
from nemo_kto.errors import UserError

_TARGET = re.compile(r"hf:(?P<repository>[\w-][\w.-]*/[\w-][\w.-]*)(?:@(?P<branch>(?!.*\.\.)\w[\w./-]*))?", re.ASCII)
_MAIN = "main"
_TOKEN = "HF_TOKEN"  # nosec B105  # name of the variable


class Repository(NamedTuple):
    """A model repository of the hub and a branch of it."""

    name: str  # organisation/name
    branch: str

    @classmethod
    def of(cls, text: str) -> Repository:
        """Parse hf:ORGANISATION/NAME[@BRANCH]; raise UserError for another form."""
        if (found := _TARGET.fullmatch(text)) is None:
            raise UserError(f"must be {HUB}USER/NAME or {HUB}USER/NAME@BRANCH, got {text}; correct the name")
        return cls(found["repository"], found["branch"] or _MAIN)


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
        operations = [
            CommitOperationAdd(path_in_repo=name, path_or_fileobj=instead.get(name, file)) for name, file in files.items()
        ]
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
