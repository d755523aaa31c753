"""Requests that nobody should send, for tests of what the server's front end makes of them."""
