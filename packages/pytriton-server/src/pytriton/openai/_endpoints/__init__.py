"""The endpoints, by what they answer."""
