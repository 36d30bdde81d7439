"""Measure policies on named benchmarks with lm-evaluation-harness (package `lm_eval`, an extra).

This is not a stage: nothing in the pipeline depends on it, and DVC neither needs nor deletes its
records. It is loaded by name, as the stages are."""
