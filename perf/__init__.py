"""Proofs of the figures that we publish: `python -m perf.prove`."""
