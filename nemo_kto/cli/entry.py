"""Entry point of `nemo-kto`; commands that need neither torch nor Hydra run without loading them."""

from __future__ import annotations

import sys

from nemo_kto.telemetry import console


def main() -> None:
    """Run the command `nemo-kto`."""
    console.protect()
    if sys.argv[1:2] == ["checkpoint"]:
        with console.exit_if_output_lost():
            look_at_checkpoints(sys.argv[2:])
    else:
        from nemo_kto.cli.main import main as train_or_export

        train_or_export()


def look_at_checkpoints(argv: list[str]) -> None:
    from nemo_kto.cli.checkpoint_command import main as command
    from nemo_kto.errors import UserError
    from nemo_kto.utils.text import print_error

    try:
        sys.exit(command(argv))
    except UserError as error:
        print_error(f"nemo-kto checkpoint: {error}")
        sys.exit(2)
