"""The conversation at the terminal: the loop, the slash commands, the line editor."""
