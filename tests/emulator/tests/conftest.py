"""Finds the package whether the suite runs from the repository's root or from here."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))
