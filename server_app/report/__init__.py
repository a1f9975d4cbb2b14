"""The report of a run: its content, its figures and its page."""
