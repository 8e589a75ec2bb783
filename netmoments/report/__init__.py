"""Studies of a network under noise, in the terminal, as files and as a page."""
