"""Plans on several ranks: what a mesh asks for, what ranks agree on, which parameters stay where."""
