"""The server's side of the application: settings, runs, results and the command line."""
