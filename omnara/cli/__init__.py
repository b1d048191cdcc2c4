"""The command line. `omnara.cli:main` is the entry point of the `omnara` program."""

from omnara.cli.root import main

__all__ = ["main"]
