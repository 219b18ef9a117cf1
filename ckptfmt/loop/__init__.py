"""The loop of a training: steps, intervals, stops, triggers, launches and the witness."""
