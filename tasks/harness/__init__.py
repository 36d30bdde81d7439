"""Policies on named benchmarks, by lm-evaluation-harness (the package `lm_eval`, an extra).

No stage: nothing of the pipeline depends on it, and DVC neither asks for its records nor deletes
them. Loaded by name, as the stages are."""
