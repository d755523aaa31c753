"""What texts are to be: JSON, a schema, calls of tools."""
