"""Says what the served model is and can do, and changes it: its weights and its adapters."""
