"""What can be set about a server, and what is checked before it starts."""
