"""The round engine: what every method shares on the server's side."""
