"""Train state-space and recurrent models on very long sequences within a byte budget, with exact gradients."""
