"""The data plane: how bytes get from D into an arena."""
