"""``python -m lightning_perf``, if the command is not on the path."""

from lightning_perf.cli import main

if __name__ == "__main__":
    main()
