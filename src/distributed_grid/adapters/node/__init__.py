"""Operations on a node, whichever transport leads there: the node script, installation, the agent's link."""
