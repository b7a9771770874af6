"""Carried operations: recurrences and causal convolutions that take a state in and hand a state on."""
