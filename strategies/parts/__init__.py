"""Parts of methods, some shared by several methods: each has a piece of mathematics, its messages and its state."""
