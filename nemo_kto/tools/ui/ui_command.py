"""Command `nemo-kto ui`: a page on this machine that starts the other commands."""

from __future__ import annotations

import contextlib
import os
import socket

import click

from nemo_kto.cli.command import command, integer_from
from nemo_kto.errors import UserError
from nemo_kto.telemetry.loggers import installed

_LOOPBACK = ("127.0.0.1", "localhost")
_DESCRIPTION = """\
Open a page on this machine on which a data file, its columns and a model are chosen, the run is checked, planned, started,
watched and stopped, and its model answers. It starts the commands of nemo-kto, which it shows. Needs Gradio: the extra ui.
"""


@command("ui", _DESCRIPTION)
@click.option("--host", default=_LOOPBACK[0], metavar="HOST", help="127.0.0.1 or localhost; other hosts are refused")
@click.option("--port", type=integer_from(0), default=0, metavar="N", help="port; by default a free one")
def main(host: str, port: int) -> None:
    """Run the command until Ctrl-C; UserError if it cannot be served."""
    if host not in _LOOPBACK:
        text = f"--host must be 127.0.0.1 or localhost, got {host}: the page runs commands with the rights of this user"
        raise UserError(
            f"{text}; from another machine, forward the port: ssh -L {port or 7860}:127.0.0.1:{port or 7860} HOST"
        )
    if not installed("gradio"):
        raise UserError("nemo-kto ui needs the package gradio, which is not installed; run `pip install 'nemo-kto[ui]'`")
    os.environ |= {"GRADIO_ANALYTICS_ENABLED": "False", "HF_HUB_DISABLE_TELEMETRY": "1"}
    with socket.socket() as listening:
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind((_LOOPBACK[0], port))
        except (OSError, OverflowError) as error:
            raise UserError(f"--port must be a free port, got {port}: {error}; leave it out for any free one") from error
        from nemo_kto.tools.ui.server import serve

        with contextlib.suppress(KeyboardInterrupt):
            serve(listening)
