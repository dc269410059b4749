"""Strict dialect check of .metal files: `python -m tests.emulator FILE… [-I FOLDER] [-D NAME=VALUE]`.

Exits with 1 on a finding.
"""

from __future__ import annotations

import argparse
import pathlib
import sys

from . import CompileError, PipelineError, strict_check
from . import compile as compile_source


def main() -> int:
    parser = argparse.ArgumentParser(prog="emulator", description=__doc__)
    parser.add_argument("files", nargs="+", type=pathlib.Path)
    parser.add_argument("-I", dest="include", action="append", default=[], help="folder of #include files")
    parser.add_argument("-D", dest="define", action="append", default=[], help="preprocessor macro, NAME or NAME=VALUE")
    parser.add_argument("--language", default="3.1", help="Metal language version")
    parser.add_argument("--list", action="store_true", help="list functions and function constants")
    options = parser.parse_args()
    macros = dict(d.split("=", 1) if "=" in d else (d, "1") for d in options.define)
    major, minor = options.language.split(".")
    settings = dict(language_version=(int(major), int(minor)), macros=macros, include_paths=options.include)
    failed = False
    for file in options.files:
        try:
            found = strict_check(file, **settings)
            if options.list and not found:
                library = compile_source(file, **settings)
                print(
                    *library.functions,
                    *(f"[[function_constant({f.index})]] {f.name}" for f in library.constants),
                    sep="\n",
                )
        except (CompileError, PipelineError) as e:
            found = str(e)
        print(found or f"{file}: ok", file=sys.stderr if found else sys.stdout)
        failed |= bool(found)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
