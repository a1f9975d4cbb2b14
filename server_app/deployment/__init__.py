"""A server and sites as real processes: keys, guards and the commands that start them."""
