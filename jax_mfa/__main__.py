"""Command line: `python -m jax_mfa bench`, `check` and `source`."""

from __future__ import annotations

import argparse
import os
import sys

from jax_mfa import bench, check
from jax_mfa.metal import show

READER_GONE = 141  # what a shell reports of a program that SIGPIPE ends


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m jax_mfa", description="Tools of jax_mfa.")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, tool in {"bench": bench, "check": check, "source": show}.items():
        command = commands.add_parser(name, help=tool.HELP, description=tool.__doc__)
        tool.add_arguments(command)
        command.set_defaults(run=tool.run)
    options = parser.parse_args(arguments)
    try:
        status = options.run(options)
        sys.stdout.flush()
    except BrokenPipeError:
        # as with `| head`; what is still buffered must not fail once more at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return READER_GONE
    return status


if __name__ == "__main__":
    raise SystemExit(main())
