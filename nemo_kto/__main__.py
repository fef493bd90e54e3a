"""`python -m nemo_kto`, the same as the command `nemo-kto`."""

from nemo_kto.cli.main import main

if __name__ == "__main__":
    main()
