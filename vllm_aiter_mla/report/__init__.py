"""What engaged, what was refused, and why."""
