"""``python -m kitty`` is the command line; the workflow calls it so, with its own interpreter."""

from kitty.cli import main

if __name__ == "__main__":
    main()
