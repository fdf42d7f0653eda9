"""What only the commands ask vLLM: its options, its switches, its finished config for a card that is not here."""
