"""The container image: its run script, and the commands that build and inspect it."""
