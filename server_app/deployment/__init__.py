"""The server and the sites as real processes: keys, the guard and the commands that start them."""
