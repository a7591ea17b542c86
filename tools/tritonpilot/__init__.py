"""Triton Pilot: from one small file per service to a served, batched, measured Triton model."""

__version__ = "0.1.0"
