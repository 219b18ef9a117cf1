"""How often to save, and what failures and saves cost a run: formulas, and a simulator that checks them. Pure."""
