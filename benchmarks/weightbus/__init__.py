"""Parts of bench_weightbus."""
