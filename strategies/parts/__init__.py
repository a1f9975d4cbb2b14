"""Parts of methods, and what several methods share: each a piece of mathematics with its messages and its state."""
