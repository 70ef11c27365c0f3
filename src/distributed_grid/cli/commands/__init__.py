"""One module per command group of `grid`, imported when the command is used."""
