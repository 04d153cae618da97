"""The numbers of a comparison: t quantiles are those of tables and scipy, deviations by hand."""

from __future__ import annotations

import pytest

from vitinit.runs.results import mean_and_std, t_quantile


def test_t_quantiles_are_those_of_printed_tables_and_of_scipy():
    for degrees, quantile in ((1, 12.706205), (2, 4.302653), (3, 3.182446), (120, 1.979930)):
        assert t_quantile(degrees) == pytest.approx(quantile, abs=5e-7)
    stats = pytest.importorskip("scipy.stats")
    for degrees in (1, 2, 3, 4, 7, 16, 53):
        for confidence in (0.5, 0.9, 0.99):
            expected = stats.t.ppf((1 + confidence) / 2, degrees)
            assert t_quantile(degrees, confidence) == pytest.approx(expected, rel=1e-9)


def test_the_deviation_is_that_of_a_sample_and_one_value_has_none():
    assert mean_and_std([50.0, 54.0, 58.0]) == "54.00 ± 4.00"
    assert mean_and_std([50.0]) == "50.00"
    assert mean_and_std([11.0, 12.0], places=0) == "12 ± 1"      # 11.5, .71
