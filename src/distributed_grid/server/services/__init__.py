"""What can be asked of the grid: one service per noun, used by the socket and by REST."""
