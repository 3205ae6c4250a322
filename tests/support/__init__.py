"""What several kinds of tests, and benchmarks, build their runs of."""
