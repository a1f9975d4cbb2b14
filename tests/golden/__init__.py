"""The bits that small runs of every method come to, as they were recorded."""
