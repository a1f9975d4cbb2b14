"""The server's side of the application: settings, the run, its results, and the command line."""
