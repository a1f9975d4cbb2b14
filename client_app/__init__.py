"""The client's side of the application."""
