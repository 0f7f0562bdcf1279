"""Time measurements on a GPU: the ops alone (``kitty bench ops``)."""
