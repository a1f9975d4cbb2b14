"""A dataset, a partition, a model and a method of somebody else's: see docs/extending.md."""
