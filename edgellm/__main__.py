"""`python -m edgellm`: the command line."""

from edgellm.cli import main

if __name__ == "__main__":
    main()
