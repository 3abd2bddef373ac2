"""Ways to start a server under the module names that vLLM's users know."""
