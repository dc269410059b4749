"""What tests compare by: a failure names the worst place, and nothing that differs passes."""

import numpy as np
import pytest
from harness import assert_allclose, assert_within


def test_a_failing_comparison_names_the_worst_place():
    got, expected = np.zeros((2, 3)), np.zeros((2, 3))
    got[0, 1], got[1, 2] = 0.5, -3
    with pytest.raises(AssertionError) as caught:
        assert_within(got, expected, 0.25, "out")
    words = "out: worst at [1, 2]: -3.0, expected 0.0, allowed 0.25, 12 times that; 2 of 6 are beyond it"
    assert str(caught.value) == words


@pytest.mark.parametrize(
    "got, expected",
    [(np.nan, 1), (1, np.nan), (np.inf, 1), (np.inf, -np.inf), (1, np.inf), (1 + 1e-3j, 1), (1, 1.01), (-1, 1)],
)
def test_what_differs_does_not_pass(got, expected):
    with pytest.raises(AssertionError):
        assert_allclose(np.full((2, 2), got), np.full((2, 2), expected), rtol=1e-4, atol=1e-4)


def test_what_is_near_passes():
    assert_allclose([np.nan, np.inf, -np.inf, 1, 0], [np.nan, np.inf, -np.inf, 1.00001, 1e-9], rtol=1e-4, atol=1e-8)
    assert_within(np.zeros((0, 3)), np.zeros((0, 3)), 0)
    with pytest.raises(AssertionError, match="shape"):
        assert_within(np.zeros(3), np.zeros((1, 3)), 1)
