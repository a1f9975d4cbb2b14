"""The client code that all methods share: data, training and state of one client."""
