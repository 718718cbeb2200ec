"""What runs inside a server: `farm_probe.py`, a vLLM plugin that farm.probing carries there."""
