"""Draw the figures of the documentation: docs/figures/NAME.svg.

    python -m docs.figures.draw [NAME ...]

The losses are those of ``nemo_kto.losses``; the curves are of real runs, whose metrics are in docs/figures/data.
"""

from __future__ import annotations

import argparse

from docs.figures import curves, diagrams, losses

FIGURES = {**losses.FIGURES, **diagrams.FIGURES, **curves.FIGURES}


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw the figures of the documentation.")
    parser.add_argument("names", nargs="*", metavar="NAME", choices=[*FIGURES, []], help=", ".join(FIGURES))
    for name in parser.parse_args().names or FIGURES:
        file = FIGURES[name]()
        print(f"{file.name}: {file.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
