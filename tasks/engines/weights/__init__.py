"""How new weights reach vLLM's servers."""
