"""What goes wrong on purpose: peers that misbehave, links that break, processes that fork."""
