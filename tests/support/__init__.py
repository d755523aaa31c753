"""What several tests of the whole system share."""
