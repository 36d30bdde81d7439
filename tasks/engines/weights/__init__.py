"""The transfer of new weights to vLLM's servers."""
