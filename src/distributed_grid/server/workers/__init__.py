"""Workers of providers: which providers there are, calls to them, join tokens, and the reconciler of both sides."""
