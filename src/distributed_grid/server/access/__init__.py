"""Who gets in over the network, and where: the TCP port, certificates, tokens, agents' sockets."""
