"""Several hosts on one machine, for tests, benchmarks, and a try at home."""
