"""`python -m kindred`: the same as the command `kindred`."""

from kindred.server_app.cli.run import main

if __name__ == "__main__":
    main()
