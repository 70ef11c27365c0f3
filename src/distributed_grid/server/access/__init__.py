"""Access over the network: tokens of users and nodes, admission, certificates, WebSockets of agents."""
