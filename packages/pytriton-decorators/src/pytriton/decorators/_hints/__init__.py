"""Models from the type hints of a function or class: what `model` does."""
