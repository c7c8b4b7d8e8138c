"""repositories."""
