"""Example extensions: a dataset, a partition, a model and a method; see docs/extending.md."""
