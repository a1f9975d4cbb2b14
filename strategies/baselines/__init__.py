"""The methods that personalised learning is compared with, one per file."""
