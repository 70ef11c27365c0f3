"""Owner first: measuring the owner's use of a node and making borrowed work yield to it."""
