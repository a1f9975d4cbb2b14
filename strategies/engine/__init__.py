"""The round engine: the server code that all methods share."""
