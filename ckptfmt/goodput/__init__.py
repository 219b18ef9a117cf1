"""The interval of saves, and the cost of failures and saves: formulas and a simulator. Pure."""
