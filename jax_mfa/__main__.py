"""Command line: `python -m jax_mfa bench`, `check`, `source` and `tune`."""

from __future__ import annotations

import argparse
import errno
import os
import sys

from jax_mfa.cli import bench, check, show, tune
from jax_mfa.cli.command_line import INTERRUPTED, fit_output_to_the_terminal

READER_GONE = 141  # what a shell reports of a program that SIGPIPE ends


def main(arguments: list[str] | None = None) -> int:
    fit_output_to_the_terminal()
    parser = argparse.ArgumentParser(prog="python -m jax_mfa", description="Tools of jax_mfa.")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, tool in {"bench": bench, "check": check, "source": show, "tune": tune}.items():
        command = commands.add_parser(name, help=tool.HELP, description=tool.__doc__)
        tool.add_arguments(command)
        command.set_defaults(run=tool.run, refuse=command.error)
    try:
        try:
            options = parser.parse_args(arguments)
            return options.run(options)
        except argparse.ArgumentTypeError as error:
            return options.refuse(str(error))  # exits, as for any option that is wrong
        finally:
            print(end="", flush=True)
    except BrokenPipeError:  # as with `| head`
        return READER_GONE
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return INTERRUPTED


if __name__ == "__main__":
    status = main()
    if status:  # what ended early may have left a thread inside JAX, and text that can no longer be written
        os._exit(status)
