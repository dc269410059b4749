"""Scores and visibility that come with a plan: MSL text in its instantiations gives what the base text gives."""

from __future__ import annotations

import dataclasses

import numpy as np
import plans
import pytest
from plans import Problem

from jax_mfa import metal
from jax_mfa.arguments import specify
from jax_mfa.metal import plans as launch_plans
from jax_mfa.metal.problem import Rules

# the soft cap of score.h, and causality, written as a user's would be
CAPPED = """
struct Capped : Score {
  using Score::Score;

  INLINED bool of(float product, int row, int column, thread float& x) const {
    x = 1.5f * precise::tanh(product * scale / 1.5f);
    return true;
  }

  INLINED float derivative(float product, int row, int column) const {
    const float e = fast::exp2(-2.0f * log2_e * fabs(product * scale / 1.5f));
    return 4.0f * e / ((1.0f + e) * (1.0f + e));
  }
};
"""
CAUSAL = """
struct Causal : Visibility {
  using Visibility::Visibility;

  INLINED bool by_bands() const {
    return false;
  }

  template <bool ALONE = false, bool WITH_MASK = true>
  INLINED int of_tile(int row, int n, int column, int m) const {
    return min(Visibility::of_tile<ALONE, WITH_MASK>(row, n, column, m), some_visible);
  }

  INLINED bool visible(int row, int column) const {
    return Visibility::visible(row, column) && column <= row + offset;
  }
};
"""


def ran(problem: Problem, rules: Rules, **static) -> plans.Ran:
    """Both passes of a problem under these rules, which take the place of what its specification says."""
    arguments = problem.arguments() | static
    spec, operands = specify(**arguments)
    arrays = {name: np.asarray(x) for name, x in metal.launch_arrays(spec, operands).items()}
    if rules.score != "Score":
        spec = dataclasses.replace(spec, logits_soft_cap=None)
    if rules.visibility != "Visibility":
        spec = dataclasses.replace(spec, is_causal=False)

    def plan(of_pass):
        return getattr(launch_plans, of_pass)(spec, arrays, variant=problem.variant, rules=rules)

    return plans.both(plan, arrays, problem.cotangents(arguments))


@pytest.mark.share(4)
@pytest.mark.parametrize("variant", ["staged", "direct", "portable"])
def test_a_score_that_rides_in_a_plan(variant):
    """The same bits as the feature that it copies."""
    problem = Problem(N=4, K=2, variant=variant, is_causal=True, query_offset=3)
    given = ran(problem, Rules("Capped", "Visibility", CAPPED), logits_soft_cap=1.5)
    wanted = ran(problem, Rules(), logits_soft_cap=1.5)
    assert given.reports == []
    for name in ("out", "row_max", "row_sum", "d_query", "d_key", "d_value"):
        np.testing.assert_array_equal(given.arrays[name], wanted.arrays[name], err_msg=name)


@pytest.mark.share(4)
@pytest.mark.parametrize(
    "variant, t, s", [("staged", 37, 53), ("direct", 37, 53), ("portable", 37, 53), ("staged", 2, 530)]
)
def test_a_visibility_that_rides_in_a_plan(variant, t, s):
    """In decoding too. Right by the oracle: tiles that it cannot skip may change the order of sums."""
    problem = Problem(T=t, S=s, N=4, K=2, variant=variant, is_causal=True, query_offset=3)
    plans.assert_right(problem, ran(problem, Rules("Score", "Causal", CAUSAL)))
