"""The model of Apple's chips against figures that it was not fitted to."""

from __future__ import annotations

import dataclasses
import re

import apple
import numpy as np
import published
import pytest

MEAN, MOST = 4.0, 9.0  # points


def size(use, model=apple.MODEL):
    return np.abs(published.errors(published.rows()[use], model))


def test_figures_that_were_held_out_are_predicted():
    found = size("held out")
    assert found.mean() <= MEAN and found.max() <= MOST
    assert {(x.family, x.dtype, x.kernel) for x in published.rows()["held out"]} >= {
        *((7, t, k) for t in ("float16", "float32") for k in published.PRODUCTS),
        *((9, "float32", k) for k in published.PRODUCTS),
        (9, "float16", "forward"),
    }


@pytest.mark.parametrize("constant, value", [("overlap", 1.0), ("load", 3.0), ("sum_byte", 0.0), ("cached", 0.0)])
def test_each_fitted_constant_is_needed(constant, value):
    changed = dataclasses.replace(apple.MODEL, **{constant: value})
    assert size("held out", changed).mean() > 1.1 * size("held out").mean()


def test_the_constants_are_those_that_half_of_the_figures_give():
    found = published.fit(published.rows()["fitted"])
    assert dataclasses.astuple(found) == pytest.approx(dataclasses.astuple(apple.MODEL), rel=0.02)


def test_rows_are_of_one_use_each_and_all_are_printed():
    uses = published.rows()
    everything = [row for some in uses.values() for row in some]
    assert [len(some) for some in uses.values()] == [29, 29, 45, 30] and len(set(everything)) == len(everything)
    printed = published.table().splitlines()
    for use, some in uses.items():
        assert sum(line.endswith(f"| {use} |") for line in printed) == len(some)


def test_a_share_is_of_the_time_that_products_take():
    """The source's README: 4400 GINSTR/s of an M1 Max are 83 % of its peak; and a product takes 17 cycles for 16."""
    row = published.Row("M1 Max", "float16", "forward", 10**6, 64, 32, "", 4400, 5308)
    assert row.published == pytest.approx(83 * 17 / 16, abs=0.2)
    shares = [apple.MODEL.share(apple.Work(half=5), family) for family in (7, 9)]
    assert shares == pytest.approx([1, 1])


def test_the_documentation_says_todays_errors():
    page = (published.FILE.parents[2] / "docs" / "kernels.md").read_text(encoding="utf-8")
    for use, words in {
        "fitted": "fitted, 29",
        "held out": "held out, 29",
        "default": "45, none",
        "kept": "30, none",
    }.items():
        assert re.search(rf"^\| .*{words}.* \| {size(use).mean():.1f} \| {size(use).max():.1f} \|$", page, re.MULTILINE)
