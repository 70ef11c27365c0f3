"""Owner first: measuring the owner's use of a machine and making borrowed work yield to it."""
