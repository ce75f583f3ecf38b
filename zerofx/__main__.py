"""``python -m zerofx``: the command line."""

from __future__ import annotations

from zerofx.cli.commands import main

if __name__ == "__main__":
    main(prog_name="zerofx")
