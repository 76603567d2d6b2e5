"""`python -m llmbuild` is the `llmbuild` command."""

from llmbuild.cli import main

if __name__ == "__main__":
    main()
