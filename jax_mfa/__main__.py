"""Command line: `python -m jax_mfa bench`."""

from __future__ import annotations

import argparse

from jax_mfa import bench


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m jax_mfa", description="Tools of jax_mfa.")
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("bench", help=bench.HELP, description=bench.__doc__)
    bench.add_arguments(command)
    command.set_defaults(run=bench.run)
    options = parser.parse_args(arguments)
    return options.run(options)


if __name__ == "__main__":
    raise SystemExit(main())
