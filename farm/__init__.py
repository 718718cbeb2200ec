"""The patch farm: evidence for patched vLLM trees, one Ray actor per card."""
