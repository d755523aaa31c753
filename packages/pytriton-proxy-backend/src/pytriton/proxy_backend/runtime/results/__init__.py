"""What callables give: its steps, and whether it is what the model declares."""
