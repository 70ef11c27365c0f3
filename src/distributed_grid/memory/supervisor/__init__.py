"""The agent's supervisor of its memory server: starts it, holds what it holds, restarts it when it dies."""
