"""Measurements, each printed as ratios from one run: python -m benchmarks.NAME."""
