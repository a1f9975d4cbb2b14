"""The client's side of every method: data, training and state of one client."""
