"""Part of the suite that `examples/distributed_tests.py` spreads over workers."""

from __future__ import annotations

import math
import unittest


class NumbersTest(unittest.TestCase):
    def test_pi_is_what_a_series_says(self) -> None:
        series = 4 * sum((-1) ** k / (2 * k + 1) for k in range(300_000))
        self.assertAlmostEqual(series, math.pi, places=5)

    def test_every_even_number_is_a_sum_of_two_primes(self) -> None:
        primes = [n for n in range(2, 2_000) if all(n % d for d in range(2, math.isqrt(n) + 1))]
        known = set(primes)
        for even in range(4, 2_000, 2):
            self.assertTrue(any(even - prime in known for prime in primes), even)


if __name__ == "__main__":
    unittest.main()
