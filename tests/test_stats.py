"""Intervals, tests and tie-breaking against values worked out by hand or by other means."""

from __future__ import annotations

import math
import random
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tuner import stats

positive = st.floats(0.5, 2.0)


def test_a_log_ratio_is_the_mean_over_blocks_of_the_paired_log_ratio() -> None:
    baseline, chosen = np.array([[2.0, 8.0], [1.0, 1.0]]), np.array([[1.0, 2.0], [1.0, 4.0]])
    assert stats.log_ratios(baseline, chosen) == pytest.approx([1.5 * math.log(2), -math.log(2)])


def test_the_t_interval_by_hand() -> None:
    # mean 0.02, standard deviation 0.01, three processes: t(0.975, 2) = 4.302653 from the printed table.
    found = stats.t_interval(np.array([0.01, 0.02, 0.03]))
    half = 4.302653 * 0.01 / math.sqrt(3)
    assert found.ratio == pytest.approx(math.exp(0.02))
    assert found.low == pytest.approx(math.exp(0.02 - half), rel=1e-7)
    assert found.high == pytest.approx(math.exp(0.02 + half), rel=1e-7)


def test_p_values_by_hand() -> None:
    # t = 0.02 / (0.01 / sqrt 3) = 3.4641 with 2 degrees of freedom; p = 1 - t / sqrt(2 + t^2) in closed form.
    values = np.array([0.01, 0.02, 0.03])
    t = 2 * math.sqrt(3)
    two_sided = 1 - t / math.sqrt(2 + t * t)
    assert stats.p_value(values) == pytest.approx(two_sided)
    assert stats.p_value(values, "above") == pytest.approx(two_sided / 2)
    assert stats.p_value(values, "below") == pytest.approx(1 - two_sided / 2)
    assert stats.p_value(np.zeros(4)) == 1.0
    assert stats.p_value(np.full(4, 0.5)) == 0.0


def test_one_process_gives_neither_interval_nor_p() -> None:
    assert stats.t_interval(np.array([0.1])) == stats.Interval(math.exp(0.1), None, None)
    assert stats.p_value(np.array([0.1])) is None


@given(st.lists(st.floats(-0.3, 0.3), min_size=2, max_size=8))
def test_exchanging_the_arms_turns_the_interval_round(values: list[float]) -> None:
    one, other = stats.t_interval(np.array(values)), stats.t_interval(-np.array(values))
    assert one.low is not None and other.high is not None
    assert one.low * other.high == pytest.approx(1)
    # p holds as many digits as rounding leaves of the standard error.
    p, q = stats.p_value(np.array(values)), stats.p_value(-np.array(values))
    assert p == pytest.approx(q)


def test_the_t_interval_covers_the_truth_nineteen_times_in_twenty() -> None:
    draws = np.random.default_rng(3).normal(0.0, 0.01, (2000, 5))
    intervals = [stats.t_interval(row) for row in draws]
    covered = sum(i.low <= 1 <= i.high for i in intervals if i.low is not None and i.high is not None)
    # Binomial(2000, 0.95) has standard deviation 9.7.
    assert abs(covered - 1900) < 40


def noisy(seed: int, shape: tuple[int, int, int], ratio: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    process = rng.normal(0, 0.01, (shape[0], 1, 1))
    baseline = 20 * ratio * np.exp(process + rng.normal(0, 0.003, shape))
    chosen = 20 * np.exp(rng.normal(0, 0.003, shape))
    return baseline, chosen


def test_the_bootstrap_gives_the_same_digits_for_the_same_seed_and_others_for_another() -> None:
    baseline, chosen = noisy(1, (4, 2, 3), 1.05)
    first = stats.bootstrap_interval(baseline, chosen, 7, replicates=3000)
    assert first == stats.bootstrap_interval(baseline.copy(), chosen.copy(), 7, replicates=3000)
    assert first != stats.bootstrap_interval(baseline, chosen, 8, replicates=3000)
    assert first.low is not None and first.high is not None and first.low < first.ratio < first.high


def test_the_bootstrap_of_two_constant_processes_by_hand() -> None:
    # Process ratios 2 and 8: a replicate is 2, 4 or 8 with 1/4, 1/2, 1/4; the 95 % ends are 2 and 8, the 40 % ones 4.
    chosen = np.ones((2, 2, 3))
    baseline = chosen * np.array([2.0, 8.0])[:, None, None]
    wide = stats.bootstrap_interval(baseline, chosen, 1, 0.95, 4000)
    narrow = stats.bootstrap_interval(baseline, chosen, 1, 0.4, 4000)
    assert (wide.ratio, wide.low, wide.high) == pytest.approx((4, 2, 8))
    assert (narrow.low, narrow.high) == pytest.approx((4, 4))


@pytest.mark.parametrize("repeats", [1, 2, 3, 4, 6])
def test_the_bootstrap_agrees_with_a_plain_loop(repeats: int) -> None:
    baseline, chosen = noisy(2, (3, 2, repeats), 1.02)
    baseline[:, 1] *= 1.03  # blocks differ, so that drawing them matters
    found = stats.bootstrap_interval(baseline, chosen, 1, 0.9, 20_000)
    draw = random.Random(5)
    plain = []
    for _ in range(1500):
        total = 0.0
        for _ in range(3):
            p = draw.randrange(3)
            for _ in range(2):
                b = draw.randrange(2)
                medians = [
                    np.median([arm[p, b, draw.randrange(repeats)] for _ in range(repeats)])
                    for arm in (baseline, chosen)
                ]
                total += math.log(medians[0] / medians[1])
        plain.append(total / 6)
    low, high = np.exp(np.quantile(plain, [0.05, 0.95]))
    assert found.low == pytest.approx(low, abs=2e-3)
    assert found.high == pytest.approx(high, abs=2e-3)


def test_a_repeat_that_is_left_out_is_not_drawn() -> None:
    baseline, chosen = np.full((3, 2, 3), 2.0), np.ones((3, 2, 3))
    baseline[1, 1, 2] = np.nan
    found = stats.bootstrap_interval(baseline, chosen, 1, replicates=1000)
    assert (found.ratio, found.low, found.high) == pytest.approx((2, 2, 2))


def test_the_full_bootstrap_is_fast_enough_to_stand_beside_every_claim() -> None:
    baseline, chosen = noisy(3, (10, 12, 3))
    began = time.perf_counter()
    stats.bootstrap_interval(baseline, chosen, 1)
    assert time.perf_counter() - began < 8  # 0.6 to 1 s alone; other tests may run beside it


@given(st.lists(positive, min_size=1, max_size=5), st.lists(positive, min_size=1, max_size=5))
def test_ranges_overlap_if_one_holds_an_end_of_the_other(a: list[float], b: list[float]) -> None:
    holds = any(min(x) <= end <= max(x) for x, y in ((a, b), (b, a)) for end in (min(y), max(y)))
    assert stats.ranges_overlap(np.array(a), np.array(b)) == holds


def test_spread_is_about_each_blocks_own_median() -> None:
    block = np.linspace(0.9, 1.1, 101)
    assert stats.spread(np.stack([block, 7 * block])) == pytest.approx(0.18)
    assert stats.spread(np.array([[1.0, 1.0], [5.0, np.nan]])) == 0.0


def test_outliers_are_over_1_3_times_their_blocks_median() -> None:
    times = np.array([[10.0, 10.0, 13.0], [10.0, 10.0, 13.01]])
    assert stats.outliers(times).tolist() == [[False, False, False], [False, False, True]]


def test_drift_is_the_second_half_over_the_first_within_processes() -> None:
    assert stats.halves_drift(np.array([[10.0, 10.2], [20.0, 20.4]])) == pytest.approx(0.02)
    assert stats.halves_drift(np.array([[10.0, 99.0, 10.0]])) == 0.0


def test_holm_on_a_worked_example() -> None:
    # 4 x 0.005; 3 x 0.01; 2 x 0.03; then 0.04, which may not be under the one before.
    assert stats.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert stats.holm([]) == []
    assert stats.holm([0.9, 0.8]) == [1.0, 1.0]


@given(st.lists(st.floats(0, 1), min_size=1, max_size=6))
def test_holm_lies_between_the_p_value_and_bonferroni(values: list[float]) -> None:
    for value, corrected in zip(values, stats.holm(values), strict=True):
        assert value <= corrected <= min(1.0, len(values) * value)


def test_optimism_of_the_least_of_n_against_printed_order_statistics() -> None:
    # Means of the largest of n standard normals: 1/sqrt(pi) for 2, 3/(2 sqrt(pi)) for 3, 1.53875 for 10 (tables).
    assert stats.expected_optimism(2, 1.0) == pytest.approx(1 / math.sqrt(math.pi), abs=1e-6)
    assert stats.expected_optimism(3, 0.02) == pytest.approx(0.03 / math.sqrt(math.pi), abs=1e-7)
    assert stats.expected_optimism(10, 1.0) == pytest.approx(1.53875, abs=1e-4)
    assert stats.expected_optimism(1, 1.0) == stats.expected_optimism(0, 1.0) == 0.0


def test_relative_spread_pools_over_arms() -> None:
    e = math.e
    assert stats.relative_spread([[1.0, e], [5.0, 5.0 * e], [3.0]]) == pytest.approx(math.sqrt(0.5))
    assert stats.relative_spread([[1.0], []]) == 0.0


def test_the_tie_set_holds_what_the_noise_cannot_tell_apart_and_prefers_in_the_fixed_order() -> None:
    samples = {
        "fast": [10.0, 10.1, 9.9, 10.0],
        "near": [10.05, 10.1, 10.0, 10.06],
        "far": [12.0, 12.1, 11.9, 12.0],
    }
    assert stats.tie_set(samples, {"fast": (1,), "near": (0,), "far": (-1,)}) == ["near", "fast"]
    assert stats.tie_set(samples, {"fast": (0,), "near": (1,), "far": (2,)}) == ["fast", "near"]


def test_arms_within_half_a_percent_tie_without_any_noise() -> None:
    samples = {"a": [1000.0] * 3, "b": [1004.9] * 3, "c": [1005.1] * 3}
    assert stats.tie_set(samples, {"a": (2,), "b": (1,), "c": (0,)}) == ["b", "a"]


def test_of_two_equal_medians_the_preferred_one_is_the_best_whose_noise_counts() -> None:
    samples = {"quiet": [10.0, 10.0, 10.0], "noisy": [9.0, 10.0, 11.0], "slow": [10.6, 10.6, 10.6]}
    for order in (("quiet", "noisy", "slow"), ("noisy", "quiet", "slow")):
        given_in = {arm: samples[arm] for arm in order}
        assert stats.tie_set(given_in, {"noisy": (0,), "quiet": (1,), "slow": (2,)}) == ["noisy", "quiet", "slow"]
        assert stats.tie_set(given_in, {"noisy": (1,), "quiet": (0,), "slow": (2,)}) == ["quiet", "noisy"]


@settings(max_examples=50)
@given(
    st.dictionaries(st.integers(0, 20), st.lists(st.floats(9, 11), min_size=1, max_size=5), min_size=1, max_size=8),
    st.randoms(use_true_random=False),
)
def test_the_tie_set_does_not_depend_on_the_order_of_arms(samples: dict[int, list[float]], draw: random.Random) -> None:
    preference = {arm: (arm % 3, arm) for arm in samples}
    keys = list(samples)
    draw.shuffle(keys)
    found = stats.tie_set(samples, preference)
    assert found == stats.tie_set({key: samples[key] for key in keys}, preference)
    assert min(samples, key=lambda arm: (float(np.median(samples[arm])), preference[arm])) in found
