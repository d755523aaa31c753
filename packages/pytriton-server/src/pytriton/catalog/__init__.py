"""What a running server has: its models as tables, JSON and OpenAPI; values as people write them."""
