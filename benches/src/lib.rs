//! Benchmarks: every figure is a ratio taken in one run.
